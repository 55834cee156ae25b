"""A CSV file -> pixels and labels, read by pandas block by block in constant memory."""

import csv
import io
import os.path
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnist_ddp.data.faults import find_faults
from mnist_ddp.data.layout import NUMBER, SAMPLE_ROWS, Layout, decide_layout, one_hot_names, unquote
from mnist_ddp.data.stream import read_blocks
from mnist_ddp.errors import UserError

_MAX_LISTED = 5  # faults that a message describes
_MAX_COUNTED = 1000  # faults after which the rest of a file is not read


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
        if not self.count:
            return
        more = self.count - len(self.listed)
        if more:
            at_least = "at least " if self.count > _MAX_COUNTED else ""
            self.listed.append(f"and {at_least}{more} more")
        raise UserError(f"{self.path}: {'; '.join(self.listed)}")


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
    blocks = read_blocks(path)
    first, share = next(blocks, (b"", 1.0))
    first = unquote(first)
    head = b"\n".join(first.split(b"\n", SAMPLE_ROWS)[:SAMPLE_ROWS])
    layout = decide_layout(head, path, label_column)
    try:
        return _parse(path, layout, pixels, transposed, progress, layout.unit_pixels)
    except _OtherScale:
        pixels.seek(0)
        pixels.truncate()
        return _parse(path, layout, pixels, transposed, progress, not layout.unit_pixels)


def _parse(
    path: str, layout: Layout, pixels: IO[bytes], transposed: bool, progress: bool, unit_pixels: bool
) -> Contents:
    from tqdm import tqdm

    faults = _Faults(path)
    labels: list[NDArray[Any]] = []
    dtype = "uint8"  # float64 from the first block on that does not fit
    only_bits = True  # whether all pixels so far were written as 0 or 1
    corners: set[int] = set()  # values of the first pixel
    num_rows = 0
    lines = b""
    with tqdm(desc=os.path.basename(path), unit=" rows", unit_scale=True, disable=not progress) as bar:
        for lines, first_row, share in _numbered(path, bool(layout.header), faults):
            table = _parse_numbers(lines, layout, dtype)
            block = table and _check_values(table, layout, unit_pixels, only_bits)
            if table and table.pixels.dtype == np.float64:
                dtype = "float64"
            if block is None:
                before = faults.count
                for fault in find_faults(lines, layout, unit_pixels, first_row):
                    faults.add(fault)
                if faults.count == before:
                    last_row = first_row + lines.rstrip(b"\n").count(b"\n")
                    faults.add(f"rows {first_row} to {last_row} hold something that is no table of numbers")
            elif not faults.count:
                images = block.pixels.reshape(-1, layout.side, layout.side)
                pixels.write(np.ascontiguousarray(images.transpose(0, 2, 1) if transposed else images).data)
                labels.append(block.labels)
                only_bits = only_bits and block.only_bits
                corners.update(np.unique(images[:, 0, 0]).tolist())
            num_rows = first_row + lines.rstrip(b"\n").count(b"\n")
            bar.total = round(num_rows / share)
            bar.update(num_rows - bar.n)
    faults.raise_any()
    if not labels:
        raise UserError(f"{path}: has a header but no rows")
    if layout.assumed == "last" and len(corners) > 1:
        raise UserError(f"{path}: the label may be the first or the last column; say --label_column first or last")
    notes = []
    if unit_pixels:
        notes.append(f"{path}: pixels of 0 to 1 were scaled to 0 to 255")
    if layout.assumed == "last":
        notes.append(f"{path}: the last column was taken as the label, since the first holds one value only")
    if "emnist" in os.path.basename(path).lower() and not transposed:
        notes.append(f"{path}: EMNIST images are stored transposed; --transposed true puts them upright")
    if _may_be_cut(lines, layout, unit_pixels):
        notes.append(f"{path}: no newline after the last number; if the file was cut, digits of it may be missing")
    return _contents(layout, np.concatenate(labels), tuple(notes), path)


def _numbered(path: str, header: bool, faults: _Faults) -> Iterator[tuple[bytes, int, float]]:
    """Yields (lines, number of the first, share of the file read) without header and without empty lines at the end."""
    row = 1
    empty = 0  # lines just before
    for lines, share in read_blocks(path):
        lines = unquote(lines)
        if row == 1 and header:
            lines = lines.partition(b"\n")[2]
            row = 2
        kept = lines.rstrip(b"\r\n")
        if kept:
            if empty:
                faults.add(f"row {row - 1} is empty")
            end = lines[len(kept) :]
            yield (kept + b"\n" if b"\n" in end else kept), row, share
            row += kept.count(b"\n")
            empty = end.count(b"\n") - 1
        row += lines[len(kept) :].count(b"\n")


class _Table(NamedTuple):
    """A block of rows as pandas reads it."""

    pixels: NDArray[Any]  # (n, side * side) uint8 or float64
    labels: NDArray[Any]  # (n,) or, one-hot, (n, classes), of the same dtype; (n,) object where they are names


