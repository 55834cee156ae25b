"""The lines that a run prints: one at the start, one per epoch, one at the end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from mnist_ddp.data.loaders import Splits, Subset
from mnist_ddp.training.loop import EpochResult
from mnist_ddp.training.state import TrainingState
from mnist_ddp.words import counted

_REASONS: dict[str, str] = {
    "early_stopped": "stopped early",
    "finished": "ran all epochs",
    "target_reached": "reached the target",
}


def start_lines(
    accelerator: Accelerator,
    splits: Splits,
    run: dict[str, Any],
    model: nn.Module,
    state: TrainingState,
    notes: Sequence[str],
) -> list[str]:
    """Where and on what this run trains, from where it goes on, and what there is to say about its input."""
    count = accelerator.num_processes
    where = device_name(accelerator.device)
    if accelerator.device.type == "cpu":
        where += f", {counted(torch.get_num_threads(), 'thread')} each"
    precision = {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    sizes = " / ".join(f"{len(subset):,}" for subset in splits)
    height, width = splits.train.image_set.images.shape[1:]
    lines = [
        f"{counted(count, 'process')} on {where}; global batch {run['global_batch']}, {precision}; "
        f"{sizes} train / val / test images of {height}x{width} in {len(splits.train.image_set.class_names)} classes; "
        f"{sum(p.numel() for p in model.parameters()):,} parameters"
    ]
    lines += [
        f"note: {note}"
        for image_set in {id(s.image_set): s.image_set for s in splits}.values()
        for note in image_set.notes
    ]
    lines += [f"note: {note}" for note in [*rare_classes(splits.train), *notes]]
    if state.epoch or state.samples_done:
        more = f" and {counted(state.samples_done, 'image')} of the next" * (state.samples_done > 0)
        lines.append(f"resumed after {counted(state.epoch, 'epoch')}{more}")
    return lines


def rare_classes(train: Subset) -> list[str]:
    """Lines on the classes that no training image shows, and on those that have one image in all.

    Rare classes may all have gone to validation and test.
    """
    every, labels = train.image_set.labels, train.image_set.labels.index_select(0, train.indices)
    notes = []
    for labels_N, count, note in (
        (labels, 0, "no training image shows class {}, so it cannot be learned"),
        (every, 1, "a single image shows class {}; is its label a slip?"),
    ):
        counts = torch.bincount(labels_N, minlength=len(train.image_set.class_names)).tolist()
        names = [name for name, n in zip(train.image_set.class_names, counts, strict=True) if n == count]
        if names:
            notes.append(note.format(", ".join(names[:4]) + ", ..." * (len(names) > 4)))
    return notes


def folder_notes(folder: str, hosts: Sequence[str]) -> list[str]:
    """Where the run's files are, if they are in more than one place.

    Args:
        folder: of the run.
        hosts: names of the machines that have the folder; one where they share it.
    """
    if len(hosts) == 1:
        return []
    some = ", ".join(hosts[:4]) + ", ..." * (len(hosts) > 4)
    return [
        f"{len(hosts)} machines ({some}) share no {folder}: each keeps its own, with the model and what a restart needs"
    ]


def device_name(device: torch.device) -> str:
    """The model of a GPU, or the kind of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def epoch_line(result: EpochResult) -> str:
    """One epoch, in columns."""
    return (
        f"epoch {result.epoch:3d}  train loss {result.train_loss:.4f}  val loss {result.val.loss:.4f}  "
        f"val accuracy {result.val.accuracy:7.2%} {'*' if result.improved else ' '}  "
        f"{result.images_per_second:8,.0f} images/s  {result.seconds:5.1f} s"
    )


def end_line(result: dict[str, Any], folder: str) -> str:
    """What came out and where it is.

    Args:
        result: the content of result.json.
        folder: of the run.
    """
    if result["status"] == "preempted":
        return f"stopped by a signal in epoch {result['epochs'] + 1}; start it again with the same command to go on"
    if result["status"] == "diverged":
        last = (
            f"; the best model, of epoch {result['best_epoch']}, is in {Path(folder) / 'cnn'}"
            if result["best_epoch"]
            else ""
        )
        return (
            f"diverged in epoch {result['epochs'] + 1}, by step {result['steps']}: the loss or a gradient is not finite"
            f"; start over with --resume never and a smaller --lr or --max_grad_norm 1{last}"
        )
    report = Path(folder) / "report.html"  # a full disk may have kept it away
    return (
        f"test accuracy {result['test_accuracy']:.2%} on {counted(result['num_test'], 'image')} "
        f"({_REASONS[result['status']]} after {counted(result['epochs'], 'epoch')}, best was {result['best_epoch']}; "
        f"{result['wall_seconds']:.0f} s); model in {Path(folder) / 'cnn'}{f', report in {report}' * report.exists()}"
    )


def finished_line(result: dict[str, Any], folder: str, push_to_hub: str) -> str:
    """That there is nothing left to do, but for a push that is asked for."""
    model = Path(folder) / "cnn"
    push = f"\nnote: nothing is pushed; hf upload {push_to_hub} {model} . does it" if push_to_hub else ""
    return (
        f"the run in {folder} is finished: test accuracy {result['test_accuracy']:.2%} "
        f"({_REASONS[result['status']]} after {counted(result['epochs'], 'epoch')}); "
        f"add --resume never to start over{push}"
    )
