"""Exact evaluation over all processes: each sample counts once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mnist_ddp.training import watchdog


@dataclass(frozen=True)
class Evaluation:
    """The same on all processes.

    Attributes:
        loss: mean cross-entropy over all samples, in nats.
        accuracy: fraction of samples that were classified right.
        count: number of samples.
        confusion: (classes, classes) int64 on the CPU; row = true class, column = predicted class.
    """

    loss: float
    accuracy: float
    count: int
    confusion: Tensor


@torch.inference_mode()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    loader: DataLoader[Any],
    num_classes: int,
    interrupted: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Loss, accuracy and confusion matrix of `model` over the whole dataset of `loader`.

    Args:
        accelerator: all of its processes must call this together: it reduces once, at the end.
        model: not wrapped in DDP, whose forward is a collective: shards may differ in their number of batches.
        loader: prepared by the accelerator with even_batches=False, so that no sample is repeated.
        num_classes: classes of the model.
        interrupted: is called after each batch, as often on all processes, and must answer alike on all.

    Returns:
        The same on all processes; None if it was interrupted.
    """
    model.eval()
    device = accelerator.device
    real = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    loss_sum = torch.zeros(1, dtype=real, device=device)
    confusion = torch.zeros(num_classes * num_classes, dtype=real, device=device)
    samples = len(loader.dataset)  # type: ignore[arg-type]
    batches = iter(loader)
    for _ in range(0, samples, loader.total_batch_size):  # type: ignore[attr-defined]
        watchdog.beat()
        batch = next(batches, None)  # the last round may have none for this process
        if batch is not None:
            with accelerator.autocast():
                logits = model(batch.images)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            loss_sum += F.cross_entropy(logits, batch.labels, reduction="none").to(real).sum()
            cells = batch.labels * num_classes + logits.argmax(dim=1)
            confusion.index_add_(0, cells, torch.ones_like(cells, dtype=real))  # bincount would wait for the device
        if interrupted():
            return None
    # Sums are reduced, then divided: a mean of the processes' means would weigh uneven shards alike.
    sums = accelerator.reduce(torch.cat([loss_sum, confusion]), reduction="sum").cpu()
    counts = sums[1:].to(torch.int64).view(num_classes, num_classes)
    count = int(counts.sum())
    assert count == samples, f"{count} samples counted of {samples}"
    return Evaluation(loss=sums[0].item() / count, accuracy=int(counts.trace()) / count, count=count, confusion=counts)
