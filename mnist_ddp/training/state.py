"""What a training run changes as it goes, and how it starts."""

from dataclasses import dataclass
from typing import Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mnist_ddp.model.batchnorm import convert_sync_batchnorm
from mnist_ddp.training.early_stopping import EarlyStopping

Status = Literal["early_stopped", "finished", "target_reached", "diverged"]
EXIT_STATUS: dict[Status, int] = {"early_stopped": 0, "finished": 0, "target_reached": 0, "diverged": 3}


@dataclass
class TrainingState:
    """Everything that a step changes.

    Attributes:
        model: prepared by Accelerate.
        average: running average of the model's weights and buffers, which is what is evaluated and saved.
        optimizer: prepared by Accelerate.
        stopper: early stopping.
        epoch: epochs that are complete.
        step: optimizer steps taken, skipped ones not counted.
        best_weights: state_dict of the average at the best epoch.
        best_epoch: counted from 1; 0 before the first.
        best_val_accuracy: the best epoch's, as a fraction.
        status: why training ended; None while it goes on.
    """

    model: nn.Module
    average: AveragedModel
    optimizer: torch.optim.Optimizer
    stopper: EarlyStopping
    epoch: int = 0
    step: int = 0
    best_weights: dict[str, Tensor] | None = None
    best_epoch: int = 0
    best_val_accuracy: float | None = None
    status: Status | None = None


def start_training(
    accelerator: Accelerator,
    model: nn.Module,
    stopper: EarlyStopping,
    *,
    optimizer: Literal["sgd", "adamw"],
    lr: float,
    momentum: float,
    weight_decay: float,
    ema_decay: float,
) -> TrainingState:
    """The state before the first step: BatchNorm synchronised, model and optimizer prepared, average like the model.

    Args:
        accelerator: of this run; all processes call this together with equal models.
        model: any module; is changed in place and moved to the accelerator's device.
        stopper: early stopping.
        optimizer, lr, momentum, weight_decay: see `build_optimizer`.
        ema_decay: share of the average that is kept at each step, 0 to 1; 0 makes the average the model itself.
    """
    # The order matters: DDP wraps what it finds, the average copies what will be trained.
    model = convert_sync_batchnorm(model, accelerator.device).to(accelerator.device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stub
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema_decay), use_buffers=True)
    built = build_optimizer(model, optimizer, lr=lr, momentum=momentum, weight_decay=weight_decay)
    prepared_model, prepared_optimizer = accelerator.prepare(model, built)
    # Synchronised BatchNorm keeps the buffers equal without DDP's broadcast before every forward pass.
    prepared_model.broadcast_buffers = False
    return TrainingState(prepared_model, average, prepared_optimizer, stopper)


def build_optimizer(
    model: nn.Module, name: Literal["sgd", "adamw"], *, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """SGD or AdamW over the parameters of `model`.

    Weight decay acts on filters and matrices only. Biases and BatchNorm parameters, which have one dimension, are left
    alone: pulling them to zero does not shrink the function, it moves it.
    """
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=True)
    return torch.optim.AdamW(groups, lr=lr, betas=(momentum, 0.99), fused=True)
