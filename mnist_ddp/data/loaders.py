"""ImageSet -> DataLoaders. Which sample comes when is decided here, and never depends on the rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mnist_ddp.data.augment import draw_affine
from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.errors import UserError
from mnist_ddp.words import counted


class Batch(NamedTuple):
    """One process's share of a step."""

    images: Tensor  # (N, H, W) uint8
    labels: Tensor  # (N,) int64
    affine: Tensor | None  # (N, 2, 3) float32 where the images are to be augmented


@dataclass(frozen=True)
class Subset:
    """Some samples of an ImageSet: the set stays whole, so that a memory-mapped one is never copied."""

    image_set: ImageSet
    indices: Tensor  # (N,) int64

    def __len__(self) -> int:
        return len(self.indices)


class Splits(NamedTuple):
    """What a run trains on, chooses its weights by, and is judged by."""

    train: Subset
    val: Subset
    test: Subset


def make_splits(sets: Mapping[str, ImageSet], *, val_fraction: float, test_fraction: float, seed: int) -> Splits:
    """The parts of a run; what is not among `sets` is split off the training set.

    Args:
        sets: "train" and, where they have images of their own, "validation" and "test"; of one image size.
        val_fraction, test_fraction: shares of the training set, for what is split off it.
        seed: of the split.

    Raises:
        UserError: the training set is too small.
    """
    fractions = {"validation": val_fraction, "test": test_fraction}
    split_off = [name for name in fractions if name not in sets]
    train, *parts = split(sets["train"], [fractions[name] for name in split_off], seed)
    named = dict(zip(split_off, parts, strict=True))
    named |= {name: Subset(sets[name], torch.arange(len(sets[name]))) for name in fractions if name in sets}
    return Splits(train, named["validation"], named["test"])


def split(image_set: ImageSet, fractions: Sequence[float], seed: int) -> list[Subset]:
    """Disjoint random subsets: first the remainder, then one for each fraction.

    Args:
        image_set: what to split, n samples.
        fractions: shares in 0..1; each subset gets round(fraction * n) samples, at least 1.
        seed: the split is a function of it and n.

    Raises:
        UserError: nothing is left for the first subset.
    """
    n = len(image_set)
    sizes = [max(1, round(fraction * n)) for fraction in fractions]
    rest = n - sum(sizes)
    if rest < 1:
        raise UserError(f"{image_set.source}: {n} images are too few to split off validation and test images")
    order = torch.randperm(n, generator=_generator(seed))
    # Sorted, so that an evaluation walks through a memory-mapped file in one direction.
    return [Subset(image_set, indices.sort().values) for indices in order.split([rest, *sizes])]


class EvaluationSamples(Dataset[Batch]):
    """The samples of a subset, in order. `__getitems__` fetches a batch with one index_select."""

    def __init__(self, subset: Subset) -> None:
        self.image_set = subset.image_set
        self.indices = subset.indices.to(self.image_set.images.device)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitems__(self, positions: Sequence[int]) -> Batch:
        # The samplers walk in order, so a batch is a slice: no index list is built or copied to the device.
        chosen = self.indices[positions[0] : positions[-1] + 1]
        return self._fetch(chosen)

    def _fetch(self, chosen: Tensor, affine: Tensor | None = None) -> Batch:
        return Batch(
            self.image_set.images.index_select(0, chosen), self.image_set.labels.index_select(0, chosen), affine
        )


