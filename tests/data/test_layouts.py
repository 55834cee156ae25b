"""Each layout of csv-like image files that people have is read back equal.

python -m pytest tests/data/test_layouts.py
"""

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from csv_tables import LABELS, NAMES, PIXELS, rows, text

from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.data.reading import read_image_set, read_table
from mnist_ddp.errors import UserError

REPOSITORY = Path(__file__).parents[2]
HEADER = ["label", *NAMES]


def quoted(names: list[str]) -> list[str]:
    return [f'"{name}"' for name in names]


def one_hot(classes: int = 10) -> list[list[str]]:
    hot = np.eye(classes, dtype=int)[LABELS].tolist()
    return [[*map(str, pixels), *map(str, bits)] for pixels, bits in zip(PIXELS.tolist(), hot, strict=True)]


def with_ids(names: str, first: object = 1) -> list[list[str]]:
    ids = range(int(str(first)), 100) if str(first).isdigit() else [f"{first}{n}" for n in range(100)]
    return [[names, *HEADER], *([str(name), *row] for name, row in zip(ids, rows(), strict=False))]


LAYOUTS = {
    "plain MNIST": text(rows()),
    "Kaggle: header": text([HEADER, *rows()]),
    "mnist-in-csv: 1x1,1x2": text([["label", "1x1", "1x2", "2x1", "2x2"], *rows()]),
    "OpenML: class last": text([[*NAMES, "class"], *rows(label_last=True)]),
    "label in any case": text([["LABEL", *NAMES], *rows()]),
    "target last": text([[*NAMES, "Target"], *rows(label_last=True)]),
    "y": text([["y", *NAMES], *rows()]),
    "a label of another name": text([["digit", *NAMES], *rows()]),
    "names of numbers": text([["label", "0", "1", "2", "3"], *rows()]),
    "id": text(with_ids("id")),
    "ImageId": text(with_ids("ImageId")),
    "Unnamed: 0": text(with_ids("Unnamed: 0", 0)),
    "an index without a name": text(with_ids("", 0)),
    "ids that are text": text(with_ids("id", "img_")),
    "floats": text(rows(show=lambda pixel: f"{pixel}.0")),
    "labels as floats": text([[f"{label}.0", *row[1:]] for label, row in zip(LABELS, rows(), strict=True)]),
    "semicolons": text([HEADER, *rows()], separator=";"),
    "tabs": text(rows(), separator="\t"),
    "quoted header": text([quoted(HEADER), *rows()]),
    "everything quoted": text([quoted(row) for row in [HEADER, *rows()]]),
    "spaces after commas": text(rows(), separator=", "),
    "byte order mark": "\ufeff" + text([HEADER, *rows()]),
    "CRLF": text([HEADER, *rows()], newline="\r\n"),
    "blank last lines": text([HEADER, *rows()], end="\n\n\n"),
    "no last newline": text([*rows(), ["3", "9", "9", "9", "0"]][:-1], end=""),
    "one-hot": text(one_hot()),
    "one-hot, floats": text([[f"{field}.0" for field in row] for row in one_hot()]),
    "one-hot with header": text([[*NAMES, *(f"label_{label}" for label in range(10))], *one_hot()]),
}


def check(images: ImageSet, labels: list[object] = LABELS, pixels: np.ndarray = PIXELS) -> None:
    assert images.images.flatten(1).tolist() == pixels.tolist()
    assert [images.class_names[label] for label in images.labels] == [str(label) for label in labels]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_read_without_a_flag(name: str, tmp_path: Path) -> None:
    path = tmp_path / "digits.csv"
    path.write_text(LAYOUTS[name], encoding="utf-8", newline="")
    found = read_image_set(path)
    check(found)
    assert found.notes == () or name == "no last newline"


def test_classes_are_the_sorted_distinct_labels(tmp_path: Path) -> None:
    path = tmp_path / "signs.csv"
    path.write_text(text([HEADER, *rows([24, 7, 100, 7, 24, 0, 8, 10, 9, 0, 100, 7])]))
    assert read_image_set(path).class_names == ("0", "7", "8", "9", "10", "24", "100")


@pytest.mark.parametrize("header", [[HEADER], []])
def test_labels_may_be_names(header: list[list[str]], tmp_path: Path) -> None:
    names = ["cat", "dog", "émeu"] * 4
    path = tmp_path / "animals.csv"
    path.write_text(text([*header, *rows(names)]), encoding="utf-8")
    check(read_image_set(path), names)


def test_a_first_row_of_the_letter_y_is_no_header(tmp_path: Path) -> None:
    """Though y is what a column of labels may be called."""
    path = tmp_path / "letters.csv"
    path.write_text(text(rows(list("yxyxyxyxyxyx"), show=lambda pixel: f"{pixel / 255:.4f}")))
    check(read_image_set(path), list("yxyxyxyxyxyx"))


