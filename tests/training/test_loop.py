"""The loop: what a step does, and when and with which weights the processes leave.

python -m pytest tests/training/test_loop.py
"""

import copy
from typing import Any

import pytest
import torch
from ranks import accelerator_of, leave_group, run_ranks
from runs import begin, convnet, made_up_splits
from torch import Tensor, nn

from mnist_ddp.settings import Settings
from mnist_ddp.training.early_stopping import EarlyStopping
from mnist_ddp.training.loop import EpochResult, fit, train_step
from mnist_ddp.training.signals import StopSignals
from mnist_ddp.training.state import TrainingState

CLASSES = 4
SMALL = {"batch_size": 16, "width": 4, "augment": False}


class Ended(EarlyStopping):
    """On one of the processes only, after as many epochs as that is patient."""


def run_fit(s: Settings, model: nn.Module | None = None) -> tuple[TrainingState, list[EpochResult], list[Any]]:
    """One rank: trains to the end on 128 made-up images. Returns with it the average's state after each epoch."""
    accelerator = accelerator_of(gradient_accumulation_steps=s.gradient_accumulation_steps)
    state, train_loader, val_loader = begin(accelerator, made_up_splits(256), s, model=model)
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
    return state, epochs, averages
