"""The training loop: epochs of steps, each followed by an evaluation and a decision that all processes share."""

import math
import time
from collections.abc import Callable, Iterator
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
from mnist_ddp.training import watchdog
from mnist_ddp.training.evaluation import Evaluation, evaluate
from mnist_ddp.training.signals import StopSignals
from mnist_ddp.training.state import Status, TrainingState

# Steps between two looks at the gradient's norm on a GPU: each look waits for the device.
_STEPS_PER_LOOK = 16


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
        data_wait_share: of the training time of this process, spent waiting for batches, 0 to 1.
    """

    epoch: int
    step: int
    lr: float
    train_loss: float
    val: Evaluation
    improved: bool
    seconds: float
    images_per_second: float
    data_wait_share: float

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
            "data_wait_share": round(self.data_wait_share, 4),
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
            if max_grad_norm:
                grad_norm = accelerator.clip_grad_norm_(state.model.parameters(), max_grad_norm)
            else:
                accelerator.unscale_gradients()
                grad_norm = _norm(state.optimizer)
            state.set_learning_rate()
            state.optimizer.step()
            state.optimizer.zero_grad()
    # fp16: a step that overflowed was skipped, and moves neither the average nor the schedule.
    if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
        state.average.update(state.step)
        state.step += 1
    return StepResult(loss.detach(), grad_norm)


def _norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """() L2 norm of all gradients. `get_total_norm` takes twice as long for the same, 1% of a step."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


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
    signals: StopSignals,
    save: Callable[[], None] = lambda: None,
    save_every_steps: int = 0,
    after_step: Callable[[], None] = lambda: None,
    progress: bool = False,
) -> Iterator[EpochResult]:
    """Trains until `state.status` is set, and yields one result per epoch.

    All processes iterate together. The generator waits where `state` is that of a complete epoch.

    Args:
        accelerator: of this run.
        state: is changed; training goes on from where it stands, in the middle of an epoch too.
        train_loader: prepared; ends after whole global batches.
        val_loader: prepared with even_batches=False.
        epochs: in all, those of `state.epoch` included.
        num_classes: of the model.
        label_smoothing, max_grad_norm: see `train_step`.
        target_accuracy: validation accuracy at which to stop, as a fraction; 0 for none.
        signals: ask for a stop at the next step.
        save: writes a checkpoint of `state`; is called on all processes after each epoch, and when a signal stops it.
        save_every_steps: optimizer steps between further checkpoints; 0 for none.
        after_step: is called after each optimizer step, for a profiler.
        progress: whether to draw a bar on stderr.
    """
    step_settings = {"label_smoothing": label_smoothing, "max_grad_norm": max_grad_norm}
    while True:
        # Before the epoch, not after: a run that was killed once its last epoch was saved resumes to the same decision.
        state.status = reason_to_end(
            accelerator, state, epochs=epochs, target_accuracy=target_accuracy, signals=signals
        )
        if state.status is not None:
            return

        started, start_position = time.perf_counter(), state.samples_done
        batches = _WaitTimer(_rest_of_epoch(state, train_loader, progress))
        for _ in _steps(accelerator, state, batches, step_settings):
            after_step()
            if signals.step():
                state.status = "preempted"
                save()
                return
            if save_every_steps and state.step % save_every_steps == 0 and not accelerator.optimizer_step_was_skipped:
                save()
        train_loss = _global_mean_loss(accelerator, state)
        train_seconds = time.perf_counter() - started
        if not math.isfinite(train_loss):
            state.status = "diverged"
            return
        val = evaluate(accelerator, state.average.module, val_loader, num_classes, interrupted=signals.step)
        if val is None:
            state.status = "preempted"
            save()
            return
        if not math.isfinite(val.loss):
            state.status = "diverged"
            return

        state.epoch += 1
        improved = state.stopper.update(val.accuracy, val.loss)
        state.end_epoch(improved)
        if improved:
            state.best_epoch, state.best_val_accuracy = state.epoch, val.accuracy
            state.best_weights = {name: t.detach().clone() for name, t in state.average.module.state_dict().items()}
        result = EpochResult(
            epoch=state.epoch,
            step=state.step,
            lr=state.optimizer.param_groups[0]["lr"],
            train_loss=train_loss,
            val=val,
            improved=improved,
            seconds=time.perf_counter() - started,
            images_per_second=(state.samples_done - start_position) / train_seconds,
            data_wait_share=batches.seconds / train_seconds,
        )
        state.history.append(result.metrics())
        state.samples_done, state.loss_sum = 0, torch.zeros_like(state.loss_sum)
        save()
        yield result


