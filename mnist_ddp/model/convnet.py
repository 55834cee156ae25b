"""The classifier: convolutions with BatchNorm, most of them strided, for images of any size."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from mnist_ddp.errors import UserError


def conv_block(channels_in: int, channels_out: int, kernel: int, stride: int = 2) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU. The map's sides are divided by `stride`, and rounded up."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class ConvNet(nn.Module, PyTorchModelHubMixin):
    """Four convolutions, three of which halve the map, and a linear layer.

    At full resolution, convolutions and BatchNorm cost most of the time and buy little accuracy on digits: the map is
    halved at once. Without the third convolution, which does not halve it, as much computing buys less. The linear
    layer sees the last map whole: averaged over its positions, it learns slowly.
    Normalisation is part of the model, so that whoever loads it cannot get it wrong.

    Args:
        class_names: the name of each class, in label order.
        image_size: (height, width) that it is trained on; the last map of other sizes is pooled to the same grid.
        width: channels of the first convolution; the others have 2, 4 and 4 times as many.
        mean, std: of the training pixels in 0..1.
    """

    def __init__(
        self,
        class_names: Sequence[str],
        image_size: Sequence[int],
        width: int,
        mean: float,
        std: float,
    ) -> None:
        super().__init__()
        self.class_names = tuple(class_names)
        self.image_size = tuple(image_size)
        self.mean = mean
        self.std = std
        self.features = nn.Sequential(
            conv_block(1, width, 5),
            conv_block(width, 2 * width, 3),
            conv_block(2 * width, 4 * width, 3, stride=1),
            conv_block(4 * width, 4 * width, 3),
        )
        height, width_ = (-(-size // 8) for size in image_size)  # halved three times, rounded up
        self.grid = (height, width_)
        self.classifier = nn.Linear(4 * width * self.grid[0] * self.grid[1], len(self.class_names))

    @classmethod
    def _load_as_safetensor(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        # The mixin's own default, strict=False, leaves at random what a file of another network lacks.
        return super()._load_as_safetensor(model, model_file, map_location, strict=True)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores.

        Args:
            images: (N, H, W), uint8 in 0..255 or floating in 0..1.

        Returns:
            (N, classes) logits, of the weights' dtype under autocast too.
        """
        dtype = self.classifier.weight.dtype
        pixels = images.to(dtype) / 255 if images.dtype == torch.uint8 else images.to(dtype)
        x = ((pixels - self.mean) / self.std).unsqueeze(1)  # (N, 1, H, W)
        x = self.features(x)  # (N, 4 width, h, w)
        if x.shape[2:] != self.grid:
            x = F.adaptive_avg_pool2d(x, self.grid)
        # Channels last, as they lie in memory: flattened the other way, the map and its gradient would be copied.
        x = x.permute(0, 2, 3, 1).flatten(1).to(dtype)
        # Not in half precision, where two classes may have equal scores: see the default job in benchmarks/RESULTS.md.
        kind = x.device.type
        mixed = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False) if mixed else nullcontext():
            return self.classifier(x)


def build_model(
    class_names: Sequence[str], image_size: Sequence[int], *, width: int, mean: float, std: float, seed: int
) -> ConvNet:
    """A ConvNet whose initial weights are a function of the seed, and so the same on every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ConvNet(class_names, image_size, width, mean, std)


def check_batch_size(model: ConvNet, batch_size: int, processes: int) -> None:
    """Raises UserError where the last map has one value per channel in a step: BatchNorm knows no variance then."""
    height, width = model.grid
    if batch_size * processes * height * width < 2:
        size = "x".join(map(str, model.image_size))
        raise UserError(f"--batch_size {batch_size}: BatchNorm needs 2 or more images of {size} in a step")
