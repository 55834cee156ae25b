"""Small tables of images in the layouts that people have, written field by field without the code under test."""

from collections.abc import Callable, Sequence

import numpy as np

LABELS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
PIXELS = np.random.default_rng(1206).integers(0, 256, (len(LABELS), 4))  # 2x2 pixels a row
PIXELS[0] = [0, 255, 7, 254]

NAMES = ["pixel0", "pixel1", "pixel2", "pixel3"]


def rows(
    labels: Sequence[object] = LABELS,
    pixels: np.ndarray = PIXELS,
    *,
    show: Callable[[int], str] = str,
    label_last: bool = False,
) -> list[list[str]]:
    """Fields of each row: the label and the pixels, each pixel as `show` writes it."""
    table = []
    for label, image in zip(labels, pixels.tolist(), strict=True):
        fields = [show(pixel) for pixel in image]
        table.append([*fields, str(label)] if label_last else [str(label), *fields])
    return table


def text(table: Sequence[Sequence[str]], *, separator: str = ",", newline: str = "\n", end: str | None = None) -> str:
    """The table as a file holds it; `end` stands in for the last newline."""
    lines = [separator.join(fields) for fields in table]
    return newline.join(lines) + (newline if end is None else end)
