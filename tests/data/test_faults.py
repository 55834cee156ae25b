"""Each fault of a file is refused in one line that says where it is; at most five are described.

python -m pytest tests/data/test_faults.py
"""

import gzip
import io
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from csv_tables import NAMES, rows, text

from mnist_ddp.data.reading import read_image_set
from mnist_ddp.errors import UserError

HEADER = ["label", *NAMES]
GOOD = rows()
PLAIN = text(GOOD)
TITLED = text([HEADER, *GOOD])


class Fault(NamedTuple):
    content: str | bytes
    message: str  # after "PATH: "


def plain(*changed: str, at: int = 3) -> str:
    """Twelve good rows, with `changed` after the first `at`."""
    lines = PLAIN.splitlines()
    return "\n".join([*lines[:at], *changed, *lines[at:]]) + "\n"


def archive(**members: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(name.replace("_", "."), content)
    return buffer.getvalue()


PACKED = gzip.compress(PLAIN.encode() * 50)

ROWS = {
    "short row": Fault(plain("1,2,3"), "row 4 has 3 fields instead of 5"),
    "row of one field": Fault(plain("1"), "row 4 has 1 field instead of 5"),
    "long row": Fault(plain("1,2,3,4,5,6"), "row 4 has 6 fields instead of 5"),
    "first row short": Fault(plain("1,2,3", at=0), "row 1 has 3 fields instead of 5"),
    "first row long": Fault(plain("1,2,3,4,5,6", at=0), "row 1 has 6 fields instead of 5"),
    "one extra field in all": Fault(
        text([[*row, "7"] for row in GOOD]),
        "rows have 6 fields; expected a label and a square number of pixels, such as 785 fields for 28x28 images",
    ),
    "one extra field in all, below a header": Fault(
        text([HEADER, *([*row, "7"] for row in GOOD)]), "every row has 6 fields, but the header has 5"
    ),
    "trailing comma in all": Fault(
        text([[*row, ""] for row in GOOD]),
        "rows have 6 fields; expected a label and a square number of pixels, such as 785 fields for 28x28 images",
    ),
    "empty line in the middle": Fault(plain(""), "row 4 is empty"),
    "header in the middle": Fault(
        TITLED + TITLED, "row 14 is text, such as a header, in the middle of the data; were files joined?"
    ),
    "comment": Fault(plain("# by hand"), "row 4 is a comment: '# by hand'"),
    "comment first": Fault("# MNIST\n" + PLAIN, "row 1 is a comment; remove it"),
    "other separator": Fault(plain("1;2;3;4;5"), "row 4 has 1 field instead of 5"),
    "cut in a row": Fault(PLAIN + "1,2,3", "row 13 has 3 of 5 fields: the file ends in the middle of it"),
    "cut before a number": Fault(PLAIN + "1,2,3,4,", "row 13, column 5: is blank"),
}

VALUES = {
    "blank": Fault(plain("1,2,,4,5"), "row 4, column 3: is blank"),
    "blank of spaces": Fault(plain("1,2,  ,4,5"), "row 4, column 3: is blank"),
    "label among pixels of 0 and 1": Fault(
        "0,0,1,1,0\n1,1,0,0,1\n" * 6 + "1.5,0,1,1,0\n", "row 13, column 1: label '1.5' is fractional"
    ),
    "missing name": Fault(
        "cat,0,9,1,0\ndog,1,9,0,1\n" * 6 + "nan,0,0,1,1\n", "row 13, column 1: label 'nan' is a missing value"
    ),
    "a return and an empty line that make up for each other": Fault(
        plain("1,2,3,4,5\r1,2,3,4,5", ""), "row 4 has 9 fields instead of 5; row 5 is empty"
    ),
    "NaN": Fault(plain("1,2,NaN,4,5"), "row 4, column 3: 'NaN' is not a number"),
    "NA": Fault(plain("1,2,3,4,NA"), "row 4, column 5: 'NA' is not a number"),
    "text": Fault(plain("1,2,abc,4,5"), "row 4, column 3: 'abc' is not a number"),
    "long text": Fault(plain(f"1,2,{'x' * 99},4,5"), f"row 4, column 3: '{'x' * 20}...' is not a number"),
    "hexadecimal": Fault(plain("1,0x10,3,4,5"), "row 4, column 2: '0x10' is not a number"),
    "underscore": Fault(plain("1,1_0,3,4,5"), "row 4, column 2: '1_0' is not a number"),
    "digits of another script": Fault(plain("1,\u0665,3,4,5"), "row 4, column 2: '\u0665' is not a number"),
    "quote inside": Fault(plain('1,"2"3,3,4,5'), "row 4, column 2: '\"2\"3' is not a number"),
    "quote never closed": Fault(plain('1,"2,3,4,5'), "row 4, column 2: '\"2' is not a number"),
    "bad encoding": Fault(
        plain("1,2,3,4,5").encode() + b"1,2,\xe9,4,5\n", "row 14, column 3: '\\\\xe9' is not a number"
    ),
    "negative": Fault(plain("1,2,-3,4,5"), "row 4, column 3: -3 is negative"),
    "above 255": Fault(plain("1,2,3,256,5"), "row 4, column 4: 256 is above 255"),
    "infinite": Fault(plain("1,2,inf,4,5"), "row 4, column 3: 'inf' is not a number"),
    "overflow": Fault(plain("1,2,1e999,4,5"), "row 4, column 3: 1e999 is above 255"),
    "fractional": Fault(plain("1,2,2.5,4,5"), "row 4, column 3: 2.5 is fractional, where pixels are 0 to 255"),
    "fraction of 1": Fault(plain("1,2,0.5,4,5"), "row 4, column 3: 0.5 is fractional, where pixels are 0 to 255"),
    "above 1": Fault(
        text(rows(show=lambda pixel: str(pixel / 255))) * 20 + "1,2,0.5,0,0\n",
        "row 241, column 2: 2 is above 1, where pixels are 0 to 1",
    ),
    "negative among 0 to 1": Fault(
        text(rows(show=lambda pixel: str(pixel / 255))) + "1,-0.4,0.5,0,0\n", "row 13, column 2: -0.4 is negative"
    ),
    "NUL": Fault(plain("1,2,\x003,4,5"), "row 4, column 3: '\\x003' is not a number"),
    "carriage return": Fault(plain("1,2,3\r,4,5"), "row 4, column 3: '3\\r' is not a number"),
    "label is fractional": Fault(plain("1.5,2,3,4,5"), "row 4, column 1: label '1.5' is fractional"),
    "label is blank": Fault(plain(",2,3,4,5"), "row 4, column 1: label is blank"),
    "label is text": Fault(plain("seven,2,3,4,5"), "row 4, column 1: label 'seven' is not a number"),
    "label is a number among names": Fault(
        text([HEADER, *rows(["cat", "dog", "cat"] * 4)]) + "7,1,2,3,4\n",
        "row 14, column 1 (label): label '7' is a number among names",
    ),
    "label is too large": Fault(plain(f"{2**53},2,3,4,5"), f"row 4, column 1: label '{2**53}' is too large"),
    "label in a bad encoding": Fault(
        b"label,a1,a2,a3,a4\ncaf\xe9,1,2,3,4\ntea,1,2,3,4\n",
        "row 2 holds 'caf\\\\xe9', which is not plain UTF-8 text",
    ),
    "id with a NUL": Fault(
        "id,label,a1,a2,a3,a4\nx\x00y,1,1,2,3,4\nz,2,1,2,3,4\n", "row 2 holds 'x\\x00y', which is not plain UTF-8 text"
    ),
    "two ones of one-hot": Fault(
        "1,2,3,4,0,0,1\n5,6,7,8,0,1,0\n" * 150 + "5,6,7,8,1,1,0\n",
        "row 301, columns 5 to 7: a one-hot label has a single 1",
    ),
    "with the name of the column": Fault(TITLED + "1,2,3,300,5\n", "row 14, column 4 (pixel2): 300 is above 255"),
}

FILES = {
    "empty": Fault("", "is empty"),
    "byte order mark alone": Fault(b"\xef\xbb\xbf", "is empty"),
    "blank lines alone": Fault("\n\n\n", "is empty"),
    "header only": Fault(",".join(HEADER) + "\n", "has a header but no rows"),
    "header and a blank line": Fault(",".join(HEADER) + "\n\n", "has a header but no rows"),
    "duplicate names": Fault(
        text([["label", "a1", "a1", "a2", "a3"], *GOOD]), "row 1: columns 2 and 3 are both named a1; rename one"
    ),
    "names out of order": Fault(
        text([["label", "a1", "a10", "a2", "a3"], *GOOD]),
        "row 1: column a2 is out of order; sort the pixel columns by number",
    ),
    "two labels": Fault(
        text([["label", *NAMES[:3], "class"], *GOOD]),
        "columns label and class could both be the label; name one with --label_column",
    ),
    "no square": Fault(
        text([["label", *NAMES, "pixel4"], *([*row, "7"] for row in GOOD)]),
        "the header has 6 columns, 5 besides label; pixels must be a square number, such as 784",
    ),
    "a pixel too few beside names": Fault(
        text([["A", *row[2:]] for row in GOOD]),
        "rows have 4 fields; expected a label and a square number of pixels, such as 785 fields for 28x28 images",
    ),
    "a pixel too few before names": Fault(
        text([[*NAMES[:3], "letter"], *([*row[2:], "A"] for row in GOOD)]),
        "the header has 4 columns, 3 besides letter; pixels must be a square number, such as 784",
    ),
    "a column of neither": Fault(
        text([["label", *NAMES, "writer"], *([*row, "Ann"] for row in GOOD)]),
        "the header has 6 columns, 5 besides label; pixels must be a square number, such as 784; remove what is no "
        "pixel, or name the label by --label_column: writer",
    ),
    "two columns of neither": Fault(
        text([["digit", "writer", *NAMES], *([row[0], "Ann", *row[1:]] for row in GOOD)]),
        "the header has 6 columns; pixels must be a square number, such as 784; remove what is no pixel, or name the "
        "label by --label_column: digit, writer",
    ),
    "ids alone": Fault(
        "id,index\n1,2\n2,3\n",
        "the header has 2 columns, 0 besides id, index; pixels must be a square number, such as 784",
    ),
    "a submission": Fault(
        "ImageId,Label\n1,2\n2,0\n",
        "the header has 2 columns, 0 besides Label, ImageId; pixels must be a square number, such as 784",
    ),
    "one class": Fault(text(rows(["7"] * 12)), "all labels are 7; training needs two classes; see --label_column"),
    "a label of its own for every row": Fault(
        text([[str(row), *GOOD[0][1:]] for row in range(300)]), "every row has a label of its own; is column 1 an id?"
    ),
    "UTF-16": Fault(PLAIN.encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
    "UTF-16 without a mark": Fault(PLAIN.encode("utf-16-be"), "is UTF-16 text; save it as UTF-8"),
    "HTML": Fault(
        "\n<!DOCTYPE html><html><body>404</body></html>",
        "is an HTML or XML page, not a CSV file; download the file itself",
    ),
    "JSON": Fault('{"label": 5}', "is JSON, not CSV"),
    "binary": Fault(bytes(range(256)) * 50, "is a binary file, not CSV"),
    "Parquet": Fault(b"PAR1\x15\x04\x15\x10", "is a Parquet file; give its folder to --dataset"),
    "idx": Fault(b"\x00\x00\x08\x03\x00\x00\xea\x60", "is an MNIST idx file; convert it to CSV"),
    "carriage returns alone": Fault(
        PLAIN.replace("\n", "\r"), "rows end in a carriage return alone; save it with newlines"
    ),
    "gz cut": Fault(PACKED[:-30], "the packed data is cut short; get the file again"),
    "gz damaged": Fault(PACKED[:-5] + b"x" + PACKED[-4:], "the packed data is damaged; get the file again"),
    "xz cut": Fault(b"\xfd7zXZ\x00\x00\x04", "the packed data is cut short; get the file again"),
    "zip cut": Fault(archive(a_csv=PLAIN)[:-30], "the packed data is damaged; get the file again"),
    "zip of two": Fault(
        archive(a_csv=PLAIN, b_csv=PLAIN),
        "holds a.csv, b.csv, where one CSV file is expected; unpack it and name the file",
    ),
    "zip of none": Fault(
        archive(a_png=PLAIN), "holds a.png, where one CSV file is expected; unpack it and name the file"
    ),
    "Excel": Fault(archive(**{"xl/workbook_xml": "<x/>"}), "is an Excel workbook; save it as CSV"),
}


def refusal(content: str | bytes, tmp_path: Path, **arguments: str) -> str:
    """What follows "PATH: " in the message."""
    path = tmp_path / "digits.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as error:
        read_image_set(path, **arguments)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("name", ROWS)
def test_fault_of_a_row_is_located(name: str, tmp_path: Path) -> None:
    assert refusal(ROWS[name].content, tmp_path) == ROWS[name].message


@pytest.mark.parametrize("name", VALUES)
def test_fault_of_a_value_is_located(name: str, tmp_path: Path) -> None:
    assert refusal(VALUES[name].content, tmp_path) == VALUES[name].message


@pytest.mark.parametrize("name", FILES)
def test_fault_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    assert refusal(FILES[name].content, tmp_path) == FILES[name].message


def test_row_numbers_go_on_from_block_to_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mnist_ddp.data.stream.BLOCK_BYTES", 64)
    content = TITLED + PLAIN * 40 + "1,2,3,4,x\n" + PLAIN + "\n\n\n" + PLAIN + "1,2\n" + "\n" * 99
    assert refusal(content, tmp_path) == (
        f"row {1 + 12 * 41 + 1}, column 5 (pixel3): 'x' is not a number; "
        + "".join(f"row {1 + 12 * 42 + 2 + n} is empty; " for n in range(3))
        + f"row {1 + 12 * 43 + 5} has 2 fields instead of 5"
    )


def test_five_faults_are_listed_and_the_others_counted(tmp_path: Path) -> None:
    listed = "; ".join(f"row {row}, column 2: -1 is negative" for row in range(1, 6))
    bad = "7,-1,2,3,4\n"
    assert refusal(bad * 5 + PLAIN, tmp_path) == listed
    assert refusal(bad * 6 + PLAIN, tmp_path) == f"{listed}; and 1 more"
    assert refusal(bad * 9 + PLAIN, tmp_path) == f"{listed}; and 4 more"
    assert refusal(bad * 5000, tmp_path) == f"{listed}; and at least 996 more"


@pytest.mark.parametrize(
    ("last", "warned"), [("2", True), ("25", True), ("26", False), ("255", False), ("0", False), ("12.0", False)]
)
def test_last_number_that_may_have_been_cut_is_said(last: str, warned: bool, tmp_path: Path) -> None:
    path = tmp_path / "cut.csv"
    path.write_text(f"{PLAIN}1,2,3,4,{last}")
    found = read_image_set(path)
    assert found.images[-1, -1, -1] == float(last)
    note = f"{path}: no newline after the last number; if the file was cut, digits of it may be missing"
    assert found.notes == ((note,) if warned else ())


def test_every_number_is_read_as_it_stands_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "right.csv"
    right = [f"{number:0{width}}" for number in range(256) for width in range(1, 6)]
    for place in range(1, 5):
        table = [[str(row % 2), "99", "99", "99", "99"] for row in range(len(right))]
        for row, number in zip(table, right, strict=True):
            row[place] = number
        for some in ([row for row in table if len(row[place]) < 4], table):  # all short, and not
            path.write_text(text(some))
            assert read_image_set(path).images.flatten(1).tolist() == [
                [int(field) for field in row[1:]] for row in some
            ]
    for number in [*range(256, 310), *range(310, 1100, 13), 2**16, 2**32]:
        fault = f"row 4, column 5: {number} is above 255"
        assert refusal(plain(f"7,1,2,3,{number}"), tmp_path) == fault


def test_number_among_names_is_told_in_a_block_of_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mnist_ddp.data.stream.BLOCK_BYTES", 10)
    content = text(rows(["cat", "dog", "cat"] * 4)) + "7,1,2,3,4\n"
    assert refusal(content, tmp_path) == "row 13, column 1: label '7' is a number among names"


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "nothing.csv", "No such file or directory"),
        (tmp_path, "is a folder; give it to --dataset"),
        (Path("/dev/null"), "is no regular file"),
    ):
        with pytest.raises(UserError) as error:
            read_image_set(path)
        assert str(error.value) == f"{path}: {reason}"