class _Block(NamedTuple):
    """A block of rows found to be right."""

    pixels: NDArray[np.uint8]  # (n, side * side), 0..255
    labels: NDArray[Any]  # (n,) int64 or object
    only_bits: bool  # whether all pixels were written as 0 or 1


def _parse_numbers(lines: bytes, layout: Layout, dtype: str) -> _Table | None:
    """The block in `dtype` or, where it does not fit, float64; None where it is no table of numbers."""
    import pandas as pd

    num_rows = lines.rstrip(b"\n").count(b"\n") + 1
    texts = [*layout.ignored, *(layout.label if layout.text_labels else ())]
    for number in dict.fromkeys((dtype, "float64")):
        dtypes: Any = {column: "object" if column in texts else number for column in range(layout.num_columns)}
        try:
            with np.errstate(invalid="ignore"):  # casts that do not fit are refused by pandas itself
                frame = pd.read_csv(
                    io.BytesIO(lines),
                    sep=layout.separator,
                    header=None,
                    dtype=dtypes if texts else number,
                    engine="c",
                    quoting=csv.QUOTE_NONE,  # well-placed quotes were removed before
                    na_filter=False,  # blanks are refused instead of filled
                    low_memory=False,
                )
        except (ValueError, OverflowError):  # pandas' own errors are ValueErrors
            continue
        if frame.shape == (num_rows, layout.num_columns):
            label = frame.iloc[:, layout.label[0]] if len(layout.label) == 1 else frame.iloc[:, list(layout.label)]
            return _Table(frame.iloc[:, _slice(layout.pixels)].to_numpy(), label.to_numpy())
    return None


def _slice(columns: tuple[int, ...]) -> Any:
    """Neighbouring columns as a slice, which costs no copy."""
    whole = range(columns[0], columns[-1] + 1)
    return slice(whole.start, whole.stop) if len(whole) == len(columns) else list(columns)


def _check_values(table: _Table, layout: Layout, unit_pixels: bool, only_bits: bool) -> _Block | None:
    """The block with its pixels as bytes; None where a value is out of its range.

    Raises:
        _OtherScale: `only_bits`, and all pixels fit the other scale.
    """
    pixels = _to_bytes(table.pixels, unit_pixels)
    if pixels is None:
        if only_bits and _to_bytes(table.pixels, not unit_pixels) is not None:
            raise _OtherScale
        return None
    labels = table.labels
    if not layout.label:
        labels = np.zeros(len(pixels))
    elif layout.text_labels:
        if not all(_is_name(text) for text in labels):
            return None
    elif len(layout.label) > 1:
        if not ((labels == 1).sum(1) == 1).all() or not ((labels == 0).sum(1) == len(layout.label) - 1).all():
            return None
        labels = labels.argmax(1)
    elif labels.dtype == np.float64 and not ((labels == np.floor(labels)) & (np.abs(labels) < 2**53)).all():
        return None
    if not layout.text_labels:
        labels = labels.astype(np.int64)
    return _Block(pixels, labels, only_bits and bool((table.pixels <= 1).all() and np.isin(table.pixels, (0, 1)).all()))


def _to_bytes(pixels: NDArray[Any], unit_pixels: bool) -> NDArray[np.uint8] | None:
    """Pixels as 0..255, of values 0..1 or of whole values 0..255; None where one is neither."""
    if unit_pixels:
        if not ((pixels >= 0) & (pixels <= 1)).all():
            return None
        return np.rint(pixels * 255.0).astype(np.uint8)
    if pixels.dtype == np.uint8:
        return pixels
    if not ((pixels >= 0) & (pixels <= 255) & (pixels == np.floor(pixels))).all():
        return None
    return pixels.astype(np.uint8)


def _is_name(text: str) -> bool:
    return bool(text.strip()) and not NUMBER.fullmatch(text)


def _may_be_cut(lines: bytes, layout: Layout, unit_pixels: bool) -> bool:
    """Whether the last line has no newline, and its last number could have gone on."""
    if lines.endswith(b"\n") or len(layout.label) > 1 and layout.num_columns - 1 in layout.label:
        return False
    if unit_pixels or layout.num_columns - 1 in layout.label:
        return True
    last = lines[lines.rfind(layout.separator.encode()) + 1 :].strip()
    return last != b"0" and b"." not in last and float(last) <= 25


def _contents(layout: Layout, labels: NDArray[Any], notes: tuple[str, ...], path: str) -> Contents:
    if not layout.label:
        return Contents(layout.side, layout.side, None, (), notes)
    if len(layout.label) > 1:
        return Contents(layout.side, layout.side, labels, one_hot_names(layout), notes)
    classes, indices = np.unique(labels, return_inverse=True)
    if len(classes) == len(labels) > 100:
        raise UserError(f"{path}: every row has a label of its own; is {layout.name(layout.label[0])} an id?")
    return Contents(layout.side, layout.side, indices, tuple(map(str, classes)), notes)
