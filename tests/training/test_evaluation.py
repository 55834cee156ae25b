"""Evaluation counts each sample once, for every number of samples, processes and batch size.

python -m pytest tests/training/test_evaluation.py
"""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from ranks import accelerator_of, run_ranks
from runs import made_up_splits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mnist_ddp.data.loaders import Batch, Splits, Subset, make_loaders
from mnist_ddp.training.evaluation import Evaluation, evaluate

SIZES = range(1, 51)
BATCH_SIZES = (1, 3, 16)
CLASSES = 4


def splits_with(num_val: int) -> Splits:
    """Enough for training, and `num_val` others, which are not in a row, for validation."""
    splits = made_up_splits(256)
    chosen = torch.randperm(len(splits.val), generator=torch.Generator().manual_seed(num_val))[:num_val]
    return splits._replace(val=Subset(splits.val.image_set, splits.val.indices[chosen]))


class Linear(nn.Module):
    """Fixed random weights: what is tested is not the model, and this one takes no time."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8 * 8, CLASSES, generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) / 255 @ self.weight


def evaluate_all() -> dict[tuple[int, int], Evaluation]:
    """One rank: all sizes and batch sizes."""
    accelerator = accelerator_of()
    model = Linear()
    results = {}
    for n in SIZES:
        splits = splits_with(n)
        for batch_size in BATCH_SIZES:
            results[n, batch_size] = evaluate(accelerator, model, val_loader(accelerator, splits, batch_size), CLASSES)
    return results


def val_loader(accelerator: Accelerator, splits: Splits, batch_size: int) -> DataLoader[Batch]:
    """Prepared."""
    processes = accelerator.num_processes
    loaders = make_loaders(
        splits,
        accelerator.device,
        seed=0,
        augment=True,
        batch_size=batch_size,
        processes=processes,
        accumulation_steps=1,
    )
    return accelerator.prepare(loaders.val)


@pytest.fixture(scope="module")
def counted_by_hand() -> dict[int, tuple[float, float, np.ndarray]]:
    """Loss, accuracy and confusion matrix of each size, by numpy from the logits of the whole subset at once."""
    results = {}
    for n in SIZES:
        splits = splits_with(n)
        images, labels = splits.val.image_set.images, splits.val.image_set.labels
        with torch.inference_mode():
            logits = Linear()(images[splits.val.indices]).double().numpy()
        true = labels[splits.val.indices].numpy()
        predicted = logits.argmax(axis=1)
        confusion = np.zeros((CLASSES, CLASSES), dtype=np.int64)
        for row, column in zip(true, predicted, strict=True):
            confusion[row, column] += 1
        losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(n), true]
        results[n] = (float(losses.mean()), float((predicted == true).mean()), confusion)
    return results


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_each_sample_counts_once(processes: int, counted_by_hand: dict[int, tuple[float, float, np.ndarray]]) -> None:
    for results in run_ranks(evaluate_all, processes):
        for (n, batch_size), result in results.items():
            loss, accuracy, confusion = counted_by_hand[n]
            where = f"{n} samples in batches of {batch_size}"
            assert result.count == n, where
            assert np.array_equal(result.confusion.numpy(), confusion), where
            assert result.accuracy == accuracy, where
            assert result.loss == pytest.approx(loss, rel=0, abs=1e-6), where


def evaluate_padded() -> str:
    """One rank: 5 samples in batches of 2 on 2 processes, with Accelerate's default, which repeats samples."""
    accelerator = accelerator_of()
    accelerator.even_batches = True
    try:
        evaluate(accelerator, Linear(), val_loader(accelerator, splits_with(5), 2), CLASSES)
    except AssertionError as error:
        return str(error)
    return "evaluated"


def test_repeated_samples_are_noticed() -> None:
    assert run_ranks(evaluate_padded, 2) == ["6 samples counted of 5"] * 2