def test_label_column_that_is_not_there(tmp_path: Path) -> None:
    assert refusal(TITLED, tmp_path, label_column="digit") == "has no column digit (--label_column); it has label"
    assert refusal(PLAIN, tmp_path, label_column="digit") == (
        "has no header, so --label_column must be first or last, not digit"
    )


def test_mapping_that_does_not_fit(tmp_path: Path) -> None:
    path, mapping = tmp_path / "digits.csv", tmp_path / "mapping.txt"
    path.write_text(PLAIN)
    for content, reason in (
        (None, "No such file or directory"),
        ("1 65\n2\n", "row 2 is no label and code point: '2'"),
        ("label A\n", "row 1 is no label and code point: 'label A'"),
        ("1 65\n2 66\n", f"has no label 3, which {path} holds"),
        ("".join(f"{label} 65\n" for label in range(10)), f"gives two labels of {path} the same name"),
        ("1 99999999\n", "is no mapping of labels to code points"),
    ):
        if content is not None:
            mapping.write_text(content)
        with pytest.raises(UserError) as error:
            read_image_set(path, label_names=str(mapping))
        assert str(error.value) == f"--label_names {mapping}: {reason}"


def test_class_of_a_single_sample_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "single.csv"
    path.write_text(plain("0,1,2,3,4"))
    found = read_image_set(path)
    assert found.class_names[0] == "0"
    assert (found.labels == 0).sum() == 1
