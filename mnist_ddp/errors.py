"""What a user can put right, and how it is told: in one line, once."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator

# Stop signals that this process has had while training handled them: its launcher may be ending it.
stop_signals_received: set[int] = set()


class UserError(ValueError):
    """A mistake in the input, the settings or the surroundings of a run.

    The message is one line that names the file, row and column or the flag, and says what to do.
    """


def wait_for_first_speaker(seconds: float = 3.0) -> None:
    """Lets the first process of this machine report an error that all of them may have met.

    The launcher ends the others as soon as the first has left. One that is alone with its error goes on after the wait.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(seconds)


def tell(error: UserError) -> None:
    """Says it once for all processes of this machine, see `wait_for_first_speaker`."""
    wait_for_first_speaker()
    print(f"error: {error}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def exit_with_one_line() -> Iterator[None]:
    """Turns a UserError into one line on stderr and exit status 2, without a traceback."""
    try:
        yield
    except UserError as error:
        tell(error)
        sys.exit(2)
