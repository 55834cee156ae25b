"""Loaders: which sample comes when, on how many processes, and what is split off for what.

python -m pytest tests/data/test_loaders.py
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import accelerator_of, run_ranks
from torch import Tensor

from mnist_ddp.data.augment import draw_affine
from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.data.loaders import (
    Batch,
    EvaluationSamples,
    Splits,
    Subset,
    TrainingSamples,
    make_loaders,
    make_splits,
    pixel_statistics,
    split,
)
from mnist_ddp.data.reading import read_files
from mnist_ddp.errors import UserError

GLOBAL_BATCH = 12
CPU = torch.device("cpu")


def numbered(n: int, source: str = "digits.csv", size: int = 4) -> ImageSet:
    """Images whose first two pixels are their own number, and whose labels follow from it."""
    images = torch.zeros(n, size, size, dtype=torch.uint8)
    images[:, 0, 0], images[:, 0, 1] = torch.arange(n) // 256, torch.arange(n) % 256
    return ImageSet(images, torch.arange(n) % 3, ("a", "b", "c"), source)


def numbers(images: Tensor) -> list[int]:
    return (images[:, 0, 0].int() * 256 + images[:, 0, 1]).tolist()


def splits_of(n: int) -> Splits:
    return Splits(*split(numbered(n), (0.2, 0.2), seed=0))


# ---- order and augmentation


def two_epochs(batch_size: int, accumulation_steps: int = 1) -> list[list[Batch]]:
    """One rank: its batches of two epochs, of 60 samples of which 36 are for training."""
    accelerator = accelerator_of(gradient_accumulation_steps=accumulation_steps)
    loaders = make_loaders(
        splits_of(60),
        accelerator.device,
        seed=5,
        augment=True,
        batch_size=batch_size,
        processes=accelerator.num_processes,
        accumulation_steps=accumulation_steps,
    )
    loader = accelerator.prepare(loaders.train)
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append(list(loader))
    return epochs


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_the_processes_share_the_batches_of_one(processes: int) -> None:
    (whole,) = run_ranks(two_epochs, 1, GLOBAL_BATCH)
    ranks = run_ranks(two_epochs, processes, GLOBAL_BATCH // processes)
    for epoch, expected_steps in enumerate(whole):
        assert len(expected_steps) == 3
        for step, expected in enumerate(expected_steps):
            shares = [rank[epoch][step] for rank in ranks]
            assert [len(share.labels) for share in shares] == [GLOBAL_BATCH // processes] * processes
            for together, one in zip(zip(*shares, strict=True), expected, strict=True):
                assert torch.equal(torch.cat(together), one)
        assert all(len(rank[epoch]) == 3 for rank in ranks)


def test_accumulated_batches_are_those_of_one_large_one() -> None:
    (whole,) = run_ranks(two_epochs, 1, GLOBAL_BATCH)
    ranks = run_ranks(two_epochs, 2, GLOBAL_BATCH // 4, 2)
    for epoch, expected_steps in enumerate(whole):
        for step, expected in enumerate(expected_steps):
            shares = [rank[epoch][2 * step + micro] for micro in range(2) for rank in ranks]
            for together, one in zip(zip(*shares, strict=True), expected, strict=True):
                assert torch.equal(torch.cat(together), one)


def samples(n: int = 40, seed: int = 5, augment: bool = True, global_batch: int = 12) -> TrainingSamples:
    image_set = numbered(n + 10)
    return TrainingSamples(
        Subset(image_set, torch.arange(10, n + 10)), seed=seed, augment=augment, global_batch=global_batch
    )


def epoch_of(training: TrainingSamples, epoch: int) -> Batch:
    training.set_epoch(epoch)
    return training.__getitems__(range(len(training)))


def test_each_epoch_has_its_own_order_and_augmentation() -> None:
    training = samples()
    first, second = epoch_of(training, 0), epoch_of(training, 1)
    assert numbers(first.images) != numbers(second.images)
    assert not torch.isclose(first.affine, second.affine).flatten(1).all(1).any()
    again = epoch_of(samples(), 1)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(second, again, strict=True))


def test_another_seed_gives_another_order_and_augmentation() -> None:
    one, other = epoch_of(samples(seed=5), 0), epoch_of(samples(seed=6), 0)
    assert numbers(one.images) != numbers(other.images)
    assert not torch.equal(one.affine, other.affine)
    # A sum of seed and epoch would make one run repeat the other's epochs.
    assert numbers(epoch_of(samples(seed=5), 1).images) != numbers(other.images)


def test_an_epoch_has_whole_global_batches_of_different_samples() -> None:
    training = samples(n=40, global_batch=12)
    left_over = set()
    for epoch in range(20):
        seen = numbers(epoch_of(training, epoch).images)
        assert len(seen) == len(set(seen)) == 36
        left_over |= set(range(10, 50)) - set(seen)
    assert left_over > set(range(10, 15))  # which samples an epoch leaves out changes


def test_images_labels_and_maps_belong_together() -> None:
    batch = epoch_of(samples(n=24, global_batch=24), 0)
    assert batch.labels.tolist() == [number % 3 for number in numbers(batch.images)]
    assert batch.images.dtype == torch.uint8
    assert batch.affine.shape == (24, 2, 3)
    assert samples(augment=False).__getitems__([0, 1]).affine is None
    assert draw_affine(24, torch.Generator().manual_seed(0)).dtype == batch.affine.dtype


def test_an_epoch_goes_on_where_it_was_left() -> None:
    whole, rest = epoch_of(samples(n=48), 3), samples(n=48)
    rest.skip = 24
    for expected, value in zip(whole, epoch_of(rest, 3), strict=True):
        assert torch.equal(value, expected[24:])


def test_evaluation_walks_through_the_subset_in_order() -> None:
    subset = Subset(numbered(300), torch.tensor([3, 7, 8, 20, 299]))
    evaluation = EvaluationSamples(subset)
    batches = [evaluation.__getitems__(positions) for positions in ([0, 1, 2], [3, 4])]
    assert [number for batch in batches for number in numbers(batch.images)] == [3, 7, 8, 20, 299]
    assert all(batch.affine is None for batch in batches)


# ---- splits


@pytest.mark.parametrize(
    ("n", "fractions", "sizes"),
    [
        (100, (0.1, 0.1), [80, 10, 10]),
        (10_000, (0.1, 0.1), [8000, 1000, 1000]),
        (103, (0.1, 0.25), [67, 10, 26]),
        (3, (0.1, 0.1), [1, 1, 1]),
        (50, (), [50]),
    ],
)
def test_subsets_are_disjoint_and_cover_the_set(n: int, fractions: tuple[float, ...], sizes: list[int]) -> None:
    subsets = split(numbered(n), fractions, seed=1)
    assert [len(subset) for subset in subsets] == sizes
    assert torch.cat([subset.indices for subset in subsets]).sort().values.tolist() == list(range(n))


def test_the_split_is_random_by_its_seed() -> None:
    one, same, other = ([s.indices.tolist() for s in split(numbered(100), (0.1, 0.1), seed)] for seed in (1, 1, 2))
    assert one == same
    assert one[1] != other[1]
    assert one[1] != list(range(80, 90))


def test_too_few_images_for_a_split_are_refused() -> None:
    with pytest.raises(UserError, match=r"^digits\.csv: 2 images are too few to split off validation and test images$"):
        split(numbered(2), (0.1, 0.1), seed=1)


def write_csv(path: Path, n: int, size: int = 2, first: int = 0) -> str:
    """Rows of label and pixels, with the row's number, counted from `first`, as first pixel and two classes."""
    pixels = ",0" * (size * size - 1)
    path.write_text("".join(f"{row % 2},{row}{pixels}\n" for row in range(first, first + n)))
    return str(path)


@pytest.mark.parametrize(
    ("own", "sizes"),
    [
        ((), [32, 4, 4]),
        (("val",), [36, 10, 4]),
        (("test",), [36, 4, 10]),
        (("val", "test"), [40, 10, 10]),
    ],
)
def test_what_has_a_file_of_its_own_is_not_split_off(tmp_path: Path, own: tuple[str, ...], sizes: list[int]) -> None:
    main, extra = write_csv(tmp_path / "main.csv", 40), write_csv(tmp_path / "extra.csv", 10, first=100)
    val, test = (extra if name in own else "" for name in ("val", "test"))
    splits = make_splits(read_files(main, val, test), val_fraction=0.1, test_fraction=0.1, seed=0)
    assert [len(subset) for subset in splits] == sizes
    for name in own:
        assert getattr(splits, name).image_set.source == extra
        assert getattr(splits, name).indices.tolist() == list(range(10))
    of_main = [subset.indices for subset in splits if subset.image_set.source == main]
    assert torch.cat(of_main).sort().values.tolist() == list(range(40))


def test_a_file_with_images_of_another_size_is_refused(tmp_path: Path) -> None:
    main, val = write_csv(tmp_path / "main.csv", 40, size=28), write_csv(tmp_path / "val.csv", 10, size=32)
    with pytest.raises(UserError) as caught:
        read_files(main, val)
    assert str(caught.value) == f"{val}: images of 32x32 pixels, but those of {main} are 28x28"


def test_held_out_images_that_are_training_images_are_counted(tmp_path: Path) -> None:
    rows = Path(write_csv(tmp_path / "main.csv", 40)).read_text().splitlines(keepends=True)
    reordered, mixed = tmp_path / "reordered.csv", tmp_path / "mixed.csv"
    reordered.write_text("".join(rows[30:] + rows[:10]))
    others = [",".join([*row.split(",")[:-1], "77\n"]) for row in rows[:7]]
    mixed.write_text("".join(others + rows[5:8]))

    with pytest.raises(UserError) as caught:
        read_files(str(tmp_path / "main.csv"), "", str(reordered))
    assert str(caught.value).startswith(f"--test_file_path {reordered}: holds no image that ")
    sets = read_files(str(tmp_path / "main.csv"), str(mixed))
    assert sets["validation"].notes == (
        f"--val_file_path {mixed}: {tmp_path / 'main.csv'} holds 3 of its 10 images too, which flatters it",
    )


def test_held_out_images_may_be_known_where_few_different_ones_exist(tmp_path: Path) -> None:
    main, blanks = tmp_path / "main.csv", tmp_path / "blanks.csv"
    main.write_text("0,0,0,0,0\n1,9,9,9,9\n" * 20)
    blanks.write_text("0,0,0,0,0\n" * 5)
    (note,) = read_files(str(main), "", str(blanks))["test"].notes
    assert "holds 5 of its 5 images too" in note


# ---- loaders


def loaders_of(n: int, **options: Any) -> Any:
    defaults = {"seed": 0, "augment": True, "batch_size": 4, "processes": 1, "accumulation_steps": 1}
    return make_loaders(splits_of(n), CPU, **defaults | options)


@pytest.mark.parametrize(
    ("batch_size", "processes", "accumulation_steps", "step"),
    [
        (37, 1, 1, "1 process x 1 accumulation step = 37 images, but 36 are for training; --batch_size 36 would fit"),
        (19, 2, 1, "2 processes x 1 accumulation step = 38 images, but 36 are for training; --batch_size 18 would fit"),
        (10, 2, 2, "2 processes x 2 accumulation steps = 40 images, but 36 are for training; --batch_size 9 would fit"),
    ],
)
def test_a_batch_larger_than_the_split_is_refused(
    batch_size: int, processes: int, accumulation_steps: int, step: str
) -> None:
    size = {"processes": processes, "accumulation_steps": accumulation_steps}
    with pytest.raises(UserError) as caught:
        loaders_of(60, batch_size=batch_size, **size)
    assert str(caught.value) == f"--batch_size {batch_size}: a step takes {batch_size} x {step}"
    assert len(loaders_of(60, batch_size=int(str(caught.value).split()[-3]), **size).train) >= 1


def test_too_many_processes_for_the_split_are_refused() -> None:
    with pytest.raises(UserError, match=r"; no more than 36 processes would fit$"):
        loaders_of(60, batch_size=1, processes=37)


def test_too_many_accumulation_steps_for_the_split_are_refused() -> None:
    with pytest.raises(UserError, match=r"; --batch_size 1 --gradient_accumulation_steps 18 would fit$"):
        loaders_of(60, batch_size=1, processes=2, accumulation_steps=19)
    assert len(loaders_of(60, batch_size=1, processes=2, accumulation_steps=18).train) == 36


def test_a_batch_takes_one_index_select_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        batches = list(loaders_of(60).train)
    fetches = [event for event in profile.events() if event.name == "aten::index_select"]
    assert len(batches) == 9
    assert len([event for event in fetches if len(event.input_shapes[0]) == 3]) == 9


def test_a_memory_mapped_source_is_not_copied(tmp_path: Path) -> None:
    n = 1000
    images = torch.from_file(str(tmp_path / "images"), shared=True, size=n * 16, dtype=torch.uint8).view(n, 4, 4)
    mapped = ImageSet(images, torch.zeros(n, dtype=torch.int64), ("a", "b"), "mapped")
    splits = Splits(*split(mapped, (0.2, 0.2), seed=0))
    loaders = make_loaders(splits, CPU, seed=0, augment=True, batch_size=4, processes=1, accumulation_steps=1)
    assert all(loader.dataset.image_set.images.data_ptr() == images.data_ptr() for loader in loaders)


def test_pixel_statistics_are_those_of_the_subset() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (20_000, 3, 5), generator=generator, dtype=torch.uint8)
    image_set = ImageSet(images, torch.zeros(20_000, dtype=torch.int64), ("a", "b"), "noise")
    subset, _ = split(image_set, (0.3,), seed=0)
    pixels = images[subset.indices].numpy().astype("float64") / 255
    assert pixel_statistics(subset) == pytest.approx((pixels.mean(), pixels.std()), abs=1e-12)
