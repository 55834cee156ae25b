"""A source is parsed once per machine; processes share one copy; damage, kills and full disks cost time at most.

python -m pytest tests/data/test_cache.py
"""

import json
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from csv_tables import NAMES, PIXELS, rows, text

from mnist_ddp.data import reading
from mnist_ddp.data.cache import Stored, load_or_parse
from mnist_ddp.data.parsing import Contents
from mnist_ddp.data.reading import read_image_set
from mnist_ddp.errors import UserError

# Forked: they need no second import of torch, and share nothing but the folder.
processes = multiprocessing.get_context("fork")

IMAGES = np.random.default_rng(0).integers(0, 256, (300, 5, 7), dtype=np.uint8)
LABELS = np.random.default_rng(1).integers(0, 3, 300)
KEY = {"source": "random", "seed": 0}


def parse(pixels: IO[bytes]) -> Contents:
    pixels.write(IMAGES.tobytes())
    return Contents(5, 7, LABELS, ("a", "b", "ç"), ("said once",))


def never(pixels: IO[bytes]) -> Contents:
    raise AssertionError("parsed although the cache holds it")


def check(found: Stored) -> None:
    assert np.array_equal(found.images.numpy(), IMAGES)
    assert found.labels is not None
    assert np.array_equal(found.labels.numpy(), LABELS)
    assert found.class_names == ("a", "b", "ç")
    assert found.notes == ("said once",)


