"""A CSV file -> pixels and labels, read by pandas block by block in constant memory."""

import csv
import io
import os.path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnist_ddp.data.faults import find_faults
from mnist_ddp.data.layout import SAMPLE_ROWS, Layout, decide_layout, one_hot_names, unquote
from mnist_ddp.data.stream import read_blocks
from mnist_ddp.errors import UserError

MAX_LISTED = 5  # faults in a message
MAX_COUNTED = 1000  # faults after which a file is given up


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
    """All pixels so far were 0 or 1, and now it is plain that the scale is not the assumed one."""


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
    reader = _Reader(path, label_column, transposed)
    try:
        return reader.read(pixels, progress)
    except _OtherScale:
        pixels.seek(0)
        pixels.truncate()
        return _Reader(path, label_column, transposed, unit_pixels=not reader.unit_pixels).read(pixels, progress)


class _Reader:
    """One pass over a file."""

    def __init__(self, path: str, label_column: str, transposed: bool, unit_pixels: bool | None = None) -> None:
        self.path = path
        self.label_column = label_column
        self.transposed = transposed
        self.blocks = read_blocks(path)
        first, self.share = next(self.blocks, (b"", 1.0))
        first = unquote(first)
        head = b"".join(line + b"\n" for line in first.split(b"\n", SAMPLE_ROWS)[:SAMPLE_ROWS])
        self.layout = decide_layout(head, path, label_column)
        self.unit_pixels = self.layout.unit_pixels if unit_pixels is None else unit_pixels
        self.row = 1  # the next line's number
        if self.layout.header:
            first = first.partition(b"\n")[2]
            self.row = 2
        self.lines = first
        self.dtype = "uint8"  # float64 from the first block on that does not fit
        self.only_bits = True  # whether all pixels so far were written as 0 or 1
        self.corners: set[int] = set()  # values of the first pixel
        self.faults: list[str] = []
        self.num_faults = 0
        self.labels: list[NDArray[Any]] = []

    def read(self, pixels: IO[bytes], progress: bool) -> Contents:
        from tqdm import tqdm

        first_row = self.row
        empty_lines = 0
        last_line = b""
        with tqdm(desc=os.path.basename(self.path), unit=" rows", unit_scale=True, disable=not progress) as bar:
            while self.lines:
                rows = self.lines.rstrip(b"\r\n")
                if rows:
                    if empty_lines:
                        self.add_fault(f"row {self.row - empty_lines} is empty")
                    ended = len(rows) < len(self.lines)
                    num_rows = rows.count(b"\n") + 1
                    images = self.parse(rows + b"\n" if ended else rows, num_rows)
                    if images is not None and not self.faults:
                        pixels.write(images.data)
                    self.row += num_rows
                    bar.update(num_rows)
                    bar.total = round((self.row - first_row) / self.share)
                    last_line = b"" if ended else rows[rows.rfind(b"\n") + 1 :]
                empty_lines = self.lines.count(b"\n") - rows.count(b"\n") - 1
                self.row += empty_lines
                lines, self.share = next(self.blocks, (b"", 1.0))
                self.lines = unquote(lines)
        self.raise_faults()
        return self.contents(self.notes(last_line))
