"""Where a table keeps its labels and pixels. The one place that decides it, from the first rows."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mnist_ddp.errors import UserError
from mnist_ddp.words import counted

SAMPLE_ROWS = 200  # rows that decide the layout
MIN_SAMPLE_ROWS = 10  # without these, nothing is concluded from what a column holds

NUMBER = re.compile(r"[ \t]*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?[ \t]*", re.ASCII)
LABEL_NAME = re.compile(r"label|class|target|y", re.IGNORECASE)
_ID_NAME = re.compile(r"|id|image_?id|index|unnamed: \d+(\.\d+)*", re.IGNORECASE)
_MOST_SIDES = 64  # of images that are tried for one-hot labels; 28x28 with 10 classes needs one
_PIXEL_NAME = re.compile(r"(\D*)(\d+)(?:x(\d+))?")
MISSING = re.compile(r"|nan|na|n/a|null|none", re.IGNORECASE)


@dataclass(frozen=True)
class Layout:
    """The columns of a table, counted from 0.

    Attributes:
        separator: between the fields of a row.
        header: the names of the columns; empty where the first row is data.
        num_columns: fields in each row.
        label: the column of the labels, or the columns of one-hot labels; empty where there are none.
        text_labels: whether labels are names instead of whole numbers.
        ignored: columns that are neither: ids.
        pixels: the columns of the pixels, row by row of the image.
        side: height and width of the images in pixels.
        unit_pixels: whether pixels are written as 0..1 instead of 0..255, judged by the first rows.
        assumed_last: whether `label` is the last column for no better reason than that the first looks like a pixel.
    """

    separator: str
    header: tuple[str, ...]
    num_columns: int
    label: tuple[int, ...]
    text_labels: bool
    ignored: tuple[int, ...]
    pixels: tuple[int, ...]
    side: int
    unit_pixels: bool
    assumed_last: bool = False

    def name(self, column: int) -> str:
        """How a message names a column: 1-based, with its name in the header."""
        return f"column {column + 1} ({self.header[column]})" if self.header else f"column {column + 1}"


def unquote(lines: bytes) -> bytes:
    """Lines without the quotes around whole fields. A quote that stands elsewhere stays, and is a fault."""
    return re.sub(rb'(?<![^,;\t\n])"([^"\r\n]*)"(?=[,;\t\r\n]|\Z)', rb"\1", lines) if b'"' in lines else lines


def split_rows(lines: bytes, separator: str) -> list[list[str]]:
    """Fields of each line; what is not UTF-8 becomes escapes."""
    text = lines.decode("utf-8", errors="backslashreplace")
    rows = text.removesuffix("\n").split("\n")
    return [row.removesuffix("\r").split(separator) for row in rows]


def decide_layout(first_lines: bytes, path: str, label_column: str = "") -> Layout:
    """The layout of a table from its first rows.

    Args:
        first_lines: whole lines, unquoted; `SAMPLE_ROWS` of them are enough.
        path: the file, for messages.
        label_column: a name in the header; or first or last. Empty: found by name, or by what the columns hold.

    Raises:
        UserError: no layout fits; the message says what is missing, or names the flag that decides.
    """
    separator = _separator(first_lines)
    rows = split_rows(first_lines, separator)
    while rows and rows[-1] == [""]:
        rows.pop()
    if not rows:
        raise UserError(f"{path}: is empty")
    header = _header(rows[0])
    if header:
        rows = rows[1:]
        _check_header(header, rows, path)
    num_columns = len(header) or Counter(map(len, rows)).most_common(1)[0][0]
    sample = [row for row in rows if len(row) == num_columns]
    ids = [column for column, name in enumerate(header) if _ID_NAME.fullmatch(name)]
    ignored = tuple(column for column in ids if not label_column or header[column].lower() != label_column.lower())
    rest = [column for column in range(num_columns) if column not in ignored]

    if not rest:
        raise UserError(f"{path}: {_wrong_count(header, num_columns, (), ignored, 0)}")
    label, assumed_last = _find_label(header, rest, sample, path, label_column)
    pixels = [column for column in rest if column not in label]
    side = math.isqrt(len(pixels))
    if side * side != len(pixels) or side < 2:
        raise UserError(f"{path}: {_wrong_count(header, num_columns, label, ignored, len(pixels))}")
    _check_order([header[column] for column in pixels] if header else [], path)

    values = {row[column] for row in sample for column in pixels}
    numbers = [value for value in values if NUMBER.fullmatch(value)]
    labels = [row[label[0]] for row in sample] if len(label) == 1 else []
    texts = sum(not NUMBER.fullmatch(field) and not MISSING.fullmatch(field.strip()) for field in labels)
    return Layout(
        separator=separator,
        header=header,
        num_columns=num_columns,
        label=label,
        text_labels=texts * 2 > len(labels),
        ignored=ignored,
        pixels=tuple(pixels),
        side=side,
        unit_pixels=any(re.search("[.eE]", number) for number in numbers) and max(map(float, numbers)) <= 1,
        assumed_last=assumed_last,
    )


def one_hot_names(layout: Layout) -> tuple[str, ...]:
    """Class names of one-hot labels: 3 of a column such as label_3, the whole name of one without a number."""
    names = [layout.header[column] for column in layout.label] if layout.header else []
    numbered = [_PIXEL_NAME.fullmatch(name) for name in names]
    before = _PIXEL_NAME.fullmatch(layout.header[layout.pixels[-1]]) if names else None
    if not names or (before and all(match and match[1] == before[1] for match in numbered)):
        return tuple(map(str, range(len(layout.label))))  # no names of their own: the pixels' go on
    numbers = [match[2] for match in numbered if match and not match[3]]
    return tuple(numbers if len(set(numbers)) == len(names) else names)


def is_one_hot(fields: list[str]) -> bool:
    """Whether one field is 1 and all others are 0."""
    values = [float(field) if NUMBER.fullmatch(field) else -1.0 for field in fields]
    return sorted(values) == [0.0] * (len(values) - 1) + [1.0]


def _separator(lines: bytes) -> str:
    """The one that the first line holds most of."""
    first = lines.lstrip(b"\r\n").partition(b"\n")[0].decode("utf-8", errors="replace")
    return max(",;\t", key=first.count)


def _header(first: Sequence[str]) -> tuple[str, ...]:
    """The names in the first row, or none where it is data."""
    names = tuple(name.strip(' "') for name in first)
    texts = [name for name in names if not NUMBER.fullmatch(name) and not MISSING.fullmatch(name)]
    if len(texts) * 2 >= len(names):
        return names
    # Columns named 0, 1, 2...: a table saved without names. Sixteen in a row are no image.
    numbers = [float(name) for name in names if NUMBER.fullmatch(name)]  # 0, 00 and 0.0 are all seen
    in_order = numbers in ([*range(len(numbers))], [*range(1, len(numbers) + 1)])
    if in_order and (len(numbers) >= 16 or any(LABEL_NAME.fullmatch(name) for name in texts)):
        return names
    return ()


def _check_header(header: tuple[str, ...], rows: list[list[str]], path: str) -> None:
    for name, count in Counter(header).items():
        if count > 1 and name:
            places = [column + 1 for column, other in enumerate(header) if other == name]
            raise UserError(f"{path}: row 1: columns {places[0]} and {places[1]} are both named {name}; rename one")
    if not rows:
        raise UserError(f"{path}: has a header but no rows")
    widths = {len(row) for row in rows}
    if header[0].startswith("#") and len(header) not in widths:
        raise UserError(f"{path}: row 1 is a comment; remove it")
    if len(widths) == 1 and widths != {len(header)} and len(rows) > 1:
        raise UserError(f"{path}: every row has {counted(widths.pop(), 'field')}, but the header has {len(header)}")


def _find_label(
    header: tuple[str, ...], rest: list[int], sample: list[list[str]], path: str, label_column: str
) -> tuple[tuple[int, ...], bool]:
    """The label's columns among `rest`, none where there are no labels; and whether that is no more than assumed."""
    if label_column:
        return (_asked_label(header, rest, path, label_column),), False
    named = [column for column in rest if header and LABEL_NAME.fullmatch(header[column])]
    if len(named) > 1:
        names = " and ".join(header[column] for column in named)
        raise UserError(f"{path}: columns {names} could both be the label; name one with --label_column")
    if named:
        return (named[0],), False
    largest = math.isqrt(len(rest))
    if largest * largest == len(rest):
        # No labels; or a pixel too few, where a column at the edge is told from pixels by its texts.
        texts = [
            column
            for column in (rest[0], rest[-1])
            if sample and not any(NUMBER.fullmatch(row[column]) for row in sample)
        ]
        return (texts[0],) if len(texts) == 1 else (), False
    if largest * largest == len(rest) - 1:
        return _outer_label(header, rest, sample)
    for side in range(largest, max(1, largest - _MOST_SIDES), -1):
        beyond = rest[side * side :]
        if sample and all(is_one_hot([row[column] for column in beyond]) for row in sample):
            return tuple(beyond), False
    return (), False


