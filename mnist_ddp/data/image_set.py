"""Labelled images in memory: what every reader returns and what every loader starts from."""

import functools
import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mnist_ddp.errors import UserError
from mnist_ddp.words import counted


@dataclass(frozen=True)
class ImageSet:
    """Grey images with their labels.

    Attributes:
        images: (N, H, W) uint8, 0 is background. May be a view of a memory-mapped file: read only.
        labels: (N,) int64, indices into `class_names`.
        class_names: the name of each class, in label order.
        source: the file or dataset that the images came from, for messages.
        notes: what the reader has to tell the user, a line each.
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    source: str
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert (self.images.dtype, self.images.dim()) == (torch.uint8, 3)
        assert (self.labels.dtype, self.labels.shape) == (torch.int64, self.images.shape[:1])

    def __len__(self) -> int:
        return len(self.images)

    def fingerprint(self) -> str:
        """Tells sets apart by content, wherever they were read from: all labels, and 1,000 images across the set."""
        some = torch.linspace(0, len(self) - 1, min(len(self), 1000)).long()
        digest = hashlib.sha256(repr((tuple(self.images.shape), self.class_names)).encode())
        digest.update(self.labels.numpy().tobytes())
        digest.update(self.images.index_select(0, some).numpy().tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def hashes(self) -> Tensor:
        """(N,) int64, equal for equal images; of this process, which seeds Python's hashes. A second for 1,000,000."""
        rows = (hash(image.tobytes()) for part in self.images.split(8192) for image in part.numpy())
        return torch.from_numpy(np.fromiter(rows, np.int64, len(self)))


def apart(held_out: ImageSet, train: ImageSet, name: str) -> ImageSet:
    """A validation or test set, with a note where some of its images are among those for training, pixel for pixel.

    Args:
        held_out, train: of one image size.
        name: of the first, for messages.

    Raises:
        UserError: all of them are, and not because there are few different images at all.
    """
    known = int(torch.isin(held_out.hashes, train.hashes).sum())
    if known == len(held_out) and 2 * len(train.hashes.unique()) > len(train):
        raise UserError(
            f"{name}: holds no image that {train.source} lacks, and says nothing of others; leave it out, "
            "and some are split off"
        )
    if known == 0:
        return held_out
    note = f"{name}: {train.source} holds {known:,} of its {counted(len(held_out), 'image')} too, which flatters it"
    return replace(held_out, notes=(*held_out.notes, note))
