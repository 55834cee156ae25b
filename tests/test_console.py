"""What a run says about its input.

python -m pytest tests/test_console.py
"""

import pytest
import torch

from mnist_ddp.console import unseen_classes
from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.data.loaders import Subset


@pytest.mark.parametrize(
    ("indices", "notes"),
    [
        ([0, 1, 2, 3, 4, 5], []),
        ([1, 2, 3, 4, 5], ["no training image shows class a, so it cannot be learned"]),
        ([5], ["no training image shows class a, b, c, d, ..., so it cannot be learned"]),
        ([0, 2, 3], ["no training image shows class b, e, f, so it cannot be learned"]),
    ],
)
def test_classes_without_training_images_are_named(indices: list[int], notes: list[str]) -> None:
    images = ImageSet(torch.zeros(6, 2, 2, dtype=torch.uint8), torch.arange(6), tuple("abcdef"), "six.csv")
    assert unseen_classes(Subset(images, torch.tensor(indices))) == notes