class TrainingSamples(EvaluationSamples):
    """A subset in the random order of one epoch, with the augmentation of each sample.

    Order and augmentation are a function of (seed, epoch, position in the epoch) alone. A process's share of a step
    is a range of positions, so the global batch is the same for every number of processes.

    Args:
        subset: the training samples.
        seed: of order and augmentation.
        augment: whether batches carry affine maps.
        global_batch: samples of all processes in one optimizer step. An epoch ends after the last whole global batch;
            which samples are left over changes with each epoch.
    """

    def __init__(self, subset: Subset, *, seed: int, augment: bool, global_batch: int) -> None:
        super().__init__(subset)
        self.seed = seed
        self.augment = augment
        self.global_batch = global_batch
        self.skip = 0  # samples that the epoch under way has seen already; a resumed run sets it
        self._drawn: tuple[int, int] | None = None
        self.set_epoch(0)

    def __len__(self) -> int:
        return len(self.order)

    def set_epoch(self, epoch: int) -> None:
        """Draws order and augmentation of `epoch`, counted from 0. Accelerate's loaders call it before each pass."""
        if self._drawn == (epoch, self.skip):  # the loader asks again when its pass begins
            return
        self._drawn = (epoch, self.skip)
        device, n = self.indices.device, len(self.indices)
        rest = slice(self.skip, self.skip + (n - self.skip) // self.global_batch * self.global_batch)
        generator = _generator(self.seed, epoch)
        self.order = self.indices[torch.randperm(n, generator=generator)[rest].to(device)]
        self.affine = draw_affine(n, generator)[rest].to(device) if self.augment else None

    def __getitems__(self, positions: Sequence[int]) -> Batch:
        step = slice(positions[0], positions[-1] + 1)
        return self._fetch(self.order[step], None if self.affine is None else self.affine[step])


class Loaders(NamedTuple):
    """To be prepared by Accelerate, which gives each process its share of every step."""

    train: DataLoader[Batch]
    val: DataLoader[Batch]
    test: DataLoader[Batch]


def make_loaders(
    splits: Splits,
    device: torch.device,
    *,
    seed: int,
    augment: bool,
    batch_size: int,
    processes: int,
    accumulation_steps: int,
) -> Loaders:
    """Loaders of the three splits, whose images lie on `device` where they fit.

    Args:
        splits: of the run.
        device: of this process.
        seed: of the training order and augmentation.
        augment: whether training batches carry affine maps.
        batch_size: samples per process and step.
        processes: that share each step.
        accumulation_steps: batches per process and optimizer step.

    Raises:
        UserError: the global batch is larger than the training split: not one step would be taken.
    """
    global_batch = batch_size * processes * accumulation_steps
    available = len(splits.train)
    if global_batch > available:
        fits = available // (processes * accumulation_steps)
        if fits:
            advice = f"--batch_size {fits} would fit"
        elif available >= processes:
            advice = f"--batch_size 1 --gradient_accumulation_steps {available // processes} would fit"
        else:
            advice = f"no more than {counted(available, 'process')} would fit"
        raise UserError(
            f"--batch_size {batch_size}: a step takes {batch_size} x {counted(processes, 'process')} x "
            f"{counted(accumulation_steps, 'accumulation step')} = {global_batch} images, but {available} are for "
            f"training; {advice}"
        )
    on_device = {id(subset.image_set): _place(subset.image_set, device) for subset in splits}
    train, val, test = (Subset(on_device[id(subset.image_set)], subset.indices) for subset in splits)
    return Loaders(
        _loader(TrainingSamples(train, seed=seed, augment=augment, global_batch=global_batch), batch_size),
        _loader(EvaluationSamples(val), batch_size),
        _loader(EvaluationSamples(test), batch_size),
    )


def _loader(samples: EvaluationSamples, batch_size: int) -> DataLoader[Batch]:
    # __getitems__ returns a whole batch: there is nothing left to collate.
    return DataLoader(samples, batch_size=batch_size, collate_fn=lambda batch: batch)


def _place(image_set: ImageSet, device: torch.device) -> ImageSet:
    """The set on `device` where it takes less than half of what is free there, else as it is.

    On the device, no step copies an image from the host.
    """
    if device.type != "cuda" or image_set.images.nbytes > torch.cuda.mem_get_info(device)[0] / 2:
        return image_set
    return replace(image_set, images=image_set.images.to(device), labels=image_set.labels.to(device))


def pixel_statistics(subset: Subset) -> tuple[float, float]:
    """Mean and standard deviation of all pixels, scaled to 0..1, from exact integer sums."""
    images = subset.image_set.images
    counts = torch.zeros(256, dtype=torch.int64)
    for chosen in subset.indices.split(8192):  # in parts, since the set may be larger than memory
        counts += torch.bincount(images.index_select(0, chosen).flatten(), minlength=256)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = (counts * values).sum() / counts.sum()
    variance = (counts * (values - mean) ** 2).sum() / counts.sum()
    return mean.item(), variance.sqrt().item()


def _generator(*entropy: int) -> torch.Generator:
    """A CPU generator seeded by all the numbers together."""
    # torch keeps 32 bits of a seed: SeedSequence mixes all numbers into them.
    (seed,) = np.random.SeedSequence(entropy).generate_state(1)
    return torch.Generator().manual_seed(int(seed))
