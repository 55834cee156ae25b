"""The folder of a run. One process writes it; every file appears whole or not at all."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from mnist_ddp.errors import UserError
from mnist_ddp.settings import Settings, dump_settings
from mnist_ddp.training.evaluation import Evaluation
from mnist_ddp.training.state import TrainingState

SETTINGS, METRICS, RESULT, MODEL = "settings.yaml", "metrics.jsonl", "result.json", "cnn"
# All that a run writes: what `--resume never` removes, so that other files in the folder survive it.
_OURS = (SETTINGS, METRICS, RESULT, MODEL, "checkpoints", "tensorboard", "report.html")


class RunFolder:
    """The files of one run.

    Args:
        path: is created where it does not exist.
        resume: "auto" refuses a folder that holds a run, "never" removes that run.

    Raises:
        UserError: the folder holds a run, or cannot be written.
    """

    def __init__(self, path: str | Path, resume: Literal["auto", "never"]) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / ".writable", b"")
            (self.path / ".writable").unlink()
            held = [name for name in _OURS if (self.path / name).exists()]
            if held and resume == "auto":
                raise UserError(
                    f"--pt_path {path} holds a run already ({held[0]}); choose another folder, "
                    "or --resume never to replace it"
                )
            for name in held:
                target = self.path / name
                shutil.rmtree(target) if target.is_dir() else target.unlink()
        except OSError as error:
            raise UserError(f"--pt_path {path} cannot be written: {error.strerror}; choose another folder") from error

    def write_settings(self, settings: Settings) -> None:
        write_whole(self.path / SETTINGS, dump_settings(settings).encode())

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Adds one line to metrics.jsonl."""
        with open(self.path / METRICS, "a") as file:
            file.write(json.dumps(line) + "\n")

    def write_result(self, state: TrainingState, test: Evaluation | None, **surroundings: Any) -> dict[str, Any]:
        """Writes result.json and returns what is in it.

        Args:
            state: after the last epoch.
            test: of the best weights; None where training never got that far.
            surroundings: further entries, such as the world size.
        """
        result = {
            "status": state.status,
            "epochs": state.epoch,
            "best_epoch": state.best_epoch,
            "best_val_accuracy": state.best_val_accuracy,
            "test_loss": test.loss if test else None,
            "test_accuracy": test.accuracy if test else None,
            "num_test": test.count if test else None,
            **surroundings,
        }
        write_whole(self.path / RESULT, (json.dumps(result, indent=2) + "\n").encode())
        return result

    def save_model(self, model: Any) -> None:
        """Writes `model.save_pretrained` to cnn/, in place of an older one."""
        replace_folder(self.path / MODEL, lambda folder: model.save_pretrained(folder))


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that other programs see complete or not at all, and that survives a power cut once this returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def replace_folder(path: Path, fill: Callable[[Path], Any]) -> None:
    """Puts a folder that `fill` has filled in the place of `path`.

    A folder cannot be renamed over another, so for an instant there is none; the old one is beside it then.
    """
    temporary, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("new", "old"))
    for leftover in (temporary, old):  # of a killed run
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    fill(temporary)
    umask = os.umask(0)
    os.umask(umask)
    for file in temporary.iterdir():
        file.chmod(0o666 & ~umask)  # safetensors writes 0600
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    sync_folder(temporary)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
