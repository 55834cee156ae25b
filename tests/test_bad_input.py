"""A user's mistake is one line, whatever the launcher; nothing is written and nothing is left behind.

python -m pytest tests/test_bad_input.py
"""

import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from launching import Ended, run

pytestmark = pytest.mark.timeout(240)


class Mistake(NamedTuple):
    flags: str
    """`{data}` is a folder with the files below, `{port}` a port that is in use."""
    words: str
    """Regular expression for the line after "error: "."""


# Found before torch is imported.
IN_SETTINGS = {
    "count": Mistake("--epochs 0", r"--epochs must be .*\b1\b.*, got 0"),
    "rate": Mistake("--lr nan", "--lr must be above 0, got nan"),
    "fraction": Mistake("--val_fraction 1.5", "--val_fraction must be .* got 1.5"),
    "fractions": Mistake("--val_fraction 0.5 --test_fraction 0.5", "--val_fraction and --test_fraction .* less than 1"),
    "port number": Mistake("--port 70000", "--port must be .* 65535, got 70000"),
    "type": Mistake("--batch_size many", ".*--batch_size.*'?many"),
    "choice": Mistake("--optimizer adma", ".*adma.*--optimizer.*sgd"),
    "flag": Mistake("--batchsize 8", ".*--batchsize.* --batch_size"),
    "config": Mistake("--config {data}/absent.yaml", "--config .*/absent.yaml: No such file"),
    "key": Mistake("--config {data}/key.yaml", "--config .*/key.yaml: .*epoch.* epochs"),
    "gpu list": Mistake("--gpu first", "--gpu .*first"),
}
# Found on the way to the first step. Of the faults of files one: the others take the same way, see tests/data.
LATER = {
    "pixel": Mistake("--mnist_file_path {data}/pixel.csv", r".*/pixel\.csv: row 7, column 3: .*256"),
    "no file": Mistake("--test_file_path {data}/absent.csv", r".*/absent\.csv: No such file"),
    "batch": Mistake("--batch_size 321", r"--batch_size 321: .*\b320 (images )?are for training.*--batch_size 320"),
    "training images again": Mistake(
        "--test_file_path {data}/small.csv", r"--test_file_path .*/small\.csv: holds no image that .*/small\.csv lacks"
    ),
    "run folder": Mistake("--pt_path {data}/small.csv/run", r"--pt_path .*/small\.csv/run .*written"),
    "gpu": Mistake("--gpu 99", "--gpu 99: .*GPU 99"),
    "port": Mistake(
        "--num_processes 2 --port {port} --master_addr 127.0.0.1", r"--port {port}\b.*in use|.*--port {port}\b.*taken"
    ),
    "address": Mistake("--num_processes 2 --master_addr a..b", r"--port 0 on a\.\.b cannot be used"),
}
WAYS = {
    "self-started": "python train_accel.py --num_processes 2",
    "torchrun": "torchrun --standalone --nproc_per_node 2 train_accel.py",
    "accelerate": "accelerate launch --multi_gpu --num_processes 2 train_accel.py",
}
# Of each kind one, on each way: met by all processes before they have joined, by all after it, by the main process
# alone.
TOGETHER = [
    ("torchrun", "count"),
    ("torchrun", "run folder"),
    ("accelerate", "pixel"),
    ("self-started", "pixel"),
    ("self-started", "run folder"),
]


@pytest.fixture(scope="module")
def data(small_csv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [row.split(",") for row in small_csv.read_text().splitlines()]

    def write(name: str, fields: list[str]) -> None:
        """All rows, with `fields` for the seventh."""
        changed = [*rows[:6], fields, *rows[7:]]
        (folder / name).write_text("".join(",".join(row) + "\n" for row in changed))

    write("small.csv", rows[6])
    write("pixel.csv", [*rows[6][:2], "256", *rows[6][3:]])
    (folder / "key.yaml").write_text("epoch: 3\n")
    return folder


@pytest.fixture(scope="module")
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def start(
    data: Path, busy_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Ended, list[Path]]]:
    def start(command: str, mistake: Mistake) -> tuple[Ended, list[Path]]:
        """How the command ended, and what it wrote to its run folder."""
        folder = tmp_path_factory.mktemp("run")
        flags = mistake.flags.format(data=data, port=busy_port)
        # The mistake's flags come last, and so count.
        given = f"--mnist_file_path {data}/small.csv --pt_path {folder} --epochs 1 --batch_size 20 --width 4 {flags}"
        ended = run(f"{command} {given}", timeout_seconds=90)
        return ended, [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]

    return start


@pytest.fixture(scope="module")
def start_later(start: Callable[..., tuple[Ended, list[Path]]]) -> Iterator[Callable[[str], tuple[Ended, list[Path]]]]:
    """The outcome of a mistake of `LATER` with plain python. Two run at a time: most of each is an import."""
    with ThreadPoolExecutor(2) as pool:
        futures: dict[str, Future[tuple[Ended, list[Path]]]] = {
            name: pool.submit(start, "python train_accel.py", mistake) for name, mistake in LATER.items()
        }
        yield lambda name: futures[name].result()
        for future in futures.values():
            future.cancel()


def one_line(mistake: Mistake, port: int) -> str:
    return "error: " + mistake.words.format(port=port)


@pytest.mark.parametrize("name", IN_SETTINGS)
def test_a_wrong_setting_is_one_line(name: str, start: Callable[..., tuple[Ended, list[Path]]]) -> None:
    ended, written = start("python train_accel.py", IN_SETTINGS[name])
    assert ended.status == 2, ended
    assert len(ended.stderr.splitlines()) == 1, ended
    assert re.match(one_line(IN_SETTINGS[name], 0), ended.stderr), ended
    assert not ended.stdout
    assert not written


@pytest.mark.parametrize("name", LATER)
def test_wrong_input_is_one_line(
    name: str, start_later: Callable[[str], tuple[Ended, list[Path]]], busy_port: int
) -> None:
    ended, written = start_later(name)
    assert ended.status == 2, ended
    assert len(ended.stderr.splitlines()) == 1, ended
    assert re.match(one_line(LATER[name], busy_port), ended.stderr), ended
    assert not ended.stdout
    assert not written


@pytest.mark.parametrize(("way", "name"), TOGETHER)
def test_two_processes_say_it_once(
    way: str, name: str, start: Callable[..., tuple[Ended, list[Path]]], busy_port: int
) -> None:
    mistake = (IN_SETTINGS | LATER)[name]
    ended, written = start(WAYS[way], mistake)
    lines = re.findall("^error: .*", ended.stderr, re.M)
    assert len(lines) == 1, ended
    assert re.match(one_line(mistake, busy_port), lines[0]), ended
    assert not re.search(r'File ".*(mnist_ddp/\w+|train_accel)\.py"', ended.stderr), ended
    if way == "self-started":
        assert ended.stderr.splitlines() == lines
    assert ended.status == (2 if way == "self-started" else 1)  # the launchers turn every failure into 1
    assert not ended.stdout
    assert not written
