"""What a run leaves for people, written when it has ended. Training knows nothing of it."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn

from mnist_ddp.data.loaders import Splits
from mnist_ddp.results.card import push, write_card
from mnist_ddp.results.facts import gather_facts, write_facts
from mnist_ddp.results.report import make_report


def write_results(
    folder: Path,
    splits: Splits,
    model: nn.Module,
    confusion: Tensor | None,
    *,
    autocast: Callable[[], AbstractContextManager[Any]],
    versions: Mapping[str, str],
    changed_settings: Mapping[str, Any],
    trackers: Sequence[Any],
    step: int,
    push_to_hub: str,
) -> None:
    """Writes report.json, the report, its pictures and the model card; pushes the model; shows trackers the pictures.

    Ends the trackers. The run's result stands whatever happens here: a failure is a warning on stderr. One process
    calls this.

    Args:
        folder: of the run, with its settings, metrics and result.
        splits, model, confusion, autocast, versions, changed_settings: see `gather_facts`.
        trackers: Accelerate's, started.
        step: optimizer steps of the run.
        push_to_hub: repository for the model, if it was tested; empty for none.
    """
    with _warning("report and model card are not complete; the same command again makes them"):
        facts = gather_facts(
            splits, model, confusion, autocast=autocast, versions=versions, changed_settings=changed_settings
        )
        write_facts(folder, facts)
        with _warning(f"the report is not complete; python -m mnist_ddp.results.report {folder} makes it again"):
            make_report(folder)
        with _warning(f"{folder / 'cnn' / 'README.md'} could not be written"):
            write_card(folder)
    if push_to_hub and confusion is not None:
        with _warning(f"the model was not pushed; hf upload {push_to_hub} {folder / 'cnn'} . tries again"):
            print(f"pushed to {push(folder, push_to_hub)}")
    for tracker in trackers:
        with _warning(f"what {tracker.name} got last, such as the pictures, may not be there"):
            try:
                log_pictures(tracker, sorted((folder / "pictures").glob("*.png")), step)
            finally:
                tracker.finish()


def log_pictures(tracker: Any, paths: Sequence[Path], step: int) -> None:
    """Gives PNG files to a tracker of Accelerate, where it takes them: TensorBoard, wandb and MLflow do."""
    if tracker.name == "mlflow":
        for path in paths:
            tracker.log_artifact(str(path), "pictures")
    elif tracker.name in ("tensorboard", "wandb"):
        options = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
        for path in paths:
            image_HW3 = np.asarray(Image.open(path).convert("RGB"))
            tracker.log_images({f"pictures/{path.stem}": image_HW3[np.newaxis]}, step=step, **options)


@contextlib.contextmanager
def _warning(words: str) -> Iterator[None]:
    """Turns a failure into a line on stderr."""
    try:
        yield
    except Exception as error:
        reason = getattr(error, "strerror", None) or " ".join(f"{type(error).__name__}: {error}".split())
        print(f"warning: {words} ({reason})", file=sys.stderr)
