"""A run that goes on from any of its checkpoints is the run that was never interrupted.

python -m pytest tests/training/test_resume.py
"""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import accelerator_of, run_ranks
from runs import begin, made_up_splits
from torch import Tensor

from mnist_ddp.settings import Settings
from mnist_ddp.training.checkpoint import Checkpoints
from mnist_ddp.training.loop import fit
from mnist_ddp.training.signals import StopSignals

SPLITS = made_up_splits(160)  # 80 / 40 / 40
GLOBAL_BATCH = 16
STEPS_PER_EPOCH = 5
SETTINGS = {"width": 4, "lr": 0.05, "warmup_steps": 3, "patience": 3, "epochs": 40, "label_smoothing": 0.0}


class Ended(NamedTuple):
    status: str | None
    weights: dict[str, Tensor]
    """Those of the model, of the average and of the best epoch, by prefixed names."""
    history: list[dict[str, Any]]
    """Metrics of each epoch, without times."""
    stopper: dict[str, Any]
    yielded: int
    """Epochs that this process went through itself."""


def train(s: Settings, folder: Path | None, start: Path | None, dtype: torch.dtype = torch.float32) -> Ended:
    """One rank: trains to the end, from a checkpoint or from scratch, and saves after every step, where to a folder."""
    accelerator = accelerator_of(gradient_accumulation_steps=s.gradient_accumulation_steps)
    state, train_loader, val_loader = begin(accelerator, SPLITS, s, dtype=dtype)
    if start:
        snapshot, damaged = Checkpoints(start, keep=1).newest()
        assert snapshot
        assert not damaged
        state.restore(accelerator, snapshot)
    checkpoints = Checkpoints(folder, keep=10**6) if folder and accelerator.is_main_process else None

    def save() -> None:
        if not folder:
            return
        snapshot = state.snapshot(accelerator, run={})
        if checkpoints:
            checkpoints.save(snapshot)

    epochs = fit(
        accelerator,
        state,
        train_loader,
        val_loader,
        epochs=s.epochs,
        num_classes=4,
        label_smoothing=s.label_smoothing,
        max_grad_norm=s.max_grad_norm,
        target_accuracy=0.0,
        signals=StopSignals(accelerator),
        save=save,
        save_every_steps=1,
    )
    yielded = len(list(epochs))
    final = state.snapshot(accelerator, run={})
    weights = {name: value for name, value in final.tensors.items() if not name.startswith("optimizer.")}
    return Ended(state.status, weights, [_untimed(line) for line in state.history], state.stopper.state_dict(), yielded)


def _untimed(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if "second" not in name and "share" not in name}


def settings(processes: int, **options: Any) -> Settings:
    return Settings(**SETTINGS | {"batch_size": GLOBAL_BATCH // processes} | options)


def checkpoint(folder: Path, epoch: int, samples: int, to: Path) -> Path:
    """A folder with this checkpoint alone."""
    name = f"epoch-{epoch:05d}-sample-{samples:08d}"
    shutil.copytree(folder / name, to / name)
    return to


def check_same(resumed: Ended, untouched: Ended) -> None:
    assert (resumed.status, resumed.stopper) == (untouched.status, untouched.stopper)
    assert resumed.history == untouched.history
    assert resumed.weights.keys() == untouched.weights.keys()
    for name, value in untouched.weights.items():
        assert torch.equal(resumed.weights[name], value), name


class Untouched(NamedTuple):
    ended: Ended
    folder: Path


@pytest.fixture(scope="module", params=[1, 2])
def processes(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def untouched(processes: int, tmp_path_factory: pytest.TempPathFactory) -> Untouched:
    """A run that stops by itself, with a checkpoint of each of its steps and epochs."""
    folder = tmp_path_factory.mktemp("untouched")
    ended = run_ranks(train, processes, settings(processes), folder, None)[0]
    assert ended.status == "early_stopped"
    assert 5 < len(ended.history) < 40
    return Untouched(ended, folder)


@pytest.mark.parametrize(
    ("epoch", "steps"),
    [
        (0, 1),  # the first step of the first epoch
        (2, 1),
        (2, 3),
        (2, STEPS_PER_EPOCH),  # trained but not evaluated
        (3, 0),  # between two epochs
        (-2, 4),  # the patience has begun
        (-1, STEPS_PER_EPOCH),  # before the evaluation after which it stops
        (-1, 0),
    ],
)
def test_from_any_checkpoint_the_run_ends_bit_for_bit_the_same(
    untouched: Untouched, processes: int, epoch: int, steps: int, tmp_path: Path
) -> None:
    if epoch < 0:
        epoch += len(untouched.ended.history)
    start = checkpoint(untouched.folder, epoch, steps * GLOBAL_BATCH, tmp_path / "start")
    for rank in run_ranks(train, processes, settings(processes), None, start):
        check_same(rank, untouched.ended)
        assert rank.yielded == len(untouched.ended.history) - epoch


def test_resumed_twice_in_a_row(untouched: Untouched, processes: int, tmp_path: Path) -> None:
    """From the second epoch to the fourth, from the middle of that to the end."""
    first = checkpoint(untouched.folder, 1, 2 * GLOBAL_BATCH, tmp_path / "first")
    run_ranks(train, processes, settings(processes, epochs=4), tmp_path / "part", first)
    second = checkpoint(tmp_path / "part", 3, 2 * GLOBAL_BATCH, tmp_path / "second")
    for rank in run_ranks(train, processes, settings(processes), None, second):
        check_same(rank, untouched.ended)


def test_a_finished_run_does_not_train_on(untouched: Untouched, processes: int, tmp_path: Path) -> None:
    start = checkpoint(untouched.folder, len(untouched.ended.history), 0, tmp_path / "start")
    for rank in run_ranks(train, processes, settings(processes), None, start):
        check_same(rank, untouched.ended)
        assert rank.yielded == 0


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize("steps", [0, 2])
def test_on_another_number_of_processes_the_run_goes_on_alike(
    before: int, after: int, steps: int, tmp_path: Path
) -> None:
    """At the same global batch, in float64."""
    untouched = run_ranks(train, before, settings(before, epochs=4), tmp_path / "untouched", None, torch.float64)[0]
    start = checkpoint(tmp_path / "untouched", 2, steps * GLOBAL_BATCH, tmp_path / "start")
    for rank in run_ranks(train, after, settings(after, epochs=4), None, start, torch.float64):
        assert rank.status == untouched.status
        for ours, theirs in zip(rank.history, untouched.history, strict=True):
            # Each process adds up its losses in fp32.
            assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-6)
            assert ours == pytest.approx(theirs | {"train_loss": ours["train_loss"]}, rel=0, abs=1e-9)
        for name, value in untouched.weights.items():
            torch.testing.assert_close(rank.weights[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("after", [8, 40])  # images a step, twice as many steps or fewer
def test_a_linear_schedule_ends_at_0_on_another_global_batch(after: int, tmp_path: Path) -> None:
    linear = {"schedule": "linear", "epochs": 4, "monitor": "none"}
    run_ranks(train, 1, settings(1, **linear), tmp_path / "untouched", None)
    start = checkpoint(tmp_path / "untouched", 2, 0, tmp_path / "start")
    (rank,) = run_ranks(train, 1, settings(1, **linear | {"batch_size": after}), None, start)
    steps = 80 // after  # of an epoch; of 4 epochs, at most a quarter warms up
    rates = [line["lr"] for line in rank.history[2:]]  # at the last step of the third and of the fourth epoch
    assert rates == pytest.approx([0.05 * left / (4 * steps - min(3, steps)) for left in (steps + 1, 1)])
