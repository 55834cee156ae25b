"""The loop: what a step does, and when and with which weights the processes leave.

python -m pytest tests/training/test_loop.py
"""

import copy
import os
import signal
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from ranks import accelerator_of, leave_group, run_ranks
from runs import begin, convnet, made_up_splits
from torch import Tensor, nn

from mnist_ddp.settings import Settings
from mnist_ddp.training.early_stopping import EarlyStopping
from mnist_ddp.training.loop import EpochResult, fit, train_step
from mnist_ddp.training.signals import StopSignals

SPLITS = made_up_splits(256)  # 128 / 64 / 64
CLASSES = 4
NAN = float("nan")


def settings(**options: Any) -> Settings:
    """Small and quick, 8 steps an epoch on one process."""
    defaults = {"batch_size": 16, "width": 4, "optimizer": "sgd", "lr": 0.1, "warmup_steps": 0, "augment": False}
    return Settings(**defaults | options)


# ---- one step, on one process


def plain_step(
    model: nn.Module, images: Tensor, labels: Tensor, smoothing: float, max_norm: float, lr: float
) -> tuple[float, float]:
    """SGD's step on `model` by hand. Returns loss and norm of the gradients before they are clipped."""
    log_probabilities = model(images).log_softmax(dim=1)
    right = log_probabilities[torch.arange(len(labels)), labels]
    loss = -((1 - smoothing) * right + smoothing * log_probabilities.mean(dim=1)).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= lr * parameter.grad
    return loss.item(), norm.item()


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("max_norm", [0.0, 0.05, 1000.0])
def test_a_step_equals_one_by_hand(accelerator: Accelerator, smoothing: float, max_norm: float) -> None:
    s = settings(momentum=0, weight_decay=0, label_smoothing=smoothing, max_grad_norm=max_norm)
    state, train_loader, _ = begin(accelerator, SPLITS, s, dtype=torch.float64)
    state.model.train()
    expected = convnet(SPLITS, s).double()
    batch = next(iter(train_loader))

    step = train_step(accelerator, state, batch, label_smoothing=smoothing, max_grad_norm=max_norm)
    loss, norm = plain_step(expected, batch.images, batch.labels, smoothing, max_norm or float("inf"), s.lr)
    assert step.loss.item() == pytest.approx(loss, abs=1e-12)
    assert step.grad_norm.item() == pytest.approx(norm, abs=1e-12)
    assert 0.05 < norm < 1000  # so that one of the limits clips and the other does not
    for ours, theirs in zip(state.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fp16, whose steps can be skipped, needs a GPU")
def test_a_skipped_fp16_step_moves_nothing() -> None:
    accelerator = accelerator_of(mixed_precision="fp16")
    s = settings(warmup_steps=8)
    state, train_loader, _ = begin(accelerator, SPLITS, s, model=Faulty(convnet(SPLITS, s), "gradient", at_step=2))
    state.model.train()

    def take(batch: Any) -> tuple[int, list[Tensor]]:
        train_step(accelerator, state, batch, label_smoothing=0.0, max_grad_norm=1.0)
        tensors = [*state.model.parameters(), *state.average.module.parameters()]
        return state.step, [tensor.detach().clone() for tensor in tensors]

    try:
        first, second, third = (take(batch) for batch, _ in zip(train_loader, range(3), strict=False))
    finally:
        leave_group()
    assert (first[0], second[0], third[0]) == (1, 1, 2)
    assert all(torch.equal(before, after) for before, after in zip(first[1], second[1], strict=True))
    assert not any(torch.equal(before, after) for before, after in zip(second[1], third[1], strict=True))


# ---- the end of the run, on several


class Faulty(nn.Module):
    """Goes wrong on this process alone, once.

    Args:
        model: what it is otherwise.
        kind: "loss", "gradient" (of a loss that is right), "evaluation", "signal" (in evaluation) or "none".
        at_step: of training, counted from 1, where the first two go wrong.
    """

    def __init__(self, model: nn.Module, kind: str, at_step: int) -> None:
        super().__init__()
        self.model = model
        self.kind = kind
        self.steps_left = at_step

    def forward(self, images: Tensor) -> Tensor:
        logits = self.model(images)
        if not self.training and self.kind == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if not self.training:
            return logits * NAN if self.kind == "evaluation" else logits
        self.steps_left -= 1
        if self.steps_left == 0 and self.kind == "loss":
            return logits * NAN
        if self.steps_left == 0 and self.kind == "gradient":
            logits.register_hook(lambda grad: grad * NAN)
        return logits


class Ended(NamedTuple):
    status: str
    step: int
    epochs: list[EpochResult]
    averages: list[dict[str, Tensor]]
    """The state of the average after each epoch."""
    best_epoch: int
    best_weights: dict[str, Tensor] | None


def train(s: Settings, patience_of_ranks: tuple[int, ...] = (), fault: tuple[int, str, int] | None = None) -> Ended:
    """One rank: trains to the end. Ranks may differ in their patience, and one may have a fault: rank, kind, step."""
    accelerator = accelerator_of(gradient_accumulation_steps=s.gradient_accumulation_steps)
    model = convnet(SPLITS, s)
    if fault:
        rank, kind, at_step = fault
        model = Faulty(model, kind if accelerator.process_index == rank else "none", at_step)
    state, train_loader, val_loader = begin(accelerator, SPLITS, s, model=model)
    if patience_of_ranks:
        state.stopper = EarlyStopping(s.monitor, patience_of_ranks[accelerator.process_index], s.min_delta)
    epochs, averages = [], []
    for epoch in fit(
        accelerator,
        state,
        train_loader,
        val_loader,
        epochs=s.epochs,
        num_classes=CLASSES,
        label_smoothing=s.label_smoothing,
        max_grad_norm=s.max_grad_norm,
        target_accuracy=s.target_accuracy,
        signals=StopSignals(accelerator),
    ):
        epochs.append(epoch)
        averages.append(copy.deepcopy(state.average.module.state_dict()))
    assert state.status is not None
    return Ended(state.status, state.step, epochs, averages, state.best_epoch, state.best_weights)


@pytest.mark.parametrize(("kind", "epochs", "steps"), [("loss", 1, 6), ("gradient", 1, 6), ("evaluation", 0, 4)])
def test_all_leave_at_the_step_where_one_diverges(kind: str, epochs: int, steps: int) -> None:
    """Epochs have 4 steps; the fault is in the second step of the second epoch, or in the first evaluation."""
    ranks = run_ranks(train, 2, settings(epochs=5), (), (1, kind, 6))
    for rank in ranks:
        assert (rank.status, len(rank.epochs), rank.step) == ("diverged", epochs, steps)
        assert rank.best_epoch == epochs
        if rank.best_weights is not None:
            assert all(value.isfinite().all() for value in rank.best_weights.values())


def test_a_signal_does_not_wait_for_the_end_of_an_evaluation() -> None:
    """Two optimizer steps, then an evaluation of eight rounds, in the second of which all know of the signal."""
    for rank in run_ranks(train, 2, settings(batch_size=4, gradient_accumulation_steps=8), (), (1, "signal", 0)):
        assert (rank.status, rank.step, len(rank.epochs), rank.best_epoch) == ("preempted", 2, 0, 0)


@pytest.mark.parametrize("impatient", [0, 1, 2])
def test_all_leave_in_the_epoch_in_which_one_stops(impatient: int) -> None:
    patience = tuple(2 if rank == impatient else 50 for rank in range(3))
    # An accuracy cannot rise by more than 1 after the first epoch, so none counts as better.
    for rank in run_ranks(train, 3, settings(epochs=20, min_delta=1.0), patience):
        assert (rank.status, len(rank.epochs), rank.best_epoch) == ("early_stopped", 3, 1)


def test_stops_as_soon_as_the_target_is_reached() -> None:
    ranks = run_ranks(train, 2, settings(epochs=50, patience=50, target_accuracy=0.7))
    for rank in ranks:
        assert rank.status == "target_reached"
        *before, last = [epoch.val.accuracy for epoch in rank.epochs]
        assert last >= 0.7
        assert before
        assert max(before) < 0.7


def test_runs_all_epochs_where_nothing_ends_it() -> None:
    (rank,) = run_ranks(train, 1, settings(epochs=3))
    assert (rank.status, len(rank.epochs), rank.step) == ("finished", 3, 24)


@pytest.mark.parametrize("monitor", ["accuracy", "loss"])
def test_best_weights_are_the_averages_of_the_best_epoch(monitor: str) -> None:
    (rank,) = run_ranks(train, 1, settings(epochs=100, patience=2, monitor=monitor, lr=0.3))
    assert (rank.status, rank.best_epoch) == ("early_stopped", len(rank.epochs) - 2)
    # Of equal accuracies the one with the lowest loss.
    worth = [(epoch.val.accuracy if monitor == "accuracy" else 0, -epoch.val.loss) for epoch in rank.epochs]
    assert rank.best_epoch - 1 == worth.index(max(worth))
    torch.testing.assert_close(rank.best_weights, rank.averages[rank.best_epoch - 1], rtol=0, atol=0)
    assert not torch.equal(rank.best_weights["classifier.bias"], rank.averages[-1]["classifier.bias"])


def test_epochs_on_two_processes_are_those_of_one() -> None:
    (whole,) = run_ranks(train, 1, settings(epochs=3, batch_size=32))
    for half in run_ranks(train, 2, settings(epochs=3, batch_size=16)):
        for ours, theirs in zip(half.epochs, whole.epochs, strict=True):
            assert (ours.epoch, ours.step, ours.lr) == (theirs.epoch, theirs.step, theirs.lr)
            assert ours.train_loss == pytest.approx(theirs.train_loss, abs=1e-4)
            assert ours.val.loss == pytest.approx(theirs.val.loss, abs=1e-4)
            assert ours.val.count == 64
