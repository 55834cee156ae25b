"""One real run that leaves all that a run can leave, and what several test files look at in it."""

from pathlib import Path

import hub
import pytest
from finished import REPOSITORY, TOKEN, Finished
from launching import run


@pytest.fixture(scope="session")
def finished(small_csv: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished") / "run"
    command = f"python train_accel.py --mnist_file_path {small_csv} --batch_size 64 --width 4 --epochs 2"
    with hub.serve(TOKEN) as server:
        ended = run(
            f"{command} --warmup_steps 0 --push_to_hub {REPOSITORY}",
            folder,
            HF_ENDPOINT=server.address,
            HF_TOKEN=TOKEN,
            HF_HUB_DISABLE_XET="1",  # the stand-in takes files over plain HTTP
        )
    assert ended.status == 0, ended
    return Finished(ended, folder, server.repositories)
