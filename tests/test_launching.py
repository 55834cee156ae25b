"""Every way to start a run gives one run of the world size that it names, without GPUs too.

python -m pytest tests/test_launching.py
"""

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from launching import ROOT, Ended, run

from mnist_ddp import distributed

CORES = len(os.sched_getaffinity(0))
EPOCHS = 2
# A row may wait for the one before it, on a machine that does other work as well.
pytestmark = pytest.mark.timeout(240)


class Row(NamedTuple):
    command: str
    """`{config}` is the file that `accelerate config default` wrote, `{port}` a port that was free."""
    world_size: int
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed
    threads: int | None = None
    """Of each process; None: an equal share of the cores."""


# Of the README's table. The others are commands of docs/launching.md, or the default job.
ROWS = {
    "python": Row("python train_accel.py", 1),
    "self-started on a port": Row("python train_accel.py --num_processes 2 --port {port} --master_addr 127.0.0.1", 2),
    # Without --standalone, torchrun takes port 29500 and fails where something else has it.
    "torchrun": Row("torchrun train_accel.py", 1, {"PET_MASTER_PORT": "{port}"}),
    "torchrun 3": Row("torchrun --standalone --nproc_per_node 3 train_accel.py", 3),
    "torchrun with threads": Row(
        "torchrun --standalone --nproc_per_node 2 train_accel.py --mixed_precision fp16", 2, {"OMP_NUM_THREADS": "3"}, 3
    ),
    "accelerate, cpu": Row("accelerate launch --cpu --num_processes 2 train_accel.py", 1),
    "accelerate, default config": Row("accelerate launch --config_file {config} train_accel.py", 1),
}


@pytest.fixture(scope="module")
def default_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "default.yaml"
    ended = run(f"accelerate config default --config_file {path}")
    assert ended.status == 0, ended
    return path


@pytest.fixture(scope="module")
def run_row(
    small_csv: Path, default_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Ended]]:
    """The outcome of a row. All rows are started at once, in two lanes: whatever two runs could share, they meet in it.

    Accelerate's rows have a lane of their own, since each of them takes port 29500 when it finds it free.
    """
    flags = f"--mnist_file_path {small_csv} --epochs {EPOCHS} --batch_size 20 --width 4 --log_with none"

    def start(name: str) -> Ended:
        row = ROWS[name]
        values = {"config": str(default_config), "port": str(free_port())}
        environment = {variable: value.format(**values) for variable, value in row.environment.items()}
        command = f"{row.command.format(**values)} {flags}"
        return run(command, tmp_path_factory.mktemp("run"), timeout_seconds=90, **environment)

    with ThreadPoolExecutor(1) as of_accelerate, ThreadPoolExecutor(1) as of_others:
        futures: dict[str, Future[Ended]] = {
            name: (of_accelerate if name.startswith("accelerate") else of_others).submit(start, name) for name in ROWS
        }
        yield lambda name: futures[name].result()
        for future in futures.values():
            future.cancel()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("name", ROWS)
