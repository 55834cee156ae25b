"""Any table in any layout is read back equal; any damage is refused in one line, or does not change what is read.

python -m pytest tests/data/test_csv_properties.py
"""

import gzip
import random
import re
from pathlib import Path

import numpy as np
import pytest
from csv_tables import LABELS, NAMES, PIXELS, rows, text
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.data.reading import read_image_set
from mnist_ddp.errors import exit_with_one_line

STYLES = {"whole": str, "float": lambda pixel: f"{pixel}.0", "unit": lambda pixel: repr(pixel / 255)}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_table_in_any_layout_is_read_back_equal(
    data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = data.draw
    side = draw(st.integers(2, 5))
    labels = draw(st.lists(st.integers(-3, 300), min_size=2, max_size=30).filter(lambda labels: len(set(labels)) > 1))
    seed, levels = draw(st.integers(0, 999)), draw(st.sampled_from([[0, 255], [0, 1, 2], range(256)]))
    pixels = np.random.default_rng(seed).choice(levels, (len(labels), side * side))
    style = draw(st.sampled_from(sorted(STYLES)))
    assume(style != "float" or pixels.max() > 1)  # 0.0 and 1.0 alone are taken as a scale of 0 to 1
    label_last = draw(st.booleans())
    table = rows(labels, pixels, show=STYLES[style], label_last=label_last)
    has_header, ids = draw(st.booleans()), draw(st.booleans())
    if has_header:
        names = [f"pixel{number}" for number in range(side * side)]
        label = draw(st.sampled_from(["label", "Class", "TARGET", "y"]))
        table = [[*names, label] if label_last else [label, *names], *table]
        if ids:
            table = [["id", *table[0]], *([str(number), *row] for number, row in enumerate(table[1:], 60_000))]
    if draw(st.booleans()):
        table = [[f'"{field}"' for field in row] for row in table]
    content = text(
        table,
        separator=draw(st.sampled_from(",;\t")),
        newline=draw(st.sampled_from(["\n", "\r\n"])),
        end=draw(st.sampled_from(["", "\n", "\n\n", "\r\n\r\n"])),
    ).encode(draw(st.sampled_from(["utf-8", "utf-8-sig"])))
    path = tmp_path / "digits.csv"
    path.write_bytes(gzip.compress(content) if draw(st.booleans()) else content)
    monkeypatch.setattr("mnist_ddp.data.stream.BLOCK_BYTES", draw(st.sampled_from([512, 8 << 20])))

    found = read_image_set(path, label_column="last" if label_last and not has_header else "")
    assert found.images.flatten(1).tolist() == pixels.tolist()
    assert [int(found.class_names[index]) for index in found.labels] == labels
    assert found.class_names == tuple(map(str, sorted(set(labels))))


def read_by_hand(content: bytes) -> tuple[list[str], list[list[float]]] | None:
    """Labels and pixels of a table with the label first, field by field; None where a field is no number."""
    lines = content.decode("utf-8", errors="replace").removeprefix("\ufeff").rstrip("\r\n").split("\n")
    separator = max(",;\t", key=lines[0].count)
    table = [
        [re.sub(r'^"(.*)"\s*$', r"\1", field) for field in line.removesuffix("\r").split(separator)] for line in lines
    ]
    if re.search("[a-z]", lines[0]):
        table = table[1:]
    if not all(re.fullmatch(r"\s*[-+]?[0-9]*\.?[0-9]+\.?(e[-+]?[0-9]+)?\s*", field) for row in table for field in row):
        return None
    numbers = [[float(field) for field in row] for row in table]
    pixels = [row[1:] for row in numbers]
    if {len(row) for row in pixels} != {4}:
        return None
    if any(not pixel.is_integer() for row in pixels for pixel in row):
        pixels = [[round(255 * pixel) for pixel in row] for row in pixels]
    return [f"{row[0]:.0f}" for row in numbers], pixels


def mutate(content: bytes, chance: random.Random) -> bytes:
    """The content cut, or with a few bytes flipped, inserted or deleted."""
    at = chance.randrange(len(content))
    kind = chance.choice(["cut", "flip", "insert", "insert", "delete", "overwrite"])
    if kind == "cut":
        return content[:at]
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
    if kind == "delete":
        return content[:at] + content[at + chance.choice([1, 1, 2, 9]) :]
    likely = b'0123456789.,;\t\n\r"-+ e#x\0\xe9'
    new = bytes(chance.choices(likely, k=chance.choice([1, 1, 2, 5])))
    return content[:at] + new + content[at + (len(new) if kind == "overwrite" else 0) :]


BASES = {
    "plain": text(rows()).encode(),
    "header": text([["label", *NAMES], *rows()]).encode(),
    "quoted CRLF": text([[f'"{field}"' for field in row] for row in rows()], newline="\r\n").encode(),
    "semicolons and floats": text(rows(show=STYLES["float"]), separator=";").encode(),
    "0 to 1": text(rows(show=STYLES["unit"])).encode("utf-8-sig"),
}


def read_or_refuse(path: Path, capsys: pytest.CaptureFixture[str]) -> ImageSet | None:
    """The images; or None where the file was refused as a program does it: one line, exit status 2."""
    found = None
    status = 0
    try:
        with exit_with_one_line():
            found = read_image_set(path)
    except SystemExit as left:
        status = left.code
    message = capsys.readouterr().err
    if found is None:
        assert status == 2
        assert re.fullmatch(r"error: [^\n]*\n", message), message
        assert str(path) in message
    else:
        assert message == ""
    return found


@pytest.mark.parametrize("base", BASES)
def test_damaged_table_is_read_as_it_stands_or_refused(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(base)
    path = tmp_path / "digits.csv"
    num_read = 0
    for round_ in range(100):
        content = mutate(BASES[base], chance)
        path.write_bytes(content)
        monkeypatch.setattr("mnist_ddp.data.stream.BLOCK_BYTES", chance.choice([100, 8 << 20]))
        found = read_or_refuse(path, capsys)
        if found is not None:
            by_hand = read_by_hand(content)
            assert by_hand is not None, (round_, content)
            assert [found.class_names[index] for index in found.labels] == by_hand[0], (round_, content)
            assert found.images.flatten(1).tolist() == by_hand[1], (round_, content)
            num_read += 1
    assert 5 < num_read < 90  # both outcomes were seen


def test_damaged_packed_file_is_read_right_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = gzip.compress(BASES["plain"], mtime=0)
    chance = random.Random(1206)
    path = tmp_path / "digits.csv.gz"
    num_refused = 0
    for _ in range(100):
        path.write_bytes(mutate(packed, chance))
        found = read_or_refuse(path, capsys)
        if found is None:
            num_refused += 1
        else:  # a byte that does not matter: the time or the name of the original file
            assert found.images.flatten(1).tolist() == PIXELS.tolist()
            assert [int(found.class_names[index]) for index in found.labels] == LABELS
    assert num_refused > 50