def _asked_label(header: tuple[str, ...], rest: list[int], path: str, label_column: str) -> int:
    for names in (header, [name.lower() for name in header]):
        wanted = label_column if names is header else label_column.lower()
        if wanted in names:
            return names.index(wanted)
    if label_column in ("first", "last"):
        return rest[0 if label_column == "first" else -1]
    if not header:
        raise UserError(f"{path}: has no header, so --label_column must be first or last, not {label_column}")
    names = [name for name in header if not _PIXEL_NAME.fullmatch(name)] or [*header[:2], "...", header[-1]]
    raise UserError(f"{path}: has no column {label_column} (--label_column); it has {', '.join(names[:8])}")


def _outer_label(header: tuple[str, ...], rest: list[int], sample: list[list[str]]) -> tuple[tuple[int, ...], bool]:
    """A label without a known name: the column whose name is unlike the pixels', else the first, or the last.

    First is usual. Last is assumed only where the first column is all background, as a corner of the image is, and the
    last is not.
    """
    odd = [column for column in rest if header and not _PIXEL_NAME.fullmatch(header[column])]
    if len(odd) == 1:
        return (odd[0],), False
    first, last = ({row[column].strip() for row in sample} for column in (rest[0], rest[-1]))
    inner = {row[column] for row in sample for column in rest[1:-1]}
    if any(value % 1 for value in _numbers(inner)) and max(_numbers(first)) <= 1 < max(_numbers(last)):
        return (rest[-1],), False  # pixels of 0 to 1: the column that holds more is the label
    if len(sample) >= MIN_SAMPLE_ROWS and len(first) == 1 < len(last) and first <= {"0", "0.0", "255", "255.0"}:
        return (rest[-1],), True
    return (rest[0],), False


