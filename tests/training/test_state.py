"""What a step changes: weight decay, learning rate and running average against the formulas.

python -m pytest tests/training/test_state.py
"""

import copy
from collections.abc import Callable

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mnist_ddp.model.batchnorm import SyncBatchNorm
from mnist_ddp.training.early_stopping import EarlyStopping
from mnist_ddp.training.state import TrainingState, build_optimizer, start_training

LR, MOMENTUM, DECAY = 0.1, 0.9, 0.25


def model_of_all_kinds() -> nn.Module:
    """Filters, a matrix, biases and BatchNorm parameters, none of them zero."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) + 1)
    return model


def set_gradients(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def first_sgd_step(w: Tensor, g: Tensor, decay: float, momentum: float) -> Tensor:
    """Decay is part of the gradient; Nesterov looks one step of the momentum ahead."""
    g = g + decay * w
    return w - LR * (g + momentum * g)


def first_adamw_step(w: Tensor, g: Tensor, decay: float, momentum: float) -> Tensor:
    """Decay acts on the weights alone; with both corrections of bias, the first moments are g and g squared."""
    return w - LR * decay * w - LR * g / (g.square().sqrt() + 1e-8)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("name", "momentum", "expected_step"),
    [("sgd", MOMENTUM, first_sgd_step), ("sgd", 0.0, first_sgd_step), ("adamw", MOMENTUM, first_adamw_step)],
)
def test_weight_decay_acts_on_filters_and_matrices_alone(
    name: str, momentum: float, expected_step: Callable[..., Tensor], fused: bool
) -> None:
    model = model_of_all_kinds()
    before = copy.deepcopy(dict(model.named_parameters()))
    set_gradients(model)
    build_optimizer(model, name, lr=LR, momentum=momentum, weight_decay=DECAY, fused=fused).step()
    decayed = {"0.weight", "3.weight"}
    for parameter_name, parameter in model.named_parameters():
        decay = DECAY if parameter_name in decayed else 0.0
        expected = expected_step(before[parameter_name].detach(), parameter.grad, decay, momentum)
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-12, msg=parameter_name)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_every_parameter_is_trained_once(name: str) -> None:
    model = model_of_all_kinds()
    optimizer = build_optimizer(model, name, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, fused=True)
    trained = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(trained) == sorted(map(id, model.parameters()))


def start(
    accelerator: Accelerator, ema_decay: float = 0.0, warmup_steps: int = 0, decay_steps: int = 0
) -> TrainingState:
    return start_training(
        accelerator,
        model_of_all_kinds(),
        EarlyStopping("accuracy", 1),
        optimizer="sgd",
        lr=LR,
        warmup_steps=warmup_steps,
        schedule="linear" if decay_steps else "constant",
        epochs=1,
        steps_per_epoch=decay_steps,
        momentum=0.0,
        weight_decay=0.0,
        ema_decay=ema_decay,
    )


def test_batchnorm_is_synchronised_and_the_average_evaluates(accelerator: Accelerator) -> None:
    state = start(accelerator, ema_decay=0.9)
    assert type(state.model[1]) is SyncBatchNorm
    assert not any(module.training for module in state.average.module.modules())
    assert not any(parameter.requires_grad for parameter in state.average.module.parameters())


@pytest.mark.parametrize("ema_decay", [0.0, 0.3, 0.9])
def test_the_average_follows_its_formula(accelerator: Accelerator, ema_decay: float) -> None:
    """avg <- k avg + (1 - k) w with k = min(decay, (1 + t) / (10 + t)), weights and BatchNorm statistics alike."""
    state = start(accelerator, ema_decay)
    average = state.average.module.state_dict()
    floating = [name for name, value in average.items() if value.is_floating_point()]
    assert {"0.weight", "1.bias", "1.running_mean", "1.running_var"} < set(floating)
    expected = {name: average[name].clone() for name in floating}
    for t in range(6):
        weights = state.model.state_dict()
        for index, name in enumerate(floating):
            weights[name].copy_(torch.full_like(weights[name], float(10 * t + index)))
        state.average.update(t)
        k = min(ema_decay, (1 + t) / (10 + t))
        for index, name in enumerate(floating):
            expected[name] = k * expected[name] + (1 - k) * (10 * t + index)
            torch.testing.assert_close(average[name], expected[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("decay_steps", "shares"),
    [
        (0, (1 / 16, 1 / 4, 9 / 16, 1, 1, 1, 1, 1)),
        (12, (1 / 16, 1 / 4, 9 / 16, 1, 8 / 9, 7 / 9, 6 / 9, 5 / 9, 4 / 9, 3 / 9, 2 / 9, 1 / 9, 0)),
        (4, (1 / 4, 1, 2 / 3, 1 / 3, 0)),  # shorter than four warm-ups: one step of it
        (2, (1, 1 / 2, 0)),
    ],
)
def test_the_learning_rate_rises_to_its_peak_and_falls(
    accelerator: Accelerator, decay_steps: int, shares: tuple[float, ...]
) -> None:
    state = start(accelerator, ema_decay=0.0, warmup_steps=3, decay_steps=decay_steps)
    rates = []
    for step in range(len(shares)):
        state.step = state.samples_done = step
        state.set_learning_rate()
        rates.append([group["lr"] for group in state.optimizer.param_groups])
    assert rates == [pytest.approx([LR * share] * 2) for share in shares]


def test_epochs_of_the_warm_up_take_no_patience(accelerator: Accelerator) -> None:
    state = start(accelerator, warmup_steps=5)
    state.stopper.patience = 2
    ended = []
    for step in range(1, 9):  # an epoch each
        state.step = step
        state.end_epoch(state.stopper.update(0.5, loss=float(step)))
        ended.append(state.stopper.should_stop)
    assert ended == [False] * 5 + [True] * 3


def test_the_rate_falls_after_every_third_epoch_without_improvement(accelerator: Accelerator) -> None:
    state = start(accelerator, ema_decay=0.0)
    state.plateau = True
    rates = []
    for accuracy in (0.5, 0.6, 0.6, 0.6, 0.6, 0.7, 0.7, 0.7, 0.7):
        state.end_epoch(state.stopper.update(accuracy, loss=1.0))
        state.set_learning_rate()
        rates.append(state.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([LR * 0.3**falls for falls in (0, 0, 0, 0, 1, 1, 1, 1, 2)])