def in_child(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns in a process of its own."""
    here, there = processes.Pipe()
    child = processes.Process(target=lambda: there.send(work(*arguments)))
    child.start()
    there.close()
    try:
        return here.recv()
    finally:
        child.join(30)


def test_second_start_does_not_parse(tmp_path: Path) -> None:
    check(load_or_parse(parse, KEY, "random", str(tmp_path / "new" / "folder")))
    check(load_or_parse(never, KEY, "random", str(tmp_path / "new" / "folder")))
    check(load_or_parse(parse, KEY, "random", ""))
    assert sorted(path.suffix for path in tmp_path.rglob("random-*")) == [".arrow", ".lock"]


def test_images_without_labels(tmp_path: Path) -> None:
    def parse_images(pixels: IO[bytes]) -> Contents:
        return parse(pixels)._replace(labels=None, class_names=())

    for parser in (parse_images, never):
        found = load_or_parse(parser, KEY, "images", str(tmp_path))
        assert found.labels is None
        assert np.array_equal(found.images.numpy(), IMAGES)


def test_file_is_plain_arrow(tmp_path: Path) -> None:
    """What others read with pyarrow alone."""
    import pyarrow as pa

    load_or_parse(parse, KEY, "random", str(tmp_path))
    (path,) = tmp_path.glob("*.arrow")
    with pa.ipc.open_file(path) as reader:
        table = reader.read_all()
    assert b"".join(table["image"].to_pylist()) == IMAGES.tobytes()
    assert table["label"].to_pylist() == LABELS.tolist()


def test_a_fault_is_searched_by_one_process_and_told_by_all(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def faulty_parse(pixels: IO[bytes]) -> Contents:
        with log.open("a") as file:
            file.write("parsed\n")
        time.sleep(0.5)
        raise UserError("row 3 is empty")

    all_started = processes.Barrier(3)

    def load(results: Connection) -> None:
        all_started.wait(20)
        with pytest.raises(UserError, match=r"^row 3 is empty$"):
            load_or_parse(faulty_parse, KEY, "random", str(tmp_path / "cache"))
        results.send("refused")

    here, there = processes.Pipe()
    children = [processes.Process(target=load, args=(there,)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [here.recv() for _ in children] == ["refused"] * 3
    assert log.read_text() == "parsed\n"
    check(load_or_parse(parse, KEY, "random", str(tmp_path / "cache")))  # a later start looks again


@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_one_process_parses_and_all_get_equal_data(num_processes: int, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def slow_parse(pixels: IO[bytes]) -> Contents:
        with log.open("a") as file:
            file.write("parsed\n")
        time.sleep(0.2)
        return parse(pixels)

    def load(results: Connection) -> None:
        found = load_or_parse(slow_parse, KEY, "random", str(tmp_path / "cache"))
        check(found)
        results.send("equal")

    here, there = processes.Pipe()
    children = [processes.Process(target=load, args=(there,)) for _ in range(num_processes)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * num_processes
    assert [here.recv() for _ in children] == ["equal"] * num_processes
    assert log.read_text() == "parsed\n"


def test_killed_in_the_middle_the_next_start_rebuilds(tmp_path: Path) -> None:
    here, there = processes.Pipe()

    def stuck_parse(pixels: IO[bytes]) -> Contents:
        pixels.write(IMAGES[:100].tobytes())
        pixels.flush()
        there.send("writing")
        time.sleep(60)
        return parse(pixels)

    child = processes.Process(target=load_or_parse, args=(stuck_parse, KEY, "random", str(tmp_path)))
    child.start()
    assert here.recv() == "writing"
    os.kill(child.pid, signal.SIGKILL)
    child.join(30)
    (left,) = tmp_path.glob("*.raw")
    assert left.stat().st_size == IMAGES[:100].size

    check(load_or_parse(parse, KEY, "random", str(tmp_path)))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".arrow", ".lock"]


def test_any_damage_is_noticed_and_repaired(tmp_path: Path) -> None:
    load_or_parse(parse, KEY, "random", str(tmp_path))
    (path,) = tmp_path.glob("*.arrow")
    whole = path.read_bytes()
    assert whole == rewritten(path)  # the same content gives the same file
    chance = random.Random(1206)
    for round_ in range(150):
        at = chance.randrange(len(whole))
        damaged = whole[:at] if round_ % 3 == 0 else whole[:at] + bytes([whole[at] ^ 1 << round_ % 8]) + whole[at + 1 :]
        path.unlink()  # not overwritten: a file that is mapped must not change
        path.write_bytes(damaged)
        check(load_or_parse(parse, KEY, "random", str(tmp_path)))
    path.unlink()
    path.write_bytes(b"")
    check(load_or_parse(parse, KEY, "random", str(tmp_path)))
    assert path.read_bytes() == whole


def rewritten(path: Path) -> bytes:
    path.unlink()
    load_or_parse(parse, KEY, "random", str(path.parent))
    return path.read_bytes()


def test_file_of_another_key_is_not_taken(tmp_path: Path) -> None:
    """Even under its name, as after a collision or a copy by hand."""
    load_or_parse(parse, {"source": "other"}, "random", str(tmp_path))
    (other,) = tmp_path.glob("*.arrow")
    content = other.read_bytes()
    other.unlink()
    load_or_parse(parse, KEY, "random", str(tmp_path))
    (path,) = tmp_path.glob("*.arrow")
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(AssertionError, match="although the cache holds it"):
        load_or_parse(never, KEY, "random", str(tmp_path))


def test_every_change_of_source_or_settings_is_parsed_anew(tmp_path: Path) -> None:
    path, cache = tmp_path / "digits.csv", tmp_path / "cache"
    content = text([["label", *NAMES], *rows()])
    path.write_text(content)

    def number_of_files(**arguments: Any) -> int:
        read_image_set(path, cache_dir=str(cache), **arguments)
        return len(list(cache.glob("digits.csv-*.arrow")))

    assert [number_of_files(), number_of_files()] == [1, 1]
    assert [number_of_files(transposed=True), number_of_files(transposed=True)] == [2, 2]
    assert [number_of_files(label_column="label")] == [3]
    status = path.stat()
    path.write_text(content.replace("0,255,7,254", "0,255,9,254"))  # as long as before
    assert read_image_set(path, cache_dir=str(cache)).images[0].flatten().tolist() == [0, 255, 9, 254]
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert number_of_files() == 5
    (tmp_path / "elsewhere").mkdir()
    path = path.rename(tmp_path / "elsewhere" / "digits.csv")
    assert number_of_files() == 6


def test_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "digits.csv"
    path.write_text(text(rows()))
    real = reading.parse_csv

    def parse_while_it_grows(*arguments: Any, **keywords: Any) -> Contents:
        found = real(*arguments, **keywords)
        with path.open("a") as file:
            file.write("7,1,2,3,4\n")
        return found

    monkeypatch.setattr(reading, "parse_csv", parse_while_it_grows)
    with pytest.raises(UserError) as error:
        read_image_set(path, cache_dir=str(tmp_path / "cache"))
    assert str(error.value) == f"{path}: changed while it was read; start again when it is complete"
    assert list((tmp_path / "cache").glob("*.arrow")) == []


def test_fault_of_the_source_leaves_nothing_behind(tmp_path: Path) -> None:
    path, cache = tmp_path / "digits.csv", tmp_path / "cache"
    path.write_text(text(rows()) + "1,2,3\n")
    for _ in range(2):
        with pytest.raises(UserError, match="row 13 has 3 fields"):
            read_image_set(path, cache_dir=str(cache))
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


def test_folder_that_cannot_be_used_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "digits.csv"
    path.write_text(text(rows()))
    for cache_dir, reason in ((path, "Not a directory"), (Path("/proc/cache"), "No such file or directory")):
        found = read_image_set(path, cache_dir=str(cache_dir))
        assert found.images.flatten(1).tolist() == PIXELS.tolist()
        assert found.notes == (f"--cache_dir {cache_dir}: {reason}; read without a cache",)


def test_full_disk_is_a_note(tmp_path: Path) -> None:
    """A limit on the size of files stands in for it: writing fails in the middle with OSError."""

    def load(limit: int) -> tuple[str, ...]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        found = load_or_parse(parse, KEY, "random", str(tmp_path))
        assert np.array_equal(found.images.numpy(), IMAGES)
        return found.notes

    for limit in (4096, IMAGES.nbytes + 100):  # too little for the pixels; too little for the Arrow file
        note = f"--cache_dir {tmp_path}: File too large; read without a cache"
        assert in_child(load, limit) == ("said once", note)
        assert [file.suffix for file in tmp_path.iterdir()] == [".lock"]


def test_images_are_a_map_of_the_file_without_private_memory(tmp_path: Path) -> None:
    def parse_large(pixels: IO[bytes]) -> Contents:
        pixels.write(bytes(range(256)) * (64 << 12))
        return Contents(256, 256, np.zeros(1024, np.int64), ("a",), ())

    def kilobytes() -> tuple[int, int]:
        found = load_or_parse(never, KEY, "large", str(tmp_path))
        assert found.images.float().mean() == 127.5  # touches every page
        (mapping,) = re.findall(r"large-\w+\.arrow\n(.*?)VmFlags", Path("/proc/self/smaps").read_text(), re.DOTALL)
        sizes = {name: int(size) for name, size in re.findall(r"(\w+): +(\d+) kB", mapping)}
        return sizes["Rss"], sizes["Anonymous"]  # pages of its own are anonymous

    load_or_parse(parse_large, KEY, "large", str(tmp_path))
    resident, private = in_child(kilobytes)
    assert resident >= 64 << 10
    assert private == 0


def test_start_from_the_cache_imports_neither_pandas_nor_datasets(tmp_path: Path) -> None:
    path, cache = tmp_path / "digits.csv", tmp_path / "cache"
    path.write_text(text(rows()))
    read_image_set(path, cache_dir=str(cache))
    code = (
        "import json, sys; from mnist_ddp.data.reading import read_image_set; "
        "before = set(sys.modules); images = read_image_set(sys.argv[1], cache_dir=sys.argv[2]).images; "
        "print(json.dumps([images.flatten(1).tolist(), "
        "[name for name in ('pandas', 'datasets') if name in sys.modules], 'pyarrow' in before]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path, cache],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == [PIXELS.tolist(), [], False]