def _numbers(fields: set[str]) -> list[float]:
    return [float(field) for field in fields if NUMBER.fullmatch(field)] or [0.0]


def _wrong_count(
    header: tuple[str, ...], num_columns: int, label: tuple[int, ...], ignored: tuple[int, ...], num_pixels: int
) -> str:
    if not header:
        return (
            f"rows have {counted(num_columns, 'field')}; expected a label and a square number of pixels, such as 785 "
            "fields for 28x28 images"
        )
    left_out = [header[column] or f"column {column + 1}" for column in (*label, *ignored)]
    besides = f", {num_pixels} besides {', '.join(left_out)}" if left_out else ""
    others = [
        name
        for column, name in enumerate(header)
        if column not in (*label, *ignored) and not _PIXEL_NAME.fullmatch(name)
    ]
    # Among names without numbers, none stands out.
    odd = (
        f"; remove what is no pixel, or name the label by --label_column: {', '.join(others)}"
        if 0 < len(others) <= min(8, num_pixels // 2)
        else ""
    )
    return f"the header has {counted(num_columns, 'column')}{besides}; pixels must be a square number, such as 784{odd}"


def _check_order(names: list[str], path: str) -> None:
    """Pixel columns with numbered names must stand in the order of their numbers."""
    found = [_PIXEL_NAME.fullmatch(name) for name in names]
    places = [(match[1], int(match[2]), int(match[3] or 0)) for match in found if match]
    if len(places) < len(names) or len({place[0] for place in places}) > 1:
        return
    for name, before, place in zip(names[1:], places, places[1:], strict=False):
        if place < before:
            raise UserError(f"{path}: row 1: column {name} is out of order; sort the pixel columns by number")
