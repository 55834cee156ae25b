"""Labelled images in memory: what every reader returns and what every loader starts from."""

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
        assert self.images.dtype == torch.uint8 and self.images.dim() == 3
        assert self.labels.dtype == torch.int64 and self.labels.shape == self.images.shape[:1]

    def __len__(self) -> int:
        return len(self.images)