def test_one_run_of_the_named_size(name: str, run_row: Callable[[str], Ended]) -> None:
    ended, (_, world_size, _, threads) = run_row(name), ROWS[name]
    assert ended.status == 0, ended
    assert ended.result is not None, ended
    assert ended.result["world_size"] == world_size
    assert [line["epoch"] for line in ended.metrics] == list(range(1, EPOCHS + 1))
    starts = re.findall(r"^(\d+) process(?:es)? on CPU, (\d+) threads? each; global batch (\d+)", ended.stdout, re.M)
    shown = [tuple(map(int, start)) for start in starts]
    assert shown == [(world_size, threads or max(1, CORES // world_size), 20 * world_size)], ended


# Where there are GPUs, the program's own processes are spawned.
SPAWNED = """
import sys
import train_accel
from mnist_ddp import distributed

distributed.start_method = lambda system, gpu: "spawn"
if __name__ == "__main__":
    sys.exit(train_accel.main())
"""


def test_torch_is_imported_once_for_all_processes_and_spawned_ones_learn_the_same(
    small_csv: Path, tmp_path: Path
) -> None:
    flags = f"--num_processes 2 --mnist_file_path {small_csv} --epochs 1 --batch_size 20 --width 4 --log_with none"
    forked = run(f"python -X importtime train_accel.py {flags}", tmp_path / "forked", fresh=True)
    assert forked.status == 0, forked
    assert len(re.findall(r"\| +torch$", forked.stderr, re.M)) == 1
    assert not re.search(r"\| +datasets$", forked.stderr, re.M)  # nor what Accelerate would import to look at loaders

    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    spawned = run(f"python {script} {flags}", tmp_path / "spawned", fresh=True, PYTHONPATH=str(ROOT))
    assert (spawned.status, spawned.stderr) == (0, ""), spawned
    models = [(tmp_path / name / "cnn" / "model.safetensors").read_bytes() for name in ("forked", "spawned")]
    assert models[0] == models[1]


@pytest.mark.parametrize(
    ("system", "gpu", "method"), [("linux", False, "fork"), ("linux", True, "spawn"), ("darwin", False, "spawn")]
)
def test_a_process_that_may_hold_a_driver_is_not_forked(system: str, gpu: bool, method: str) -> None:
    assert distributed.start_method(system, gpu) == method


def test_the_default_config_is_what_it_says(default_config: Path) -> None:
    # Where accelerate writes something else one day, the row above must follow it.
    assert json.loads(default_config.read_text())["num_processes"] == ROWS["accelerate, default config"].world_size


def test_fp16_without_a_gpu_is_one_warning(run_row: Callable[[str], Ended]) -> None:
    ended = run_row("torchrun with threads")
    assert len(re.findall(r"^warning: fp16 needs a GPU; training in (fp32|bf16)$", ended.stderr, re.M)) == 1, ended
    assert ended.result is not None
    assert ended.result["mixed_precision"] in ("no", "bf16")


@pytest.mark.parametrize("name", ["self-started on a port", "python"])
def test_a_run_without_a_launcher_has_nothing_to_complain_about(name: str, run_row: Callable[[str], Ended]) -> None:
    assert run_row(name).stderr == ""


def test_the_launchers_single_thread_is_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert distributed._threads_per_process(2) == 1  # the user's own
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert distributed._threads_per_process(2) == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert distributed._threads_per_process(2) == 3


@pytest.mark.parametrize(
    ("command", "environment", "words"),
    [
        ("python", {"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 in the environment, but RANK and MASTER_ADDR and MASTER_PORT"),
        ("python", {"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many' in the environment"),
        ("torchrun --standalone --nproc_per_node 2", {}, "--num_processes 3: the launcher started 2; "),
    ],
)
def test_a_world_size_that_does_not_match_is_refused(
    command: str, environment: dict[str, str], words: str, small_csv: Path, tmp_path: Path
) -> None:
    """What a job scheduler left in the environment, or a flag that contradicts the launcher."""
    folder = tmp_path / "run"
    flags = f"--mnist_file_path {small_csv} --num_processes 3"
    ended = run(f"{command} train_accel.py {flags}", folder, **environment)
    assert ended.status == (2 if command == "python" else 1), ended
    assert re.findall(r"^error: .*$", ended.stderr, re.M)[0].startswith(f"error: {words}"), ended
    assert len(re.findall(r"^error: ", ended.stderr, re.M)) == 1
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs a C++ compiler: install g++")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_compiled_network_learns_the_same(processes: int, small_csv: Path, tmp_path: Path) -> None:
    flags = f"--mnist_file_path {small_csv} --epochs {EPOCHS} --batch_size 20 --width 4 --num_processes {processes}"
    losses = {}
    for compiled in ("false", "true"):
        folder = tmp_path / compiled
        ended = run(f"python train_accel.py {flags} --compile {compiled}", folder, timeout_seconds=110)
        assert ended.status == 0, ended
        losses[compiled] = [(line["train_loss"], line["val_loss"]) for line in ended.metrics]
    for ours, theirs in zip(losses["true"], losses["false"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    assert losses["true"] != losses["false"]  # other kernels round otherwise: it was compiled


def test_compiling_without_a_compiler_is_a_mistake(small_csv: Path, tmp_path: Path) -> None:
    command = f"python train_accel.py --mnist_file_path {small_csv} --num_processes 2 --compile true"
    ended = run(command, tmp_path / "run", CXX="no-such-compiler")
    assert ended.status == 2
    assert ended.stderr == (
        "error: --compile true: needs a C++ compiler, and there is no no-such-compiler: apt-get install g++\n"
    )


@pytest.mark.slow
def test_processes_with_other_settings_are_refused(small_csv: Path, tmp_path: Path) -> None:
    """One that changes nothing before an epoch has ended, and then trains the processes apart."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, train_accel\n"
        "from mnist_ddp.errors import exit_with_one_line\n"
        "sys.argv += ['--min_delta', '0.1'] if os.environ['RANK'] == '1' else []\n"
        "with exit_with_one_line():\n"
        "    sys.exit(train_accel.main())\n"
    )
    command = f"torchrun --standalone --nproc_per_node 2 {script} --mnist_file_path {small_csv} --batch_size 20"
    ended = run(command, tmp_path / "run", PYTHONPATH=str(ROOT))
    assert ended.status == 1, ended
    (error,) = re.findall(r"^error: .*$", ended.stderr, re.M)
    assert re.match(r"error: the processes do not agree on --min_delta: 0.0 on rank 0 .*, 0.1 on rank 1 ", error), ended
    assert not ended.metrics


@pytest.mark.slow
def test_the_default_job_learns_to_read_and_stops_by_itself(tmp_path: Path) -> None:
    """The first command of the README, on the embedded digits."""
    command = "accelerate launch --config_file accelerate_config.yaml train_accel.py"
    ended = run(command, tmp_path / "run", timeout_seconds=200)
    assert ended.status == 0, ended
    assert ended.result is not None
    assert ended.result["status"] == "early_stopped"
    assert ended.result["world_size"] == 2
    assert ended.result["num_test"] == 1000
    assert ended.result["test_accuracy"] >= 0.98
    last = ended.stdout.splitlines()[-1]
    assert f"{ended.result['test_accuracy']:.2%}" in last
    assert str(tmp_path / "run" / "cnn") in last
    assert (tmp_path / "run" / "cnn" / "model.safetensors").is_file()
