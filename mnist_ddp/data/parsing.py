"""A CSV file -> pixels and labels, block by block in constant memory: bytes by NumPy, other numbers by pandas."""

import csv
import dataclasses
import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnist_ddp.data.faults import find_faults
from mnist_ddp.data.layout import (
    MIN_SAMPLE_ROWS,
    MISSING,
    NUMBER,
    SAMPLE_ROWS,
    Layout,
    decide_layout,
    one_hot_names,
    unquote,
)
from mnist_ddp.data.stream import read_blocks
from mnist_ddp.errors import UserError

_MAX_LISTED = 5  # faults that a message describes
_MAX_COUNTED = 1000  # faults after which the rest of a file is not read
_MAX_THREADS = 4  # each holds one block, as text and as tokens


class Contents(NamedTuple):
    """What a reader found, beside the pixels that it wrote.

    Attributes:
        height, width: of each image, in pixels.
        labels: (N,) int64 indices into `class_names`; None where the images have no labels.
        class_names: in label order.
        notes: what to tell the user, a line each.
    """

    height: int
    width: int
    labels: NDArray[np.int64] | None
    class_names: tuple[str, ...]
    notes: tuple[str, ...]


class _Lines(NamedTuple):
    """A block of a file's text: no header, no empty lines at its end."""

    text: bytes
    first_row: int  # counted from 1, with the header
    num_rows: int
    num_empty: int  # lines before the first row, which do not belong there
    share: float  # of the file that has been read with it


class _Block(NamedTuple):
    """Rows found to be right."""

    pixels: NDArray[np.uint8]  # (n, side * side), 0..255
    labels: NDArray[Any]  # (n,) int64, or object where they are names


class _OtherScale(Exception):
    """All pixels so far were written as 0 or 1, and the next ones show that the assumed scale is wrong."""