def test_a_last_column_above_1_beside_pixels_of_0_to_1_is_the_label(tmp_path: Path) -> None:
    path = tmp_path / "last.csv"
    path.write_text(text(rows(label_last=True, show=lambda pixel: f"{pixel / 255:.4f}")))
    found = read_image_set(path)
    assert [found.class_names[label] for label in found.labels] == [str(label) for label in LABELS]
    assert np.array_equal(found.images.flatten(1).numpy(), PIXELS)


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (("label_3", "label_7"), ("3", "7")),
        (("label_1", "label_0"), ("1", "0")),
        (("3", "7"), ("3", "7")),
        (("pixel9", "pixel10"), ("0", "1")),  # the pixels' own names go on
    ],
)
def test_one_hot_columns_with_numbers_are_the_classes(
    names: tuple[str, ...], classes: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "hot.csv"
    bits = [["1", "0"], ["0", "1"]] * 6
    pixels = [[str(value) for value in range(number, number + 9)] for number in range(12)]
    header = [*(f"pixel{n}" for n in range(9)), *names]
    path.write_text(text([header, *(image + hot for image, hot in zip(pixels, bits, strict=True))]))
    found = read_image_set(path)
    assert found.class_names == classes
    assert found.labels.tolist() == [0, 1] * 6


def test_one_hot_columns_with_names_are_the_classes(tmp_path: Path) -> None:
    path = tmp_path / "hot.csv"
    path.write_text(text([[*NAMES, *"abcdefghij"], *one_hot()]))
    assert read_image_set(path).class_names == tuple("abcdefghij")


def test_floats_of_0_to_1_are_scaled_once_and_said(tmp_path: Path) -> None:
    path = tmp_path / "unit.csv"
    path.write_text(text(rows(show=lambda pixel: repr(pixel / 255))))
    found = read_image_set(path)
    check(found)
    assert found.notes == (f"{path}: pixels of 0 to 1 were scaled to 0 to 255",)


@pytest.mark.parametrize(("first", "then"), [("0.0", "254.0"), ("0", "0.5"), ("1.0", "2.0"), ("1", "0.25")])
def test_scale_that_shows_only_after_the_first_block(
    first: str, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixels that fit both scales, many blocks of them, then one that fits a single one."""
    monkeypatch.setattr("mnist_ddp.data.stream.BLOCK_BYTES", 10_000)
    path = tmp_path / "late.csv"
    path.write_text(text([["7", *[first] * 4]] * 5000 + [["1", *[then] * 4]] * 2))
    images = read_image_set(path).images
    scale = 255 if float(then) < 1 else 1
    assert images[:5000].unique().tolist() == [round(float(first) * scale)]
    assert images[5000:].unique().tolist() == [round(float(then) * scale)]


@pytest.mark.parametrize("suffix", ["gz", "xz", "bz2", "zst", "zip"])
@pytest.mark.parametrize("misnamed", [False, True])
def test_packed_file_is_read_whatever_its_name(suffix: str, misnamed: bool, tmp_path: Path) -> None:
    data = text([HEADER, *rows()]).encode()
    if suffix == "zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("digits/train.csv", data)
            archive.writestr("__MACOSX/._train.csv", b"\0")
        packed = buffer.getvalue()
    elif suffix == "zst":
        packed = pa.compress(data, "zstd", asbytes=True)
    else:
        packed = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}[suffix](data)
    path = tmp_path / ("digits.csv" if misnamed else f"digits.csv.{suffix}")
    path.write_bytes(packed)
    check(read_image_set(path))


def test_transposed_images_are_put_upright(tmp_path: Path) -> None:
    path = tmp_path / "emnist-digits-train.csv"
    path.write_text(text(rows()))
    found = read_image_set(path, transposed=True)
    check(found, pixels=PIXELS[:, [0, 2, 1, 3]])
    assert found.notes == ()
    hint = f"{path}: EMNIST images are usually stored transposed; --transposed true puts them upright"
    assert read_image_set(path).notes == (hint,)


@pytest.mark.parametrize(("label_column", "header"), [("first", []), ("b", [[*"bcdea"]]), ("B", [[*"bcdea"]])])
def test_label_column_names_a_column(label_column: str, header: list[list[str]], tmp_path: Path) -> None:
    path = tmp_path / "named.csv"
    path.write_text(text([*header, *rows()]))
    check(read_image_set(path, label_column=label_column))


def test_label_column_may_be_an_id_or_last(tmp_path: Path) -> None:
    path = tmp_path / "last.csv"
    path.write_text(text(rows(label_last=True)))
    check(read_image_set(path, label_column="last"))
    path.write_text(text([["id", *NAMES], *rows()]))
    check(read_image_set(path, label_column="id"))


def test_label_last_without_header_is_told_by_a_blank_corner(tmp_path: Path) -> None:
    pixels = PIXELS.copy()
    pixels[:, 0] = 0
    path = tmp_path / "openml.csv"
    path.write_text(text(rows(pixels=pixels, label_last=True)))
    found = read_image_set(path)
    check(found, pixels=pixels)
    assert found.notes == (f"{path}: the last column was taken as the label, since the first holds a single value",)

    path.write_text(text([*rows(pixels=pixels, label_last=True)] * 20 + [["9", "0", "0", "0", "1"]]))
    with pytest.raises(UserError) as error:
        read_image_set(path)
    assert (
        str(error.value) == f"{path}: the label may be the first or the last column; say --label_column first or last"
    )


def test_table_saved_without_names_has_a_header_of_numbers(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16))
    path = tmp_path / "numbered.csv"
    path.write_text(text([[str(column) for column in range(17)], *rows(pixels=pixels)]))
    check(read_image_set(path), pixels=pixels)


@pytest.mark.parametrize("number", ["{:02}", "{:.1f}", "{}"])
@pytest.mark.parametrize("labels", [list("ab") * 6, LABELS])
def test_a_label_and_numbers_in_order_are_a_header(number: str, labels: list[object], tmp_path: Path) -> None:
    path = tmp_path / "numbered.csv"
    path.write_text(text([["label", *map(number.format, range(4))], *rows(labels)]))
    check(read_image_set(path), labels)


def test_table_without_labels_is_read_but_not_for_training(tmp_path: Path) -> None:
    """Kaggle's test.csv, and Kannada-MNIST's with its ids."""
    for number, header in enumerate((NAMES, ["id", *NAMES])):
        path = tmp_path / f"test{number}.csv"
        images = [[*map(str, [row] * (len(header) - 4)), *map(str, image)] for row, image in enumerate(PIXELS.tolist())]
        path.write_text(text([header, *images]))
        found = read_table(path)
        assert found.labels is None
        assert found.images.flatten(1).tolist() == PIXELS.tolist()
        with pytest.raises(UserError) as error:
            read_image_set(path)
        assert str(error.value) == (
            f"{path}: has no labels, only 4 columns for 2x2 pixels; training needs labels, in a column of their own"
        )


def test_label_names_come_from_an_emnist_mapping(tmp_path: Path) -> None:
    path, mapping = tmp_path / "letters.csv", tmp_path / "mapping.txt"
    path.write_text(text(rows([1, 26] * 6)))
    mapping.write_text("".join(f"{index} {64 + index} {96 + index}\n" for index in range(1, 27)))
    found = read_image_set(path, label_names=str(mapping))
    assert found.class_names == ("A", "Z")
    val = tmp_path / "val.csv"
    val.write_text(text(rows([26] * 12)))
    held_out = read_image_set(val, label_names=str(mapping), class_names=found.class_names)
    assert held_out.labels.unique().tolist() == [1]


def test_validation_file_uses_the_classes_of_the_main_file(tmp_path: Path) -> None:
    path = tmp_path / "val.csv"
    path.write_text(text(rows([5] * 12)))
    found = read_image_set(path, class_names=("1", "3", "5"))
    check(found, [5] * 12)
    assert found.class_names == ("1", "3", "5")
    with pytest.raises(UserError) as error:
        read_image_set(path, class_names=("1", "3"))
    assert str(error.value) == f"{path}: label 5 is not among the classes of the training images: 1, 3"


def test_the_digits_that_come_with_the_project_are_read_right() -> None:
    """Against a reading by hand: no code in common with the package."""
    path = REPOSITORY / "data/mnist_test.csv.gz"
    with gzip.open(path, "rt") as file:
        table = np.fromstring(",".join(file), dtype=np.int64, sep=",").reshape(10_000, 785)
    found = read_image_set(path)
    assert np.array_equal(found.images.flatten(1).numpy(), table[:, 1:])
    assert np.array_equal(found.labels.numpy(), table[:, 0])
    assert found.class_names == tuple("0123456789")


@pytest.mark.parametrize("side", [1, 3, 8, 64])
def test_any_square_number_of_pixels(side: int, tmp_path: Path) -> None:
    pixels = np.random.default_rng(side).integers(0, 256, (12, side * side))
    path = tmp_path / "square.csv"
    path.write_text(text(rows(pixels=pixels)))
    if side == 1:
        with pytest.raises(UserError, match="rows have 2 fields; expected a label and a square number of pixels"):
            read_image_set(path)
        return
    found = read_image_set(path)
    assert found.images.shape == (12, side, side)
    check(found, pixels=pixels)
