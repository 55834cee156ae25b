"""The classifier: strided convolutions with BatchNorm, for images of any size."""

from collections.abc import Sequence

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn


def conv_block(channels_in: int, channels_out: int, kernel: int, stride: int) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU; the map shrinks by `stride`, rounded up."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class ConvNet(nn.Module, PyTorchModelHubMixin):
    """Three convolutions, global average pooling and a linear layer.

    The first convolution strides: at full resolution, convolutions and BatchNorm cost most of the time and buy little
    accuracy on digits. Normalisation is part of the model, so that whoever loads it cannot get it wrong.

    Args:
        class_names: the name of each class, in label order.
        image_size: (height, width) that it is trained on; it takes other sizes too.
        width: channels of the first convolution.
        mean, std: of the training pixels in 0..1.
    """

    def __init__(
        self,
        class_names: Sequence[str] = tuple("0123456789"),
        image_size: Sequence[int] = (28, 28),
        width: int = 16,
        mean: float = 0.1307,
        std: float = 0.3081,
    ) -> None:
        super().__init__()
        self.class_names = tuple(class_names)
        self.image_size = tuple(image_size)
        self.mean = mean
        self.std = std
        self.features = nn.Sequential(
            conv_block(1, width, 5, 2),
            conv_block(width, 2 * width, 3, 1),
            conv_block(2 * width, 4 * width, 3, 2),
        )
        self.classifier = nn.Linear(4 * width, len(self.class_names))

    def forward(self, images: Tensor) -> Tensor:
        """Class scores.

        Args:
            images: (N, H, W), uint8 in 0..255 or floating in 0..1.

        Returns:
            (N, classes) logits.
        """
        dtype = self.classifier.weight.dtype
        pixels = images.to(dtype) / 255 if images.dtype == torch.uint8 else images.to(dtype)
        x = ((pixels - self.mean) / self.std).unsqueeze(1)  # (N, 1, H, W)
        x = self.features(x)  # (N, 4 width, H/4, W/4)
        return self.classifier(x.mean(dim=(2, 3)))


def build_model(
    class_names: Sequence[str], image_size: Sequence[int], *, width: int, mean: float, std: float, seed: int
) -> ConvNet:
    """A ConvNet whose initial weights are a function of the seed, and so the same on every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ConvNet(class_names, image_size, width, mean, std)
