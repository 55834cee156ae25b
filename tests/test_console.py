"""What a run says about its input.

python -m pytest tests/test_console.py
"""

from pathlib import Path

import pytest
import torch

from mnist_ddp.console import end_line, rare_classes
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
    labels = torch.arange(12) % 6
    images = ImageSet(torch.zeros(12, 2, 2, dtype=torch.uint8), labels, tuple("abcdef"), "twelve.csv")
    assert rare_classes(Subset(images, torch.tensor(indices))) == notes


def test_the_last_line_names_no_report_that_is_not_there(tmp_path: Path) -> None:
    result = {
        "status": "finished",
        "epochs": 1,
        "best_epoch": 1,
        "test_accuracy": 0.5,
        "num_test": 4,
        "wall_seconds": 1,
    }
    line = (
        f"test accuracy 50.00% on 4 images (ran all epochs after 1 epoch, best was 1; 1 s); model in {tmp_path / 'cnn'}"
    )
    assert end_line(result, str(tmp_path)) == line
    (tmp_path / "report.html").touch()
    assert end_line(result, str(tmp_path)) == f"{line}, report in {tmp_path / 'report.html'}"


def test_a_class_of_one_image_is_named() -> None:
    labels = torch.tensor([0, 0, 1, 1, 2])
    images = ImageSet(torch.zeros(5, 2, 2, dtype=torch.uint8), labels, ("3", "8", "88"), "five.csv")
    assert rare_classes(Subset(images, torch.arange(5))) == ["a single image shows class 88; is its label a slip?"]
