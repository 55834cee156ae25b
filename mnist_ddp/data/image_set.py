"""Labelled images in memory: what every reader returns and what every loader starts from."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


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
