"""The experiment tracker of a run, through Accelerate."""

import contextlib
import json
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mnist_ddp.files import write_whole
from mnist_ddp.training.checkpoint import writing


def log_metrics(
    accelerator: Accelerator, name: str, folder: Path, settings: Mapping[str, Any], metrics: Mapping[str, float]
) -> None:
    """Gives the metrics of an epoch to the experiment tracker, which is started with the first of them.

    Args:
        accelerator, name, folder, settings: see `start_tracker`.
        metrics: with the "step" that they belong to.

    Raises:
        UserError: TensorBoard's files, in the run folder, cannot be written.
    """
    values = dict(metrics)
    step = int(values.pop("step"))
    with writing(folder / name, folder) if name == "tensorboard" else contextlib.nullcontext():
        if not accelerator.trackers:  # not earlier: it imports for a second
            start_tracker(accelerator, name, folder, settings, first_step=step)
        accelerator.log(values, step=step)


def start_tracker(
    accelerator: Accelerator, name: str, folder: Path, settings: Mapping[str, Any], *, first_step: int
) -> None:
    """Starts the experiment tracker; where this run has had it before, it goes on in the same tracker run.

    Args:
        accelerator: made with this tracker.
        name: of the tracker.
        folder: of the run; tracker.json in it holds what the tracker calls this run.
        settings: are logged, once.
        first_step: of what will be logged; what a killed run has logged from there on is dropped by TensorBoard.
    """
    _tell_kept_failures_once()
    path = folder / "tracker.json"
    known = None
    with contextlib.suppress(
        OSError, ValueError, TypeError, KeyError
    ):  # without the file, or its content, it is a new run
        earlier = json.loads(path.read_text())
        known = str(earlier["run"]) if earlier["tracker"] == name else None
    run = known or f"{folder.resolve().name}-{uuid.uuid4().hex[:8]}"
    options: dict[str, Any] = {
        "tensorboard": {"purge_step": first_step},
        "trackio": {"name": run, "resume": "allow"},
        "wandb": {"id": run, "name": run, "resume": "allow", "dir": str(folder)},
        "mlflow": {"run_id": known} if known else {"run_name": run},
    }
    accelerator.init_trackers(
        "tensorboard" if name == "tensorboard" else "mnist_ddp",
        config=None if known else dict(settings),
        init_kwargs={name: options[name]},
    )
    if accelerator.is_main_process and not known:
        if name == "mlflow":  # it chooses the name of a run itself
            run = accelerator.get_tracker(name, unwrap=True).info.run_id
        write_whole(path, json.dumps({"tracker": name, "run": run}).encode())


def _tell_kept_failures_once() -> None:
    """Prints no failure of a thread that keeps it, to raise it where its work is waited for.

    The thread that writes TensorBoard's files does so: a full disk would be told twice.
    """
    tell = threading.excepthook

    def unless_kept(failure: threading.ExceptHookArgs) -> None:
        if getattr(failure.thread, "exception", None) is not failure.exc_value:
            tell(failure)

    threading.excepthook = unless_kept