class _Faults:
    """The faults of a file: the first few in words, the others counted."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listed: list[str] = []
        self.count = 0

    def add(self, fault: str) -> None:
        self.count += 1
        if self.count <= _MAX_LISTED:
            self.listed.append(fault)
        if self.count > _MAX_COUNTED:
            self.raise_any()

    def raise_any(self) -> None:
        """Raises UserError if there are faults."""
        more = self.count - len(self.listed)
        at_least = "at least " if self.count > _MAX_COUNTED else ""
        if self.count:
            raise UserError(f"{self.path}: {'; '.join(self.listed)}{f'; and {at_least}{more} more' if more else ''}")


def parse_csv(path: str, pixels: IO[bytes], *, label_column: str, transposed: bool, progress: bool) -> Contents:
    """Reads a table, and writes its images to `pixels`: N x height x width bytes, 0..255.

    Args:
        path: the file.
        pixels: an empty, seekable binary file.
        label_column: see `decide_layout`.
        transposed: whether images are stored column by column, as in EMNIST.
        progress: whether to show a bar.

    Raises:
        UserError: the file cannot be read, has no known layout, or has faults.
    """
    layout = decide_layout(_first_lines(path), path, label_column)
    try:
        return _convert(path, layout, pixels, transposed, progress)
    except _OtherScale:
        pixels.seek(0)
        pixels.truncate()
        layout = dataclasses.replace(layout, unit_pixels=not layout.unit_pixels)
        return _convert(path, layout, pixels, transposed, progress)


def _first_lines(path: str) -> bytes:
    """`SAMPLE_ROWS` lines, or fewer where rows are very long: what `decide_layout` looks at."""
    first = b""
    for lines, _ in read_blocks(path):
        first += lines
        if first.count(b"\n") > MIN_SAMPLE_ROWS:
            break
    return unquote(b"\n".join(first.split(b"\n", SAMPLE_ROWS)[:SAMPLE_ROWS]))


def _convert(path: str, layout: Layout, pixels: IO[bytes], transposed: bool, progress: bool) -> Contents:
    from tqdm import tqdm

    faults = _Faults(path)
    labels: list[NDArray[Any]] = []
    corners: set[int] = set()  # values of the first pixel
    dtype = "uint8"  # float64 from the first block on that does not fit
    only_bits = True  # whether all pixels so far were written as 0 or 1
    text = b""

    def parse(lines: _Lines) -> _Table | None:
        return _parse_numbers(lines.text, lines.num_rows, layout, dtype)

    with tqdm(desc=os.path.basename(path), unit=" rows", unit_scale=True, disable=not progress) as bar:
        for (text, first_row, num_rows, num_empty, share), table in _parse_ahead(
            _number_rows(path, bool(layout.header)), parse
        ):
            for number in range(first_row - num_empty, first_row):
                faults.add(f"row {number} is empty")
            block = None
            if table is not None:
                dtype = table.pixels.dtype.name
                block = _check_values(table, layout)
                if only_bits and _is_of_other_scale(table.pixels, layout.unit_pixels):
                    raise _OtherScale
                only_bits = only_bits and table.pixels.max() <= 1 and bool(np.isin(table.pixels, (0, 1)).all())
            if block is None:
                _add_faults(faults, text, layout, first_row, num_rows)
            elif not faults.count:
                images = block.pixels.reshape(-1, layout.side, layout.side)
                pixels.write(np.ascontiguousarray(images.transpose(0, 2, 1) if transposed else images).data)
                labels.append(block.labels)
                corners.update(np.unique(images[:, 0, 0]).tolist())
            bar.update(num_rows)
            bar.total = round(bar.n / share)  # all rows, if the others are as long
    faults.raise_any()
    if not labels:
        raise UserError(f"{path}: has a header but no rows")
    if layout.assumed_last and len(corners) > 1:
        raise UserError(f"{path}: the label may be the first or the last column; say --label_column first or last")

    notes = []
    if layout.unit_pixels:
        notes.append(f"{path}: pixels of 0 to 1 were scaled to 0 to 255")
    if layout.assumed_last:
        notes.append(f"{path}: the last column was taken as the label, since the first holds a single value")
    if "emnist" in os.path.basename(path).lower() and not transposed:
        notes.append(f"{path}: EMNIST images are usually stored transposed; --transposed true puts them upright")
    if _may_be_cut(text, layout):
        notes.append(f"{path}: no newline after the last number; if the file was cut, digits of it may be missing")
    return _contents(layout, np.concatenate(labels), tuple(notes), path)


def _parse_ahead(
    blocks: Iterator[_Lines], parse: Callable[[_Lines], "_Table | None"]
) -> Iterator[tuple[_Lines, "_Table | None"]]:
    """Yields each block with what `parse` makes of it, in order, while threads parse the next ones.

    NumPy and pandas let go of the interpreter's lock for most of the time.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(cores, _MAX_THREADS)
    ahead: deque[tuple[_Lines, Future[_Table | None]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for lines in blocks:
            ahead.append((lines, pool.submit(parse, lines)))
            if len(ahead) > threads:
                lines, table = ahead.popleft()
                yield lines, table.result()
        for lines, table in ahead:
            yield lines, table.result()


def _number_rows(path: str, header: bool) -> Iterator[_Lines]:
    """The text with the numbers of its rows."""
    row = 1
    num_empty = 0  # lines just before `row`
    for lines, share in read_blocks(path):
        lines = unquote(lines)
        if header and row == 1:
            lines = lines.partition(b"\n")[2]
            row = 2
        kept = lines.rstrip(b"\r\n")
        num_kept = kept.count(b"\n") + 1 if kept else 0
        ending = lines[len(kept) :]
        num_lines = num_kept + max(0, ending.count(b"\n") - bool(kept))
        if kept:
            yield _Lines(kept + b"\n" if b"\n" in ending else kept, row, num_kept, num_empty, share)
            num_empty = 0
        num_empty += num_lines - num_kept
        row += num_lines


class _Table(NamedTuple):
    """Rows as they stand in the file."""

    pixels: NDArray[Any]  # (n, side * side) uint8 or float64
    labels: NDArray[Any]  # (n, k) of the same type, or object: a label, one-hot labels, or none


def _parse_numbers(lines: bytes, num_rows: int, layout: Layout, dtype: str) -> _Table | None:
    """Rows in `dtype` or, where it does not fit, float64; None where they are no table of numbers."""
    if b"\r" in lines:
        lines = lines.replace(b"\r\n", b"\n")
        # A carriage return in one row, a newline to pandas, could make up for an empty line, which it skips.
        if b"\r" in lines:
            return None
    texts = {*layout.ignored, *(layout.label if layout.text_labels else ())}
    if dtype == "uint8" and not texts and (table := _parse_bytes(lines, num_rows, layout)):
        return table
    import pandas as pd

    for number in dict.fromkeys((dtype, "float64")):
        by_column: Any = {column: "object" if column in texts else number for column in range(layout.num_columns)}
        try:
            with np.errstate(invalid="ignore"):  # of casts that pandas then refuses
                frame = pd.read_csv(
                    io.BytesIO(lines),
                    sep=layout.separator,
                    header=None,
                    dtype=by_column if texts else number,
                    engine="c",
                    quoting=csv.QUOTE_NONE,  # quotes around whole fields are gone
                    na_filter=False,  # blanks are refused instead of filled
                    low_memory=False,
                )
        except (ValueError, OverflowError):  # pandas' own errors are ValueErrors
            continue
        # pandas skips empty lines and takes a carriage return for a newline: the number of rows tells.
        if frame.shape == (num_rows, layout.num_columns) and b"\0" not in lines:
            pixels = frame.iloc[:, _slice(layout.pixels)].to_numpy()
            return _Table(pixels, frame.iloc[:, list(layout.label)].to_numpy())
    return None


def _parse_bytes(lines: bytes, num_rows: int, layout: Layout) -> _Table | None:
    """Rows of whole numbers from 0 to 255, each of one to three digits; None where they are anything else.

    Looks at all bytes at once, in a fifth of the time that pandas takes: with hundreds of columns, that one spends as
    much on each column of a block as on its numbers.
    """
    ending = b"" if lines.endswith(b"\n") else b"\n"
    # Three newlines first, so that each byte of `lines` has three before it.
    text = np.frombuffer(b"".join((b"\n\n\n", lines, ending)), np.uint8)
    digits = text - ord("0")  # above 9 where the byte is no digit
    is_digit = digits < 10
    here, last, second, third = (is_digit[3 - back : len(text) - back] for back in range(4))
    ends = np.flatnonzero(~here)  # the byte after each number
    newlines = np.flatnonzero(text[3:] == ord("\n"))
    if (
        len(ends) != num_rows * layout.num_columns
        or len(ends) != len(newlines) + np.count_nonzero(text == ord(layout.separator))
        or not np.array_equal(newlines, ends[layout.num_columns - 1 :: layout.num_columns])
        or not (here | last).all()  # a blank
        or (here & last & second & third).any()
    ):
        return None
    # For each byte, the number that the digits before it make: one above 255 wraps to less than its last two digits.
    digits *= is_digit
    below_100 = digits[1:-2] * 10 + digits[2:-1]
    hundreds = digits[:-3] * (last & second)
    numbers = hundreds * 100 + below_100
    if hundreds.max() > 2 or (numbers < below_100).any():
        return None
    table = numbers[ends].reshape(num_rows, layout.num_columns)
    return _Table(table[:, _slice(layout.pixels)], table[:, list(layout.label)])


def _slice(columns: tuple[int, ...]) -> Any:
    """Neighbouring columns as a slice, which costs no copy."""
    whole = range(columns[0], columns[-1] + 1)
    return slice(whole.start, whole.stop) if len(whole) == len(columns) else list(columns)


def _check_values(table: _Table, layout: Layout) -> _Block | None:
    """The rows with pixels as bytes, or None where a value is out of its range."""
    pixels = _to_bytes(table.pixels, layout.unit_pixels)
    labels = _to_labels(table.labels, layout)
    return None if pixels is None or labels is None else _Block(pixels, labels)


def _to_bytes(pixels: NDArray[Any], unit_pixels: bool) -> NDArray[np.uint8] | None:
    """Pixels as 0..255, from values 0..1 or from whole values 0..255; None where one is neither."""
    if unit_pixels:
        in_range = ((pixels >= 0) & (pixels <= 1)).all()
        return np.rint(pixels * 255.0).astype(np.uint8) if in_range else None
    if pixels.dtype == np.uint8:
        return pixels
    in_range = ((pixels >= 0) & (pixels <= 255) & (pixels == np.floor(pixels))).all()
    return pixels.astype(np.uint8) if in_range else None


def _is_of_other_scale(pixels: NDArray[Any], unit_pixels: bool) -> bool:
    return _to_bytes(pixels, unit_pixels) is None and _to_bytes(pixels, not unit_pixels) is not None


def _to_labels(labels: NDArray[Any], layout: Layout) -> NDArray[Any] | None:
    """(n,) whole numbers or names, from n x k columns of labels; None where one is neither."""
    if len(layout.label) > 1:
        ordered = np.sort(labels)  # 0, 0, ..., 1
        right = (ordered[:, -1] == 1).all() and (ordered[:, :-1] == 0).all()
        return labels.argmax(1) if right else None
    if not layout.label:
        return np.zeros(len(labels), np.int64)
    if layout.text_labels:
        names = np.array([text.strip() for text in labels[:, 0]], dtype=object)
        return names if not any(NUMBER.fullmatch(name) or MISSING.fullmatch(name) for name in names) else None
    right = ((labels == np.floor(labels)) & (np.abs(labels) < 2.0**53)).all()
    return labels[:, 0].astype(np.int64) if right else None


def _add_faults(faults: _Faults, lines: bytes, layout: Layout, first_row: int, num_rows: int) -> None:
    before = faults.count
    for fault in find_faults(lines, layout, first_row):
        faults.add(fault)
    if faults.count == before:  # a number that pandas alone cannot read, such as one of a thousand digits
        faults.add(f"one of the rows {first_row} to {first_row + num_rows - 1} cannot be read")


def _may_be_cut(lines: bytes, layout: Layout) -> bool:
    """Whether the last line has no newline, and its last number could have gone on."""
    if lines.endswith(b"\n"):
        return False
    if layout.num_columns - 1 not in layout.pixels:
        return layout.label == (layout.num_columns - 1,)
    last = lines[lines.rfind(layout.separator.encode()) + 1 :].strip()
    return layout.unit_pixels or (last != b"0" and b"." not in last and float(last) <= 25)


def _contents(layout: Layout, labels: NDArray[Any], notes: tuple[str, ...], path: str) -> Contents:
    if not layout.label:
        return Contents(layout.side, layout.side, None, (), notes)
    if len(layout.label) > 1:
        return Contents(layout.side, layout.side, labels, one_hot_names(layout), notes)
    classes, indices = np.unique(labels, return_inverse=True)
    if len(classes) == len(labels) > 100:
        raise UserError(f"{path}: every row has a label of its own; is {layout.name(layout.label[0])} an id?")
    return Contents(layout.side, layout.side, indices, tuple(map(str, classes)), notes)
