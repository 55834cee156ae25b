"""What N processes compute, against one process and plain PyTorch."""

from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from mnist_ddp.data.augment import apply_affine
from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.data.loaders import Splits, Subset, TrainingSamples, make_loaders, pixel_statistics
from mnist_ddp.model.convnet import ConvNet, build_model
from mnist_ddp.training.early_stopping import EarlyStopping
from mnist_ddp.training.loop import train_step
from mnist_ddp.training.state import start_training

STEPS = 20
_GLOBAL_BATCH = 240  # about; divides by 2, 3, 4, 5, 6, 8
# SGD, whose steps are as small as the gradients: Adam's first steps have the sign of a gradient, rounding included.
_LR = 0.1


class Training(NamedTuple):
    """What came out of some steps, on the CPU."""

    losses: Tensor  # (STEPS,) float64 over the global batch
    weights: dict[str, Tensor]  # with BatchNorm's buffers


def model_of(images: ImageSet, *, width: int, seed: int) -> ConvNet:
    """A ConvNet for `images`, on the CPU in fp32."""
    mean, std = pixel_statistics(Subset(images, torch.arange(len(images))))
    return build_model(images.class_names, images.images.shape[1:], width=width, mean=mean, std=std, seed=seed)


def enough(images: ImageSet, needed: int) -> Splits:
    """All of `images` to train on, as often as it takes for `needed` samples; the other splits are not used."""
    once = torch.arange(len(images))
    few = Subset(images, once[:1])
    return Splits(Subset(images, once.repeat(-(-needed // len(images)))), few, few)


def global_batch_size(processes: int) -> int:
    """The multiple of `processes` at or below 240, or `processes`."""
    return max(1, _GLOBAL_BATCH // processes) * processes


def precision(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def train_alone(images: ImageSet, global_batch: int, device: torch.device, *, width: int, seed: int) -> Training:
    """A plain loop in this process: torch's own BatchNorm and SGD, no DDP, no Accelerate."""
    model = model_of(images, width=width, seed=seed).to(device, precision(device)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9, nesterov=True)
    subset = enough(images, STEPS * global_batch).train
    samples = TrainingSamples(subset, seed=seed, augment=True, global_batch=global_batch)
    losses = []
    for step in range(STEPS):
        batch = samples.__getitems__(range(step * global_batch, (step + 1) * global_batch))
        assert batch.affine is not None
        pictures, affine = batch.images.to(device), batch.affine.to(device, precision(device))
        loss = F.cross_entropy(model(apply_affine(pictures, affine)), batch.labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Training(torch.tensor(losses, dtype=torch.float64), _on_cpu(model))


def train_together(accelerator: Accelerator, images: ImageSet, *, width: int, seed: int) -> Training:
    """The same steps by the project's own parts, shared by all processes, which call it together."""
    processes, device = accelerator.num_processes, accelerator.device
    global_batch = global_batch_size(processes)
    train_loader, *_ = make_loaders(
        enough(images, STEPS * global_batch),
        device,
        seed=seed,
        augment=True,
        batch_size=global_batch // processes,
        processes=processes,
        accumulation_steps=1,
    )
    state = start_training(
        accelerator,
        model_of(images, width=width, seed=seed).to(precision(device)),
        EarlyStopping("accuracy", 1),
        optimizer="sgd",
        lr=_LR,
        warmup_steps=0,
        momentum=0.9,
        weight_decay=0.0,
        ema_decay=0.0,
    )
    state.model.train()
    losses = []
    for batch in islice(accelerator.prepare(train_loader), STEPS):
        exact = batch._replace(affine=batch.affine.to(precision(device)))
        losses.append(train_step(accelerator, state, exact, label_smoothing=0.0, max_grad_norm=0.0).loss)
    shared = accelerator.reduce(torch.stack(losses), reduction="mean")
    return Training(shared.cpu().double(), _on_cpu(state.module))


def step_difference(images: ImageSet, device: torch.device, *, width: int, seed: int) -> tuple[float, float]:
    """One training step in fp32 on `device` against one in float64 on the CPU.

    Returns:
        Absolute difference of the losses, and the largest relative difference of a parameter's gradient in L2 norm.
    """

    def step(where: torch.device, dtype: torch.dtype) -> tuple[float, list[Tensor]]:
        model = model_of(images, width=width, seed=seed).to(where, dtype).train()
        loss = F.cross_entropy(model(images.images[:64].to(where)), images.labels[:64].to(where))
        loss.backward()
        return loss.item(), [p.grad.double().cpu() for p in model.parameters() if p.grad is not None]

    loss, gradients = step(device, torch.float32)
    expected_loss, expected = step(torch.device("cpu"), torch.float64)
    relative = [((g - e).norm() / e.norm()).item() for g, e in zip(gradients, expected, strict=True)]
    return abs(loss - expected_loss), max(relative)


def _on_cpu(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
