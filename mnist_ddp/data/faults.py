"""Where a table is wrong. Slow, field by field: only rows that pandas or a check has refused come here."""

import re
from collections.abc import Iterator

from mnist_ddp.data.layout import MISSING, NUMBER, Layout, is_one_hot, split_rows
from mnist_ddp.words import counted

_ODD = re.compile(r"[\0\r]|\\x[0-9a-f]{2}")  # a NUL, a carriage return, or the escape of a byte that is no UTF-8


def find_faults(lines: bytes, layout: Layout, first_row: int) -> Iterator[str]:
    """Yields a description of each fault in `lines`, in order: row, column and what is wrong with the value.

    Args:
        lines: rows of data, unquoted.
        layout: of the table.
        first_row: the number of the first line, 1-based and counting the header.
    """
    good: set[str] = set()  # pixels already found to be right: images repeat few values
    rows = split_rows(lines, layout.separator)
    for row, fields in enumerate(rows, first_row):
        cut = fields is rows[-1] and not lines.endswith(b"\n")
        fault = _row_fault(fields, layout, cut)
        if fault:
            yield f"row {row} {fault}"
            continue
        if len(layout.label) == 1:
            (column,) = layout.label
            fault = _label_fault(fields[column], layout.text_labels)
            if fault:
                yield f"row {row}, {layout.name(column)}: label {fault}"
        elif layout.label and not is_one_hot([fields[column] for column in layout.label]):
            yield f"row {row}, columns {layout.label[0] + 1} to {layout.label[-1] + 1}: a one-hot label has a single 1"
        for column in layout.pixels:
            if fields[column] not in good:
                fault = _pixel_fault(fields[column], layout.unit_pixels)
                if fault:
                    yield f"row {row}, {layout.name(column)}: {fault}"
                else:
                    good.add(fields[column])


def _row_fault(fields: list[str], layout: Layout, cut: bool) -> str:
    if fields == [""]:
        return "is empty"
    if fields[0].lstrip().startswith("#"):
        return f"is a comment: {_show(layout.separator.join(fields))}"
    texts = sum(not NUMBER.fullmatch(field) and not MISSING.fullmatch(field.strip()) for field in fields)
    if texts > 1 and texts * 2 >= len(fields):
        return "is text, such as a header, in the middle of the data; were files joined?"
    if len(fields) == layout.num_columns:
        # Names and ids may be any text but this. Among numbers, the column is told below.
        odd = [fields[column] for column in (*layout.ignored, *(layout.label if layout.text_labels else ()))]
        return next((f"holds {_show(field)}, which is not plain UTF-8 text" for field in odd if _ODD.search(field)), "")
    if len(fields) < layout.num_columns and cut:
        return f"has {len(fields)} of {layout.num_columns} fields: the file ends in the middle of it"
    return f"has {counted(len(fields), 'field')} instead of {layout.num_columns}"


def _label_fault(field: str, text_labels: bool) -> str:
    text = field.strip(" \t")
    if not text:
        return "is blank"
    if text_labels and MISSING.fullmatch(text):
        return f"{_show(text)} is a missing value"
    if text_labels:
        return f"{_show(text)} is a number among names" if NUMBER.fullmatch(text) else ""
    if not NUMBER.fullmatch(text):
        return f"{_show(text)} is not a number"
    value = float(text)
    if abs(value) >= 2**53:
        return f"{_show(text)} is too large"
    return "" if value.is_integer() else f"{_show(text)} is fractional"


def _pixel_fault(field: str, unit_pixels: bool) -> str:
    text = field.strip(" \t")
    if not text:
        return "is blank"
    if not NUMBER.fullmatch(text):
        return f"{_show(text)} is not a number"
    value = float(text)
    if value < 0:
        return f"{text} is negative"
    if unit_pixels:
        return f"{text} is above 1, where pixels are 0 to 1" if value > 1 else ""
    if value > 255:
        return f"{text} is above 255"
    return "" if value.is_integer() else f"{text} is fractional, where pixels are 0 to 255"


def _show(text: str) -> str:
    """Text as it can stand in a one-line message."""
    return repr(text if len(text) <= 20 else text[:20] + "...")
