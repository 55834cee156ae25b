"""Stopped by a signal, a kill or a stuck process, a run leaves nothing behind, and goes on at the next start.

python -m pytest tests/test_stopping.py
"""

import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import ROOT, warm_programs

from benchmarks import faults
from benchmarks.faults import START, Run, check_signal, killed_run, outcome, write_digits
from mnist_ddp.training.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def _started_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "programs", Path(warm_programs()))
        yield


def forks_of(run: Run) -> list[psutil.Process]:
    """The processes of a self-started run, by rank: children of the one that works for a program of `warm_programs`."""
    (program,) = run.ranks()
    return sorted(psutil.Process(int(program.name())).children(), key=psutil.Process.create_time)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits.csv", 1000)


@pytest.fixture(scope="module")
def untouched(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two processes that was left alone."""
    folder = tmp_path_factory.mktemp("untouched") / "run"
    run = Run("torchrun", digits, folder)
    assert run.end() == 0, run.said()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("launcher", "target", "number"),
    [
        ("self-started", "launcher", signal.SIGINT),
        ("torchrun", "launcher", signal.SIGTERM),
        ("accelerate launch", "last rank", signal.SIGTERM),
    ],
)
def test_a_signal_to_any_process_saves_and_stops_all(
    launcher: str, target: str, number: signal.Signals, digits: Path, folder: Path
) -> None:
    check_signal(launcher, target, number, "epoch   2", digits, folder, go_on=launcher == "torchrun")


def test_a_killed_run_ends_bit_for_bit_like_the_untouched_one(untouched: Path, digits: Path, folder: Path) -> None:
    assert killed_run("torchrun", digits, folder, random.Random(1), kills=1, seconds=4) == outcome(untouched)


def test_torchrun_restarts_a_killed_worker_from_the_checkpoint(untouched: Path, digits: Path, folder: Path) -> None:
    run = Run("torchrun", digits, folder, launcher_flags=("--max_restarts", "3"))
    assert run.wait_for("epoch   2"), run.said()
    run.ranks()[1].kill()
    assert run.end() == 0, run.said()
    assert len(re.findall(r"^resumed after \d epochs", run.said(), re.M)) == 1, run.said()
    assert outcome(folder) == outcome(untouched)


# train_accel.py in which a function of the loop first sleeps on the last rank: a process that hangs.
HANGS = """
import os, sys, time
import train_accel
from mnist_ddp.training import loop

sound = loop.{function}

def hang_here(*args, **kwargs):
    if os.environ.get("RANK", "0") == "{rank}":
        print("hanging", flush=True)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(1)
    return sound(*args, **kwargs)

loop.{function} = hang_here
sys.exit(train_accel.main())
"""


# train_accel.py whose every step asks for a stop.
STOPS = """
import os, signal, sys
import train_accel
from mnist_ddp.training import loop

sound = loop.train_step

def stop(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    return sound(*args, **kwargs)

loop.train_step = stop
sys.exit(train_accel.main())
"""


def test_a_run_that_is_stopped_twice_in_an_epoch_goes_on_each_time(digits: Path, folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STOPS)
    checkpoints = []
    for _ in range(2):
        run = Run("python", digits, folder, script=script)
        assert run.end() == 143, run.said()
        assert json.loads((folder / "result.json").read_text())["status"] == "preempted"
        checkpoints.append(max(path.name for path in (folder / "checkpoints").iterdir()))
    assert "epoch-00000" < checkpoints[0] < checkpoints[1] < "epoch-00001"


def test_a_second_interrupt_ends_at_once(digits: Path, folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HANGS.format(function="train_step", rank=0))
    run = Run("python", digits, folder, script=script)
    try:
        assert run.wait_for("hanging"), run.said()
        run.process.send_signal(signal.SIGINT)
        time.sleep(1.2)  # one that comes sooner may be the terminal's and the launcher's of the same Ctrl-C
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(5) == 130
    finally:
        run.end()


@pytest.fixture(scope="module")
def stuck(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """A run of two processes and one of three whose rank 1 is stuck, from now on until the timeout."""
    folder = tmp_path_factory.mktemp("stuck")
    (folder / "train.py").write_text(HANGS.format(function="evaluate", rank=1))
    flags = ("--epochs", "1000", "--timeout_seconds", "6")
    hangs = Run("torchrun", digits, folder / "hangs", *flags, script=folder / "train.py")
    suspended = Run("self-started", digits, folder / "suspended", *flags, "--num_processes", "3")
    try:
        assert suspended.wait_for("epoch   1"), suspended.said()
        forks_of(suspended)[1].suspend()
        assert hangs.wait_for("hanging"), hangs.said()
        yield {"hangs": hangs, "suspended": suspended}
    finally:
        hangs.end()
        suspended.end()


@pytest.mark.usefixtures("stuck")  # whose timeout passes in the meantime
def test_a_killed_launcher_leaves_no_process_behind(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With interpreters of their own: it is a parent that is killed. Both launchers at once: most is importing."""
    monkeypatch.setattr(faults, "programs", Path(sys.executable).parent)
    runs = [Run(name, digits, tmp_path / name, "--epochs", "1000") for name in ("torchrun", "self-started")]
    try:
        for run in runs:
            assert run.wait_for("epoch   1"), run.said()
            run.process.kill()
            run.process.wait(10)
            deadline = time.monotonic() + 10
            while run.session():
                assert time.monotonic() < deadline, f"{run.process.args}: left {run.session()}"
                time.sleep(0.1)
    finally:
        for run in runs:
            run.end()


def test_a_process_that_hangs_or_is_suspended_is_named(stuck: dict[str, Run]) -> None:
    """One that hangs in Python shows its stack as well."""
    for run in stuck.values():
        assert run.process.wait(60) != 0
        assert re.findall(r"^error: .*", run.said(), re.M) == [
            "error: rank 1 is stuck or out of reach: it kept the others waiting until the timeout"
        ], run.said()
    assert "in hang_here" in stuck["hangs"].said(), stuck["hangs"].said()


def test_a_slow_process_is_not_stuck(digits: Path, folder: Path) -> None:
    """Each step of one process takes longer than any other's, but all together far longer than the timeout."""
    run = Run("self-started", digits, folder, "--epochs", "2", "--timeout_seconds", "4")
    try:
        assert run.wait_for(START), run.said()
        slow = forks_of(run)[1]
        started = time.monotonic()
        while run.process.poll() is None and time.monotonic() - started < 8:
            with contextlib.suppress(psutil.NoSuchProcess):  # it is done
                slow.suspend()
                time.sleep(0.3)
                slow.resume()
            time.sleep(0.1)
        assert run.process.wait(60) == 0, run.said()
    finally:
        run.end()


def test_a_process_whose_parent_died_before_it_could_watch_ends() -> None:
    """The parent's number is handed to it: it cannot tell by itself that another process has adopted it."""
    script = """
import os, sys
from mnist_ddp.distributed import _run_self_started
from mnist_ddp.settings import Settings
_run_self_started(0, os.getppid() + int(sys.argv[1]), lambda settings: 7, Settings())
"""
    statuses = [
        subprocess.run([sys.executable, "-c", script, dead], cwd=ROOT, timeout=60).returncode for dead in ("0", "1")
    ]
    assert statuses == [7, -signal.SIGTERM]


def test_a_stuck_process_is_named_though_the_run_was_to_be_stopped(digits: Path, folder: Path) -> None:
    run = Run("self-started", digits, folder, "--epochs", "1000", "--timeout_seconds", "6")
    try:
        assert run.wait_for("epoch   1"), run.said()
        forks_of(run)[1].suspend()
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(40) == 1, run.said()
        assert run.said().count("error: rank 1 is stuck or out of reach") == 1, run.said()
    finally:
        run.end()


@pytest.fixture
def under_way(digits: Path, folder: Path) -> Iterator[Run]:
    run = Run("python", digits, folder, "--epochs", "1000")
    try:
        assert run.wait_for("epoch   1"), run.said()
        yield run
    finally:
        run.kill_all()


def test_two_runs_in_one_folder_are_refused(under_way: Run, digits: Path, folder: Path) -> None:
    second = Run("python", digits, folder)
    assert second.end() == 2
    assert re.fullmatch(r"error: --pt_path .*: another run is using this folder; .*\n", second.said())
    under_way.kill_all()
    third = Run("python", digits, folder)  # the lock has died with its process
    assert third.end() == 0, third.said()


def test_a_finished_run_says_so_and_other_settings_are_refused(untouched: Path, digits: Path) -> None:
    before, settings = outcome(untouched), (untouched / "settings.yaml").read_text()
    again = Run("torchrun", digits, untouched)
    assert again.end() == 0, again.said()
    assert re.search(r"^the run in .* is finished: test accuracy ", again.said(), re.M), again.said()
    impatient = Run("python", digits, untouched, "--patience", "1", "--batch_size", "7", "--push_to_hub", "me/x")
    assert impatient.end() == 0, impatient.said()
    assert not re.search("global batch|resumed", impatient.said()), impatient.said()  # nothing goes on
    assert f"note: nothing is pushed; hf upload me/x {untouched / 'cnn'} . does it" in impatient.said()
    assert (untouched / "settings.yaml").read_text() == settings
    other = Run("python", digits, untouched, "--lr", "0.5", "--seed", "3")
    assert other.end() == 2
    assert re.search(r"^error: .*--lr 0.03 -> 0.5; --seed 1206 -> 3", other.said(), re.M), other.said()
    new = Run("python", digits, untouched, "--resume", "never", "--batch_size", "100000")
    assert new.end() == 2
    assert "error: --batch_size 100000" in new.said()
    assert outcome(untouched) == before


def test_a_finished_run_whose_report_and_model_are_gone_makes_them_again(
    digits: Path, untouched: Path, tmp_path: Path
) -> None:
    """As after a kill between the result and the report. The result is damaged as well."""
    folder = tmp_path / "copy"
    shutil.copytree(untouched, folder)
    shutil.rmtree(folder / "cnn")
    (folder / "report.json").unlink()
    (folder / "result.json").write_text('{"status": "ear')
    run = Run("torchrun", digits, folder)
    assert run.end() == 0, run.said()
    assert outcome(folder) == outcome(untouched)
    assert (folder / "report.json").exists()
    assert (folder / "cnn" / "README.md").exists()


def test_a_new_result_takes_away_the_report_of_an_older_one(untouched: Path, tmp_path: Path) -> None:
    """Which a run that is killed before its own report would leave, and the next start would take for its own."""
    folder = tmp_path / "copy"
    shutil.copytree(untouched, folder)
    RunFolder(str(folder), "auto", 1).write_result({})
    assert not (folder / "report.json").exists()


def test_damaged_checkpoints_are_named(digits: Path, untouched: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(untouched, folder)
    (folder / "result.json").unlink()
    newest, before = sorted((folder / "checkpoints").iterdir(), reverse=True)
    (newest / "state.json").write_bytes((newest / "state.json").read_bytes()[:-1])
    run = Run("torchrun", digits, folder)
    assert run.end() == 0, run.said()
    assert f"checkpoint {newest} is damaged" in run.said(), run.said()
    assert outcome(folder) == outcome(untouched)
    for path in (folder / "checkpoints").iterdir():
        (path / "SHA256SUMS").write_text("")
    run = Run("torchrun", digits, folder)
    assert run.end() != 0
    assert len(re.findall(r"^error: .*all 2 checkpoints are damaged", run.said(), re.M)) == 1, run.said()
    assert before.exists()


def test_divergence_keeps_the_best_model_and_says_what_to_try(digits: Path, folder: Path) -> None:
    run = Run("self-started", digits, folder, "--lr", "1e20", "--optimizer", "sgd", "--warmup_steps", "0")
    assert run.end() == 3, run.said()
    assert re.search(r"^diverged in epoch 1, by step \d: .* smaller --lr", run.said(), re.M), run.said()
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["best_epoch"]) == ("diverged", 0)
    assert not (folder / "cnn").exists()
