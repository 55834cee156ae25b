"""A training run as train_accel.py puts it together, up to its first step."""

from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.data.loaders import Batch, Splits, make_loaders, pixel_statistics, split
from mnist_ddp.model.convnet import build_model
from mnist_ddp.settings import Settings
from mnist_ddp.training.early_stopping import EarlyStopping
from mnist_ddp.training.state import TrainingState, start_training


class Run(NamedTuple):
    state: TrainingState
    train_loader: DataLoader[Batch]
    val_loader: DataLoader[Batch]


def begin(
    accelerator: Accelerator,
    splits: Splits,
    s: Settings,
    *,
    dtype: torch.dtype = torch.float32,
    model: nn.Module | None = None,
) -> Run:
    """Loaders and state; `model` replaces the ConvNet."""
    loaders = make_loaders(
        splits,
        accelerator.device,
        seed=s.seed,
        augment=s.augment,
        batch_size=s.batch_size,
        processes=accelerator.num_processes,
        accumulation_steps=s.gradient_accumulation_steps,
    )
    train_loader, val_loader, _ = accelerator.prepare(*loaders)
    state = start_training(
        accelerator,
        (model or convnet(splits, s)).to(dtype),
        EarlyStopping(s.monitor, s.patience, s.min_delta),
        optimizer=s.optimizer,
        lr=s.lr,
        warmup_steps=s.warmup_steps,
        schedule=s.schedule,
        epochs=s.epochs,
        steps_per_epoch=len(train_loader) // s.gradient_accumulation_steps,
        global_batch=s.batch_size * accelerator.num_processes * s.gradient_accumulation_steps,
        momentum=s.momentum,
        weight_decay=s.weight_decay,
        ema_decay=s.ema_decay,
    )
    return Run(state, train_loader, val_loader)


def convnet(splits: Splits, s: Settings) -> nn.Module:
    digits = splits.train.image_set
    mean, std = pixel_statistics(splits.train)
    return build_model(digits.class_names, digits.images.shape[1:], width=s.width, mean=mean, std=std, seed=s.seed)


def made_up_splits(num_images: int, size: int = 8, num_classes: int = 4) -> Splits:
    """Noise with a bright row for each class, easy to learn but for the noise: splits of 1/2, 1/4 and 1/4."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num_images, size, size), generator=generator, dtype=torch.uint8)
    labels = torch.randint(num_classes, (num_images,), generator=generator)
    images[torch.arange(num_images), labels] |= 128
    names = tuple(str(label) for label in range(num_classes))
    return Splits(*split(ImageSet(images, labels, names, "made up"), (0.25, 0.25), seed=0))
