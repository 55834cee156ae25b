"""A run and its resumptions are one run of the experiment tracker, which also gets the pictures.

python -m pytest tests/results/test_trackers.py
"""

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from finished import Finished
from PIL import Image
from ranks import accelerator_of, leave_group
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mnist_ddp.errors import UserError
from mnist_ddp.results.write import log_pictures
from mnist_ddp.training.tracker import log_metrics, start_tracker

OPTIONAL = ("trackio", "wandb", "mlflow")


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def log(name: str, folder: Path, *steps: int) -> dict[str, Any]:
    """What one start of a run does with its tracker: tracker.json."""
    accelerator = accelerator_of(log_with=name, project_dir=str(folder))
    start_tracker(accelerator, name, folder, {"lr": 0.1, "gpu": ""}, first_step=steps[0])
    for step in steps:
        accelerator.log({"loss": 1 / step}, step=step)
    for tracker in accelerator.trackers:
        tracker.finish()
    return json.loads((folder / "tracker.json").read_text())


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    leave_group()


def read_tensorboard(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    return events.Reload()


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_tracker_that_is_not_installed_is_one_line_at_the_start(name: str, tmp_path: Path) -> None:
    if is_installed(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(UserError, match=rf"^--log_with {name}: needs the package {name}: pip install {name}$"):
        accelerator_of(log_with=name, project_dir=str(tmp_path))


def test_tensorboard_has_metrics_and_pictures_of_a_run(finished: Finished) -> None:
    events = read_tensorboard(finished.folder / "tensorboard")
    for name in ("val_accuracy", "train_loss"):
        logged = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(line["step"], line[name]) for line in finished.ended.metrics]
        assert [step for step, _ in logged] == [step for step, _ in expected]
        assert [value for _, value in logged] == pytest.approx([value for _, value in expected])
    for picture in (finished.folder / "pictures").iterdir():
        (event,) = events.Images(f"pictures/{picture.stem}")
        with Image.open(picture) as image:
            assert (event.width, event.height) == image.size
        assert event.step == finished.ended.metrics[-1]["step"]


def test_a_full_disk_is_told_once(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    accelerator = accelerator_of(log_with="tensorboard", project_dir=str(small_disk))
    with open(small_disk / "large", "wb", buffering=0) as large, contextlib.suppress(OSError):
        while large.write(bytes(4096)):
            pass
    cause = r"No space left on device; earlier checkpoints are intact, .*"
    with pytest.raises(UserError, match=rf"^cannot write {small_disk}/tensorboard: {cause}$"):
        log_metrics(accelerator, "tensorboard", small_disk, {"lr": 0.1}, {"step": 10, "loss": 0.1})
    assert "Traceback" not in capfd.readouterr().err


def test_tensorboard_drops_what_a_killed_run_logged_beyond_its_checkpoint(tmp_path: Path) -> None:
    first = log("tensorboard", tmp_path, 10, 20, 30)
    assert log("tensorboard", tmp_path, 20, 30, 40) == first
    logged = read_tensorboard(tmp_path / "tensorboard").Scalars("loss")
    assert [event.step for event in logged] == [10, 20, 30, 40]
    settings = list((tmp_path / "tensorboard").glob("*/hparams.yml"))
    assert len(settings) == 1, "they were logged again"


@pytest.mark.parametrize("text", [json.dumps({"tracker": "wandb", "run": "known to wandb"}), '{"tracker": "tens', "[]"])
def test_another_tracker_starts_another_run_as_does_a_damaged_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "tracker.json").write_text(text)
    assert log("tensorboard", tmp_path, 1)["tracker"] == "tensorboard"


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.filterwarnings("ignore")  # of other people's packages
def test_other_trackers_go_on_in_the_same_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_installed(name):
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no other store
    monkeypatch.chdir(tmp_path)
    first = log(name, tmp_path, 10)
    assert first["tracker"] == name
    leave_group()
    assert log(name, tmp_path, 20) == first


def test_a_tracker_that_takes_no_pictures_gets_none(tmp_path: Path) -> None:
    class Tracker:
        name = "trackio"

    log_pictures(Tracker(), [tmp_path / "none.png"], step=1)
