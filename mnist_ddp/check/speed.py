"""How long a training step takes, alone and together."""

import copy
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from mnist_ddp.check.network import synchronize
from mnist_ddp.check.parity import enough, model_of
from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.data.loaders import Batch, make_loaders
from mnist_ddp.distributed import on_main
from mnist_ddp.settings import Settings
from mnist_ddp.training.average import WeightAverage
from mnist_ddp.training.early_stopping import EarlyStopping
from mnist_ddp.training.loop import train_step
from mnist_ddp.training.state import TrainingState, build_optimizer, start_training, without_idle_wrapper

_WARM_UP_STEPS = 3
_SECONDS_EACH = 1.5
_MOST_STEPS = 100
_TURNS = 4


class Speed(NamedTuple):
    """Of one process.

    Attributes:
        steps: durations of single training steps, in seconds.
        waits: of each, the seconds spent waiting for the next batch.
    """

    steps: list[float]
    waits: list[float]

    def add(self, more: "Speed") -> None:
        self.steps.extend(more.steps)
        self.waits.extend(more.waits)

    @property
    def step_seconds(self) -> float:
        """Mean duration of a step."""
        return sum(self.steps) / len(self.steps)

    @property
    def wait_share(self) -> float:
        """Share of the time that was spent waiting for batches, 0 to 1."""
        return sum(self.waits) / sum(self.steps)


class Speeds(NamedTuple):
    """Of this process.

    Attributes:
        alone: while the other processes wait, on the main process; the others have its value.
        beside: while all processes train at once, each for itself.
        together: while all processes train one model.
    """

    alone: Speed
    beside: Speed
    together: Speed


def measure_speeds(accelerator: Accelerator, images: ImageSet, s: Settings) -> Speeds:
    """Training steps of `s.batch_size` images per process. All processes call it together."""
    N = accelerator.num_processes
    loaders = make_loaders(
        enough(images, s.batch_size * N),
        accelerator.device,
        seed=s.seed,
        augment=s.augment,
        batch_size=s.batch_size,
        processes=N,
        accumulation_steps=1,
    )
    by_itself = _state_without_group(accelerator, images, s)
    own = _endless(loaders.train)
    alone, steps = on_main(lambda: _time_alone(accelerator, by_itself, own))
    shared, of_all = new_state(accelerator, images, s), _endless(accelerator.prepare(loaders.train))
    beside, together = Speed([], []), Speed([], [])
    # In turns: other work on the machine, which comes and goes, then falls on both alike.
    for turn in range(_TURNS + 1):
        for state, batches, speed in ((by_itself, own, beside), (shared, of_all, together)):
            accelerator.wait_for_everyone()
            if turn == 0:
                _time_steps(accelerator, state, batches, _WARM_UP_STEPS)
            else:
                speed.add(_time_steps(accelerator, state, batches, max(2, steps // _TURNS)))
    return Speeds(alone, beside, together)


def _endless(loader: DataLoader[Batch]) -> Iterator[Batch]:
    while True:
        yield from loader


def new_state(accelerator: Accelerator, images: ImageSet, s: Settings) -> TrainingState:
    """That of a run."""
    return start_training(
        accelerator,
        model_of(images, width=s.width, seed=s.seed),
        EarlyStopping(s.monitor, s.patience, s.min_delta),
        optimizer=s.optimizer,
        lr=s.lr,
        warmup_steps=s.warmup_steps,
        momentum=s.momentum,
        weight_decay=s.weight_decay,
        ema_decay=s.ema_decay,
    )


def _state_without_group(accelerator: Accelerator, images: ImageSet, s: Settings) -> TrainingState:
    """One whose steps compute as those of a run do, and exchange nothing: no DDP, torch's own BatchNorm."""
    model = model_of(images, width=s.width, seed=s.seed).to(accelerator.device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stub
    fused = accelerator.scaler is None
    built = build_optimizer(model, s.optimizer, lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay, fused=fused)
    average = WeightAverage(copy.deepcopy(model), model, s.ema_decay)
    # evaluation_mode leaves DDP out and mixed precision in.
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    stopper = EarlyStopping(s.monitor, s.patience, s.min_delta)
    optimizer = without_idle_wrapper(accelerator, accelerator.prepare_optimizer(built))
    return TrainingState(model, prepared, average, optimizer, stopper, s.lr, s.warmup_steps)


def _time_alone(accelerator: Accelerator, state: TrainingState, batches: Iterator[Batch]) -> tuple[Speed, int]:
    """The speed, and for how many steps to measure the others."""
    _time_steps(accelerator, state, batches, _WARM_UP_STEPS)
    trial = _time_steps(accelerator, state, batches, 2)
    steps = int(min(max(_SECONDS_EACH / trial.step_seconds, 5), _MOST_STEPS))
    return _time_steps(accelerator, state, batches, steps), steps


def _time_steps(accelerator: Accelerator, state: TrainingState, batches: Iterator[Batch], steps: int) -> Speed:
    state.model.train()
    synchronize(accelerator.device)
    speed = Speed([], [])
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        speed.waits.append(time.perf_counter() - asked)
        train_step(accelerator, state, batch, label_smoothing=0.1, max_grad_norm=0.0)
        synchronize(accelerator.device)
        speed.steps.append(time.perf_counter() - asked)
    return speed