def reason_to_end(
    accelerator: Accelerator, state: TrainingState, *, epochs: int, target_accuracy: float, signals: StopSignals
) -> Status | None:
    """Whether `fit` would train no further from where `state` stands, and why; the same on all processes.

    All processes must call it: it reduces.
    """
    return _decide(
        accelerator,
        preempted=signals.agree(),
        target_reached=bool(state.history) and 0 < target_accuracy <= state.history[-1]["val_accuracy"],
        early_stopped=state.stopper.should_stop,
        finished=state.epoch >= epochs,
    )


def _rest_of_epoch(state: TrainingState, loader: DataLoader[Batch], progress: bool) -> Iterator[Batch]:
    """This process's batches of the epoch under way that are not done yet."""
    loader.dataset.skip = state.samples_done  # type: ignore[attr-defined]
    loader.set_epoch(state.epoch)  # type: ignore[attr-defined]  # else a resumed loader starts with epoch 0 again
    yield from tqdm(loader, desc=f"epoch {state.epoch + 1}", unit="step", leave=False, disable=not progress)


class _WaitTimer:
    """Passes batches on, and adds up the seconds for which it was waiting for them."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.batches = batches
        self.seconds = 0.0

    def __iter__(self) -> "_WaitTimer":
        return self

    def __next__(self) -> Batch:
        asked = time.perf_counter()
        try:
            return next(self.batches)
        finally:
            self.seconds += time.perf_counter() - asked


def _steps(
    accelerator: Accelerator, state: TrainingState, batches: Iterator[Batch], step_settings: dict[str, float]
) -> Iterator[None]:
    """Trains on `batches`. Yields after each optimizer step; ends early once training has diverged."""
    state.model.train()
    state.loss_sum = state.loss_sum.to(accelerator.device)
    scaled = accelerator.scaler is not None  # then an infinite gradient is a skipped step, not divergence
    for batch in batches:
        watchdog.beat()
        step = train_step(accelerator, state, batch, **step_settings)
        state.loss_sum.add_(step.loss, alpha=len(batch.labels))
        state.samples_done += len(batch.labels) * accelerator.num_processes
        if step.grad_norm is None:
            continue
        if not scaled:
            state.loss_sum += step.grad_norm * 0  # NaN from the first non-finite gradient on, on all processes alike
            look = accelerator.device.type == "cpu" or state.step % _STEPS_PER_LOOK == 0
            if look and not math.isfinite(step.grad_norm):
                return
        yield


def _global_mean_loss(accelerator: Accelerator, state: TrainingState) -> float:
    """Mean loss of the epoch's samples over all processes; not finite if training diverged on any."""
    return accelerator.reduce(state.loss_sum, reduction="sum").item() / state.samples_done


def _decide(accelerator: Accelerator, **reasons: bool) -> Any:
    """The first of `reasons` that holds on any process; the same answer on all. None if none does."""
    flags = torch.tensor(list(reasons.values()), dtype=torch.float32, device=accelerator.device)
    raised = accelerator.reduce(flags, reduction="sum").tolist()
    return next((name for name, count in zip(reasons, raised, strict=True) if count > 0), None)
