"""The same global batch on 1, 2, 3 and 4 real processes, and in a plain PyTorch loop, gives the same training.

python -m pytest tests/training/test_parity.py
"""

from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ranks import accelerator_of, run_ranks
from runs import begin, convnet
from torch import Tensor

from mnist_ddp.data.augment import apply_affine
from mnist_ddp.data.loaders import Splits, TrainingSamples, make_splits
from mnist_ddp.data.reading import read_files
from mnist_ddp.settings import Settings
from mnist_ddp.training.evaluation import evaluate
from mnist_ddp.training.loop import train_step

GLOBAL_BATCH = 240
STEPS = 20
SGD = {
    "width": 4,
    "optimizer": "sgd",
    "lr": 0.1,
    "warmup_steps": 4,
    "momentum": 0.9,
    "weight_decay": 0.05,
    "ema_decay": 0.5,
    "max_grad_norm": 2.0,
}


class Training(NamedTuple):
    losses: list[float]
    """Of each optimizer step, over the global batch."""
    val_accuracy: float
    weights: dict[str, Tensor]
    """With the buffers."""
    average: dict[str, Tensor]


def train(splits: Splits, s: Settings, dtype: torch.dtype, steps: int | None = None) -> Training:
    """One rank: the steps of the first epoch, or all of it, by the project's own step function."""
    accelerator = accelerator_of(gradient_accumulation_steps=s.gradient_accumulation_steps)
    state, train_loader, val_loader = begin(accelerator, splits, s, dtype=dtype)
    state.model.train()
    micro_losses = []
    for batch in islice(train_loader, steps and steps * s.gradient_accumulation_steps):
        batch = batch._replace(affine=batch.affine.to(dtype))
        step = train_step(accelerator, state, batch, label_smoothing=s.label_smoothing, max_grad_norm=s.max_grad_norm)
        micro_losses.append(accelerator.reduce(step.loss, reduction="mean"))
    losses = torch.stack(micro_losses).view(-1, s.gradient_accumulation_steps).mean(dim=1).tolist()
    assert state.step == len(losses)
    val = evaluate(accelerator, state.average.module, val_loader, num_classes=10)
    weights = accelerator.unwrap_model(state.model).state_dict()
    return Training(losses, val.accuracy, dict(weights), dict(state.average.module.state_dict()))


def train_plainly(splits: Splits, s: Settings) -> Training:
    """The same in float64 by a plain loop: torch's BatchNorm and SGD, one process, no Accelerate."""
    model = convnet(splits, s).double().train()
    biases = [p for name, p in model.named_parameters() if p.dim() == 1]
    filters = [p for name, p in model.named_parameters() if p.dim() > 1]
    groups = [{"params": filters, "weight_decay": s.weight_decay}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=s.lr, momentum=s.momentum, nesterov=True)
    samples = TrainingSamples(splits.train, seed=s.seed, augment=True, global_batch=GLOBAL_BATCH)
    average = {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}
    losses = []
    for t in range(STEPS):
        optimizer.zero_grad()
        micro_losses = []
        for positions in torch.arange(t * GLOBAL_BATCH, (t + 1) * GLOBAL_BATCH).chunk(s.gradient_accumulation_steps):
            images, labels, affine = samples.__getitems__(positions.tolist())
            logits = model(apply_affine(images, affine.double()))
            loss = F.cross_entropy(logits, labels, label_smoothing=s.label_smoothing)
            (loss / s.gradient_accumulation_steps).backward()
            micro_losses.append(loss.item())
        losses.append(sum(micro_losses) / len(micro_losses))
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = s.lr * min(1, (t + 1) / (s.warmup_steps + 1)) ** 2
        optimizer.step()
        kept = min(s.ema_decay, (1 + t) / (10 + t))
        for name, mean in average.items():
            mean.copy_(kept * mean + (1 - kept) * model.state_dict()[name])
    return Training(losses, float("nan"), dict(model.state_dict()), average)


@pytest.fixture(scope="module")
def splits() -> Splits:
    """Of the digits that come with the project."""
    return make_splits(read_files(""), val_fraction=0.3, test_fraction=0.1, seed=1)


def settings(processes: int, accumulation_steps: int = 1, **options: Any) -> Settings:
    batch_size = GLOBAL_BATCH // processes // accumulation_steps
    return Settings(batch_size=batch_size, gradient_accumulation_steps=accumulation_steps, **options)


@pytest.mark.slow
def test_fp32_processes_match_one(splits: Splits) -> None:
    """With the default recipe, over an epoch. Rounding grows with each step, and images on the border of two classes
    may fall to either side: by chance, of 1,000 five more to one, so 3,000 are looked at."""
    (expected,) = run_ranks(train, 1, splits, settings(1), torch.float32)
    assert len(expected.losses) == len(splits.train) // GLOBAL_BATCH
    assert expected.losses[-1] < expected.losses[0] - 0.3  # it does learn
    for processes in (2, 3, 4):
        for rank in run_ranks(train, processes, splits, settings(processes), torch.float32):
            assert rank.losses[:5] == pytest.approx(expected.losses[:5], rel=0, abs=1e-5)
            assert rank.losses[:STEPS] == pytest.approx(expected.losses[:STEPS], rel=0, abs=1e-3)
            assert rank.val_accuracy == pytest.approx(expected.val_accuracy, rel=0, abs=0.003 + 1e-9)  # 9 images


@pytest.mark.slow
def test_float64_processes_match_a_plain_loop(splits: Splits) -> None:
    expected = train_plainly(splits, settings(1, **SGD))
    for processes in (1, 2, 3, 4):
        for rank in run_ranks(train, processes, splits, settings(processes, **SGD), torch.float64, STEPS):
            check_equal(rank, expected)


@pytest.mark.slow
def test_float64_processes_match_one_with_the_default_recipe(splits: Splits) -> None:
    (expected,) = run_ranks(train, 1, splits, settings(1), torch.float64, STEPS)
    for processes in (2, 3, 4):
        for rank in run_ranks(train, processes, splits, settings(processes), torch.float64, STEPS):
            check_equal(rank, expected)


@pytest.mark.slow
def test_accumulated_steps_match_a_plain_loop(splits: Splits) -> None:
    """Of 3 micro-batches: the statistics of BatchNorm are those of 80 samples, also on 2 processes of 40."""
    expected = train_plainly(splits, settings(1, accumulation_steps=3, **SGD))
    for processes in (1, 2):
        s = settings(processes, accumulation_steps=3, **SGD)
        for rank in run_ranks(train, processes, splits, s, torch.float64, STEPS):
            check_equal(rank, expected)


def check_equal(training: Training, expected: Training) -> None:
    assert training.losses == pytest.approx(expected.losses, rel=0, abs=1e-9)
    assert training.weights.keys() == expected.weights.keys()
    for ours, theirs in ((training.weights, expected.weights), (training.average, expected.average)):
        for name, value in theirs.items():
            torch.testing.assert_close(
                ours[name], value, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )
