"""What the package datasets loads becomes ImageSets, or is refused in one line; all without a network.

python -m pytest tests/data/test_hub.py
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from mnist_ddp.data.hub import read_dataset
from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.errors import UserError

REPOSITORY = Path(__file__).parents[2]
PIXELS = np.random.default_rng(1206).integers(0, 256, (12, 6, 9), dtype=np.uint8)
LABELS = [0, 2, 1, 2, 0, 1, 1, 0, 2, 2, 1, 0]
NAMES = ["cat", "dog", "emu"]
CLASSES = datasets.ClassLabel(names=NAMES)
INTEGERS = datasets.Value("int64")
TEXTS = datasets.Value("string")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def dataset(labels: Any = LABELS, images: Any = PIXELS, feature: Any = CLASSES, **more: Any) -> datasets.Dataset:
    pictures = [Image.fromarray(image) if isinstance(image, np.ndarray) else image for image in images]
    features = {"image": datasets.Image(), "label": feature}
    features |= {name: TEXTS if isinstance(values[0], str) else INTEGERS for name, values in more.items()}
    content = {"image": pictures, "label": list(labels), **more}
    return datasets.Dataset.from_dict(content, features=datasets.Features(features))


def saved(folder: Path, **splits: datasets.Dataset) -> str:
    """A folder with the splits, or with one dataset without splits."""
    if "only" in splits:
        splits["only"].save_to_disk(folder)
    else:
        datasets.DatasetDict(splits).save_to_disk(folder)
    return str(folder)


def write_parquet(folder: Path) -> None:
    folder.mkdir()
    dataset().to_parquet(folder / "train-00000.parquet")
    dataset().select(range(5)).to_parquet(folder / "test-00000.parquet")


def write_images(folder: Path) -> None:
    for split, rows in (("train", range(12)), ("test", range(5))):
        for row in rows:
            path = folder / split / NAMES[LABELS[row]] / f"{row:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(PIXELS[row]).save(path)


def write_saved(folder: Path) -> None:
    saved(folder, train=dataset(), test=dataset().select(range(5)))


def content(images: ImageSet) -> list[tuple[str, bytes]]:
    """Class name and pixels of each image, in an order that does not depend on the source."""
    return sorted(
        (images.class_names[label], image.numpy().tobytes())
        for image, label in zip(images.images, images.labels, strict=True)
    )


EXPECTED = [(NAMES[label], image.tobytes()) for label, image in zip(LABELS, PIXELS, strict=True)]


@pytest.mark.parametrize("write", [write_parquet, write_images, write_saved])
@pytest.mark.parametrize("cached", [False, True])
def test_folder_is_read_with_its_splits(write: Callable[[Path], None], cached: bool, tmp_path: Path) -> None:
    folder = tmp_path / "animals"
    write(folder)
    for _ in range(1 + cached):
        sets = read_dataset(str(folder), cache_dir=str(tmp_path / "cache") if cached else "")
        assert list(sets) == ["train", "test"]
        assert content(sets["train"]) == sorted(EXPECTED)
        assert content(sets["test"]) == sorted(EXPECTED[:5])
        assert sets["train"].class_names == sets["test"].class_names == tuple(NAMES)
        assert sets["train"].images.shape[1:] == (6, 9)
    assert len(list(tmp_path.glob("cache/*.arrow"))) == 2 * cached


def test_single_split_is_train_whatever_its_name(tmp_path: Path) -> None:
    for folder, splits in (("one", {"only": dataset()}), ("named", {"test": dataset()})):
        sets = read_dataset(saved(tmp_path / folder, **splits))
        assert list(sets) == ["train"]
        assert content(sets["train"]) == sorted(EXPECTED)


def test_other_splits_are_said_or_missed(tmp_path: Path) -> None:
    few = dataset().select(range(3))
    path = saved(tmp_path / "a", train=dataset(), extra=few, valid=few)
    sets = read_dataset(path)
    assert list(sets) == ["train", "validation"]
    assert sets["train"].notes == (f"{path}: split extra is not used",)
    path = saved(tmp_path / "b", left=few, right=few)
    with pytest.raises(UserError) as error:
        read_dataset(path)
    assert str(error.value) == f"--dataset {path}: has no split named train, but left, right"


@pytest.mark.parametrize(("feature", "missing"), [(CLASSES, -1), (INTEGERS, None), (TEXTS, "")])
def test_split_with_secret_labels_is_left_out(feature: Any, missing: Any, tmp_path: Path) -> None:
    labels = [NAMES[label] for label in LABELS] if feature is TEXTS else LABELS
    train = dataset(labels, feature=feature)
    path = saved(tmp_path / "a", train=train, test=dataset([missing] * 12, feature=feature))
    sets = read_dataset(path)
    assert list(sets) == ["train"]
    assert sets["train"].notes == (f"{path} (test): has no labels and is left out",)
    path = saved(tmp_path / "b", train=dataset([*labels[:7], missing, missing, *labels[9:]], feature=feature))
    with pytest.raises(UserError) as error:
        read_dataset(path)
    assert str(error.value) == f"{path} (train): 2 images have no label, the first of them row 7, from 0"


@pytest.mark.parametrize("feature", [INTEGERS, TEXTS])
def test_labels_without_names_are_the_classes(feature: Any, tmp_path: Path) -> None:
    labels = [{0: 7, 1: 10, 2: 100}[label] for label in LABELS]
    values = [f"n{label:03}" for label in labels] if feature is TEXTS else labels
    path = saved(tmp_path / "a", train=dataset(values, feature=feature))
    found = read_dataset(path)["train"]
    assert found.class_names == (("n007", "n010", "n100") if feature is TEXTS else ("7", "10", "100"))
    assert [found.class_names[label] for label in found.labels] == [str(value) for value in values]

    path = saved(tmp_path / "b", train=dataset(values, feature=feature), test=dataset(["55"] * 12, feature=TEXTS))
    with pytest.raises(UserError) as error:
        read_dataset(path)
    assert str(error.value).startswith(f"{path} (test): label 55 is not among the classes of the training images: ")


def test_columns_are_told_or_asked_for(tmp_path: Path) -> None:
    two = dataset(fine=["a", "b"] * 6, coarse=[1, 2] * 6).rename_column("label", "other")
    path = saved(tmp_path / "a", only=two.cast_column("other", INTEGERS))
    with pytest.raises(UserError) as error:
        read_dataset(path)
    assert str(error.value) == (
        f"--dataset {path}: which column to use? name it with --label_column; "
        "the columns are image, other, fine, coarse"
    )
    assert read_dataset(path, label_column="fine")["train"].class_names == ("a", "b")
    for arguments, flag in (
        ({"label_column": "none"}, "--label_column none"),
        ({"image_column": "fine"}, "--image_column fine"),
    ):
        with pytest.raises(UserError) as error:
            read_dataset(path, **arguments)
        assert str(error.value) == (
            f"--dataset {path}: {flag} cannot be used; the columns are image, other, fine, coarse"
        )
    path = saved(tmp_path / "b", only=dataset().remove_columns("image"))
    with pytest.raises(UserError) as error:
        read_dataset(path)
    assert str(error.value) == (
        f"--dataset {path}: no column to use? name it with --image_column; the columns are label"
    )


def test_colour_becomes_grey_and_transparency_background(tmp_path: Path) -> None:
    grey = Image.fromarray(PIXELS[0])
    half = Image.new("LA", (9, 6), (200, 0))
    half.paste((200, 255), (0, 0, 4, 6))
    deep = Image.fromarray(PIXELS[0].astype(np.uint16) * 257)
    colours = Image.merge("RGB", [grey.point(lambda value, f=factor: value // f) for factor in (1, 2, 3)])
    images = [
        grey,
        grey.convert("RGB"),
        grey.convert("P"),
        grey.point(lambda v: 255 * (v > 99)).convert("1"),
        half,
        deep,
        colours,
    ]
    found = read_dataset(saved(tmp_path / "a", only=dataset([0, 1, 2, 0, 1, 2, 0], images)))["train"].images.numpy()
    for row in (0, 1, 5):
        assert np.array_equal(found[row], PIXELS[0])
    assert np.array_equal(found[3], 255 * (PIXELS[0] > 99))
    assert found[4, :, :4].min() == found[4, :, :4].max() == 200
    assert found[4, :, 4:].max() == 0
    red, green, blue = (PIXELS[0].astype(int) // factor for factor in (1, 2, 3))
    assert np.abs(found[6] - (0.299 * red + 0.587 * green + 0.114 * blue)).max() <= 1  # ITU-R 601-2 luma


def test_images_of_other_sizes_are_refused_or_resized(tmp_path: Path) -> None:
    odd = [*PIXELS[:4], PIXELS[4].T.copy(), *PIXELS[5:]]
    path = saved(tmp_path / "a", train=dataset(), test=dataset(images=odd))
    with pytest.raises(UserError) as error:
        read_dataset(path)
    assert str(error.value) == (
        f"{path} (test): row 4, from 0: 6x9 pixels instead of 9x6; --image_size N resizes all to NxN"
    )
    sets = read_dataset(path, image_size=28)
    assert sets["train"].images.shape == sets["test"].images.shape == (12, 28, 28)
    means = sets["train"].images.float().mean((1, 2)).numpy()
    assert np.abs(means - PIXELS.mean((1, 2))).max() < 8  # resized, not cropped


def test_image_that_cannot_be_decoded_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mnist_ddp.data.hub._BATCH", 5)
    broken = dataset().cast_column("image", datasets.Image(decode=False))
    rows = broken.to_list()
    rows[7]["image"]["bytes"] = rows[7]["image"]["bytes"][:40]
    rows[7]["image"]["path"] = None
    path = saved(tmp_path / "a", only=datasets.Dataset.from_list(rows, features=dataset().features))
    with pytest.raises(UserError) as error:
        read_dataset(path)
    assert str(error.value).startswith(f"{path} (train): row 7, from 0: not an image: ")
    assert "\n" not in str(error.value)


def test_one_class_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", only=dataset([1] * 12))
    with pytest.raises(UserError, match="all labels are dog; training needs two classes"):
        read_dataset(path)


def test_folder_or_file_that_is_no_dataset(tmp_path: Path) -> None:
    file = tmp_path / "digits.csv"
    file.write_text("1,2,3,4,5\n")
    (tmp_path / "empty").mkdir()
    for path, reason in (
        (file, "is a file; --dataset takes a folder, --mnist_file_path a CSV file"),
        (tmp_path / "nothing", "no such folder, nor an id on the Hub such as ylecun/mnist"),
        ("scans/", "no such folder, nor an id on the Hub such as ylecun/mnist"),
        (tmp_path / "empty", f"The directory at {tmp_path}/empty doesn't contain any data files"),
    ):
        with pytest.raises(UserError) as error:
            read_dataset(str(path))
        assert str(error.value) == f"--dataset {path}: {reason}"


def run(code: str, **environment: str) -> str:
    """What a process of its own prints, on either stream."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    return f"{done.returncode}: {done.stdout}"


READ = (
    "from mnist_ddp.errors import exit_with_one_line\nfrom mnist_ddp.data.hub import read_dataset\n"
    "with exit_with_one_line():\n    read_dataset('ylecun/mnist')\n"
)


def test_offline_is_one_line_that_names_what_works_without(tmp_path: Path) -> None:
    assert run(READ, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)) == (
        "2: error: --dataset ylecun/mnist: no such folder, and the Hub cannot be reached; a folder of Parquet files, "
        "of class-named folders of images or of save_to_disk would do, or a CSV file\n"
    )


def test_without_the_package_the_csv_way_works() -> None:
    """A module set to None cannot be imported."""
    csv = "from mnist_ddp.data.reading import read_image_set; print(len(read_image_set('data/mnist_test.csv.gz')))\n"
    assert run("import sys; sys.modules['datasets'] = None\n" + csv + READ, PYTHONUNBUFFERED="1") == (
        "2: 10000\n"
        "error: --dataset ylecun/mnist: needs the package datasets (pip install datasets); a CSV file does not\n"
    )
