"""The folder of a run. One process writes it; every file appears whole or not at all."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import accelerate
import torch

import mnist_ddp
from mnist_ddp.data.loaders import Splits
from mnist_ddp.errors import UserError
from mnist_ddp.files import replace_folder, write_whole
from mnist_ddp.settings import MAY_CHANGE, Settings, dump_settings
from mnist_ddp.training.checkpoint import Checkpoints, Snapshot, gone, writing
from mnist_ddp.training.state import TrainingState

SETTINGS, METRICS, RESULT, MODEL, CHECKPOINTS = "settings.yaml", "metrics.jsonl", "result.json", "cnn", "checkpoints"
# All that a run writes: what `--resume never` removes, so that other files in the folder survive it.
_OURS = (
    *(SETTINGS, METRICS, RESULT, MODEL, CHECKPOINTS, "tensorboard", "profile", "tracker.json"),
    *("report.json", "report.html", "pictures"),
)


def describe_run(settings: Settings, splits: Splits, processes: int) -> dict[str, Any]:
    """What makes a run the same run, in JSON values: the same on all of its processes, and when it resumes."""
    return {
        "settings": {name: value for name, value in asdict(settings).items() if name not in MAY_CHANGE},
        "images": [subset.image_set.fingerprint() for subset in splits],
        "global_batch": settings.batch_size * processes * settings.gradient_accumulation_steps,
        "versions": {
            "torch": torch.__version__,
            "accelerate": accelerate.__version__,
            "mnist_ddp": mnist_ddp.__version__,
        },
    }


class RunFolder:
    """The files of one run, locked against a second one for as long as this process lives.

    Args:
        path: is created where it does not exist.
        resume: "never" replaces the run that it holds, once a new one begins.
        keep_checkpoints: how many to keep.

    Raises:
        UserError: the folder cannot be written, or another run is using it.
    """

    def __init__(self, path: str | Path, resume: Literal["auto", "never"], keep_checkpoints: int) -> None:
        self.path = Path(path)
        self._replace = resume == "never"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / ".writable", b"")
            (self.path / ".writable").unlink()
            self._take_lock()
        except OSError as error:
            raise UserError(f"--pt_path {path} cannot be written: {error.strerror}; choose another folder") from error
        self.checkpoints = Checkpoints(self.path / CHECKPOINTS, keep_checkpoints)

    def _take_lock(self) -> None:
        # Never closed: the kernel drops the lock with the process, however it ends.
        self._lock = os.open(self.path / ".lock", os.O_CREAT | os.O_WRONLY, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--pt_path {self.path}: another run is using this folder; wait for it, or choose another"
            ) from None

    def resume(self, run: Mapping[str, Any]) -> tuple[Snapshot | None, dict[str, Any] | None, list[str]]:
        """Where the run in this folder stands.

        Args:
            run: what identifies this run, see `describe_run`.

        Returns:
            Its newest whole checkpoint and, where it is complete, its result, each None where there is none; and lines
            to print.

        Raises:
            UserError: the run in the folder has other settings or data, or all of its checkpoints are damaged.
        """
        snapshot, notes = (None, []) if self._replace else self.checkpoints.newest()
        if snapshot is None:
            return None, None, notes
        saved = snapshot.values["run"]
        changed = [
            f"--{name} {saved['settings'].get(name)!r} -> {value!r}"
            for name, value in run["settings"].items()
            if saved["settings"].get(name) != value
        ]
        saved_version, version = saved["versions"]["mnist_ddp"], run["versions"]["mnist_ddp"]
        if saved_version != version:  # its network or its order of images may be another
            changed.append(f"mnist_ddp {saved_version} -> {version}")
        if saved["images"] != run["images"]:
            changed.append("the images are not the same")
        if changed:
            raise UserError(
                f"--pt_path {self.path} holds a run with other settings ({'; '.join(changed)}); "
                "choose another folder, or --resume never to replace it"
            )
        if saved["global_batch"] != run["global_batch"]:
            notes.append(
                f"the global batch changes from {saved['global_batch']} to {run['global_batch']}: from here on the run "
                "differs from an uninterrupted one"
            )
        return snapshot, self._result(), notes

    def _result(self) -> dict[str, Any] | None:
        """The outcome of a run whose model and report are there as well; None: they are to be made, or made again."""
        if not all((self.path / name).exists() for name in (f"{MODEL}/model.safetensors", "report.json")):
            return None
        with contextlib.suppress(OSError, ValueError):
            result = json.loads((self.path / RESULT).read_text())
            if isinstance(result, dict) and {"status", "epochs", "test_accuracy"} <= result.keys():
                return result
        return None

    def begin(self, settings: Settings, state: TrainingState) -> None:
        """Writes settings.yaml, and brings metrics.jsonl to where `state` stands; removes a run that is replaced.

        The metrics of a resumed run may be a line ahead of its checkpoint, or behind.

        Raises:
            UserError: there is no room for the checkpoints and the model.
        """
        # Of each parameter a checkpoint holds up to five copies: itself, average, best and two moments. One more
        # checkpoint than are kept exists while it is written, and two copies of the model.
        copies = 5 * (self.checkpoints.keep + 1) + 2
        needed = copies * sum(tensor.nbytes for tensor in state.module.state_dict().values()) + (1 << 20)
        ours = (self.path / name for name in (CHECKPOINTS, MODEL))  # is replaced
        used = sum(file.stat().st_size for folder in ours for file in folder.rglob("*") if file.is_file())
        free = shutil.disk_usage(self.path).free + used
        if free < needed:
            raise UserError(
                f"--pt_path {self.path}: the run needs {needed / 1e6:,.1f} MB, "
                f"and there is room for {free / 1e6:,.1f} MB"
            )
        settings_path = self.path / SETTINGS
        with writing(settings_path, self.path):
            for name in _OURS if self._replace else ():
                target = self.path / name
                shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
            write_whole(settings_path, dump_settings(settings).encode())
            lines = "".join(json.dumps(line) + "\n" for line in state.history)
            write_whole(self.path / METRICS, lines.encode())

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Adds one line to metrics.jsonl."""
        with writing(self.path / METRICS, self.path), open(self.path / METRICS, "a") as file:
            file.write(json.dumps(line) + "\n")

    def write_result(self, result: Mapping[str, Any]) -> None:
        with writing(self.path / RESULT, self.path):
            # A kill before the new report is there must not leave an older one, which would pass for it.
            (self.path / "report.json").unlink(missing_ok=True)
            write_whole(self.path / RESULT, (json.dumps(result, indent=2) + "\n").encode())

    def save_model(self, model: Any) -> None:
        """Writes `model.save_pretrained` to cnn/, in place of an older one."""

        def fill(folder: Path) -> None:
            model.save_pretrained(folder)
            self._check_there()  # it makes missing parents: the run would go on in a folder with nothing but a model

        try:
            with writing(self.path / MODEL, self.path):
                replace_folder(self.path / MODEL, fill)
        except UserError:
            with contextlib.suppress(OSError):
                self.path.rmdir()  # only where it is empty: made anew
            raise

    def _check_there(self) -> None:
        """Raises UserError where the folder at `path` is not the one that was locked."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path / ".lock"), os.fstat(self._lock)):
                return
        raise gone(self.path)
