"""The training loop: epochs of steps, each followed by an evaluation and a decision that all processes share."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from mnist_ddp.data.augment import apply_affine
from mnist_ddp.data.loaders import Batch
from mnist_ddp.training.evaluation import Evaluation, evaluate
from mnist_ddp.training.state import TrainingState

# Steps between two looks at the running sums: each look waits for the device.
_STEPS_PER_CHECK = 16


@dataclass(frozen=True)
class EpochResult:
    """What one epoch gave; the same on all processes but for the times.

    Attributes:
        epoch: counted from 1.
        step: optimizer steps since the start of the run.
        lr: learning rate of the epoch's last step.
        train_loss: mean over the epoch's samples, with label smoothing and augmentation, in nats.
        val: the average's evaluation.
        improved: whether it is the best so far.
        seconds: of training and evaluation.
        images_per_second: of training alone, over all processes.
    """

    epoch: int
    step: int
    lr: float
    train_loss: float
    val: Evaluation
    improved: bool
    seconds: float
    images_per_second: float

    def metrics(self) -> dict[str, float]:
        """The numbers of metrics.jsonl and of the trackers."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "lr": self.lr,
            "train_loss": self.train_loss,
            "val_loss": self.val.loss,
            "val_accuracy": self.val.accuracy,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.images_per_second, 1),
        }


class StepResult(NamedTuple):
    """Device tensors, so that reading them is the caller's choice: each reading waits for the device."""

    loss: Tensor  # () mean over this process's samples
    grad_norm: Tensor | None  # () L2 norm over all parameters, equal on all processes; None between accumulation steps


def train_step(
    accelerator: Accelerator, state: TrainingState, batch: Batch, *, label_smoothing: float, max_grad_norm: float
) -> StepResult:
    """Forward, backward and, after the last of the accumulation steps, the optimizer's step and the weight average's.

    All processes call it together: the backward pass reduces gradients, the forward pass BatchNorm statistics.

    Args:
        accelerator: of this run.
        state: is changed.
        batch: this process's share.
        label_smoothing: share of the target spread over all classes, 0 to 1.
        max_grad_norm: 0 for no clipping.
    """
    images = batch.images if batch.affine is None else apply_affine(batch.images, batch.affine)
    grad_norm = None
    with accelerator.accumulate(state.model):
        logits = state.model(images)
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=label_smoothing)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            # After the reduction, so a non-finite gradient on any process is non-finite here on all.
            grad_norm = accelerator.clip_grad_norm_(state.model.parameters(), max_grad_norm or math.inf)
        state.optimizer.step()
        state.optimizer.zero_grad()
    # fp16: a step that overflowed was skipped, and moves neither the average nor the schedule.
    if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
        state.step += 1
        state.average.update_parameters(accelerator.unwrap_model(state.model))
    return StepResult(loss.detach(), grad_norm)


def fit(
    accelerator: Accelerator,
    state: TrainingState,
    train_loader: DataLoader[Batch],
    val_loader: DataLoader[Batch],
    *,
    epochs: int,
    num_classes: int,
    label_smoothing: float,
    max_grad_norm: float,
    target_accuracy: float,
    progress: bool = False,
) -> Iterator[EpochResult]:
    """Trains until `state.status` is set, and yields one result per epoch.

    All processes iterate together. `state` is consistent, and may be saved, while the generator waits.

    Args:
        accelerator: of this run.
        state: is changed; training goes on from where it stands.
        train_loader: prepared; ends after whole global batches.
        val_loader: prepared with even_batches=False.
        epochs: in all, those of `state.epoch` included.
        num_classes: of the model.
        label_smoothing, max_grad_norm: see `train_step`.
        target_accuracy: validation accuracy at which to stop, as a fraction; 0 for none.
        progress: whether to draw a bar on stderr.
    """
    while state.status is None:
        started = time.perf_counter()
        train_loss, images = _train_epoch(
            accelerator,
            state,
            train_loader,
            label_smoothing=label_smoothing,
            max_grad_norm=max_grad_norm,
            progress=progress,
        )
        train_seconds = time.perf_counter() - started
        if not math.isfinite(train_loss):
            state.status = "diverged"
            return
        val = evaluate(accelerator, state.average.module, val_loader, num_classes)

        state.epoch += 1
        improved = state.stopper.update(val.accuracy, val.loss)
        if improved:
            state.best_epoch, state.best_val_accuracy = state.epoch, val.accuracy
            state.best_weights = {name: t.detach().clone() for name, t in state.average.module.state_dict().items()}
        yield EpochResult(
            epoch=state.epoch,
            step=state.step,
            lr=state.optimizer.param_groups[0]["lr"],
            train_loss=train_loss,
            val=val,
            improved=improved,
            seconds=time.perf_counter() - started,
            images_per_second=images / train_seconds,
        )
        state.status = _decide(
            accelerator,
            diverged=not math.isfinite(val.loss),
            target_reached=0 < target_accuracy <= val.accuracy,
            early_stopped=state.stopper.should_stop,
            finished=state.epoch >= epochs,
        )


def _train_epoch(
    accelerator: Accelerator,
    state: TrainingState,
    loader: DataLoader[Batch],
    *,
    label_smoothing: float,
    max_grad_norm: float,
    progress: bool,
) -> tuple[float, int]:
    """One pass. Returns mean loss, not finite if training diverged, and number of samples, over all processes."""
    state.model.train()
    loader.set_epoch(state.epoch)  # type: ignore[attr-defined]  # else a resumed loader starts with epoch 0 again
    scaled = accelerator.scaler is not None  # then an infinite gradient is a skipped step, not divergence
    loss_sum = torch.zeros((), dtype=torch.float32, device=accelerator.device)
    count = 0
    bar = tqdm(loader, desc=f"epoch {state.epoch + 1}", unit="step", leave=False, disable=not progress)
    for index, batch in enumerate(bar):
        step = train_step(accelerator, state, batch, label_smoothing=label_smoothing, max_grad_norm=max_grad_norm)
        loss_sum += step.loss * len(batch.labels)
        count += len(batch.labels)
        if step.grad_norm is not None and not scaled:
            loss_sum += step.grad_norm * 0  # NaN from the first non-finite gradient on, on all processes alike
            last_look = accelerator.device.type == "cpu" or index % _STEPS_PER_CHECK == 0
            if last_look and not math.isfinite(step.grad_norm):
                break
    sums = torch.stack([loss_sum, torch.full_like(loss_sum, count)])
    total, samples = accelerator.reduce(sums, reduction="sum").tolist()
    return total / samples, int(samples)


def _decide(accelerator: Accelerator, **reasons: bool) -> Any:
    """The first of `reasons` that holds on any process; the same answer on all. None if none does."""
    flags = torch.tensor(list(reasons.values()), dtype=torch.float32, device=accelerator.device)
    raised = accelerator.reduce(flags, reduction="sum").tolist()
    return next((name for name, count in zip(reasons, raised, strict=True) if count > 0), None)
