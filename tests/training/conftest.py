"""The project's Accelerator in the test process itself, for tests of a single process."""

from collections.abc import Iterator

import pytest
from accelerate import Accelerator
from ranks import accelerator_of, leave_group


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield accelerator_of()
    leave_group()
