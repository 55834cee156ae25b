"""Kills, stops and starts real runs, and compares what comes out with a run that was left alone.

    python -m benchmarks.faults            # everything, a quarter of an hour on two cores
    python -m benchmarks.faults --quick    # a smoke test: one of each kind

Prints a line per trial and, at the end, "survived N of N", which it writes to a JSON file too. Exit
status 1 where a trial was lost.
"""

import argparse
import gzip
import hashlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = {
    "python": "python",
    "self-started": "python",
    "torchrun": "torchrun --standalone --nproc_per_node 2",
    "accelerate launch": "accelerate launch --multi_gpu --num_processes 2 --main_process_port 0",
}
FLAGS = "--epochs 6 --batch_size 40 --width 4 --patience 6 --log_with none --cache_dir= --checkpoint_every_steps 3"
START = "train / val / test images"  # of the start line, when all processes handle signals
_TIMEOUT_SECONDS = 120.0
programs = Path(sys.executable).parent  # where python, torchrun and accelerate are

# Moments of a run: a function that is under way then, and which call of it is the first to be met with. The second of a
# checkpoint's sync_folder follows its renaming: an odd number is before it.
MOMENTS = {
    "training": ("loop.train_step", 25),
    "evaluation": ("loaders.EvaluationSamples.__getitems__", 3),
    "saving": ("checkpoint.sync_folder", 5),
    "data loading": ("loaders.TrainingSamples.__getitems__", 25),
}
# train_accel.py that tells the steps it has taken, and stays once in a function for a while. Processes that are
# spawned import it too.
TELLS = """
import sys

import train_accel
from mnist_ddp.errors import exit_with_one_line
from mnist_ddp.training import loop

train_step = loop.train_step


def telling(accelerator, state, *args, **kwargs):
    result = train_step(accelerator, state, *args, **kwargs)
    print(f"took step {{state.step}}", flush=True)
    return result


loop.train_step = telling
{stay}
if __name__ == "__main__":
    with exit_with_one_line():
        sys.exit(train_accel.main())
"""
STAYS = """
import time

from mnist_ddp.data import loaders
from mnist_ddp.training import checkpoint

sound, calls = {function}, 0


def staying(*args, **kwargs):
    global calls
    calls += 1
    if calls == {call}:
        print("{moment} is under way", flush=True)
        time.sleep(0.3)
        print("{moment} goes on", flush=True)
    return sound(*args, **kwargs)


{function} = staying
"""


def write_digits(path: Path, rows: int) -> Path:
    """The first `rows` of the embedded digits."""
    with gzip.open(ROOT / "data" / "mnist_test.csv.gz", "rt") as digits:
        path.write_text("".join(next(digits) for _ in range(rows)))
    return path


class Run:
    """A run in its own session, whose processes can be found and are all gone when the block ends.

    Args:
        launcher: a key of LAUNCHERS.
        digits: the CSV to train on.
        folder: the run folder.
        flags: further ones.
        launcher_flags: further ones of the launcher.
        script: in place of train_accel.py.
    """

    def __init__(
        self,
        launcher: str,
        digits: Path,
        folder: Path,
        *flags: str,
        launcher_flags: tuple[str, ...] = (),
        script: Path = ROOT / "train_accel.py",
    ) -> None:
        self.script = script.name
        words = [*shlex.split(LAUNCHERS[launcher]), *launcher_flags, str(script), *shlex.split(FLAGS)]
        words += ["--num_processes", "2"] if launcher == "self-started" else []
        identity = uuid.uuid4().hex
        self.mark = f"MNIST_DDP_FAULTS={identity}"
        name, value = self.mark.split("=")
        self.output = folder.with_name(f"{folder.name}-{identity}.log")
        surroundings = {
            name: value,
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
        }
        with open(self.output, "w") as log:
            self.process = subprocess.Popen(
                [*words, "--mnist_file_path", str(digits), "--pt_path", str(folder), *flags],
                cwd=ROOT,
                env=os.environ | surroundings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def said(self) -> str:
        """What it has printed."""
        return self.output.read_text(errors="replace")

    def wait_for(self, words: str, timeout_seconds: float = _TIMEOUT_SECONDS) -> bool:
        """Waits until the run has printed `words`; False if it ended before."""
        deadline = time.monotonic() + timeout_seconds
        while words not in self.said():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"{words!r} was not printed within {timeout_seconds} s:\n{self.said()}")
            time.sleep(0.01)
        return True

    def ranks(self) -> list[psutil.Process]:
        """The training processes, in the order in which they were started."""
        own = [p for p in self.session() if any(word.endswith((self.script, "spawn_main")) for word in _words(p))]
        # A launcher names the script too, and a program that starts its own processes forks them.
        workers = [p for p in own if "\0RANK=" in _environment(p) or "spawn_main" in _words(p)]
        pids = {p.pid for p in own}
        return workers or [p for p in own if _parent(p) in pids] or own

    def end(self, timeout_seconds: float = _TIMEOUT_SECONDS) -> int:
        """Waits for the exit status, and for all processes to be gone."""
        try:
            return self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"did not end within {timeout_seconds} s:\n{self.said()}") from error
        finally:
            self.kill_all()

    def kill_all(self) -> None:
        """SIGKILL to every process of the session, as a power cut would."""
        for process in self.session():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()

    def session(self) -> list[psutil.Process]:
        """The living processes of this start, launcher and helpers included."""
        living = (p for p in psutil.process_iter(["status"]) if p.info["status"] != psutil.STATUS_ZOMBIE)
        # torchrun gives each worker a session of its own, so sessions do not tell.
        return [p for p in living if self.mark in _environment(p)]


def _environment(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _parent(process: psutil.Process) -> int:
    """Its pid; 0 where the process has ended meanwhile."""
    try:
        return process.ppid()
    except psutil.Error:
        return 0


def _words(process: psutil.Process) -> list[str]:
    """The command line, split at what separates names in it."""
    try:
        return " ".join(process.cmdline()).replace("(", " ").split()
    except psutil.Error:
        return []


def outcome(folder: Path) -> str:
    """A hash of the final weights, metrics.jsonl and result.json, without durations."""
    digest = hashlib.sha256((folder / "cnn" / "model.safetensors").read_bytes())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for values in [*lines, json.loads((folder / "result.json").read_text())]:
        kept = {k: v for k, v in values.items() if "seconds" not in k and "per_second" not in k and "share" not in k}
        digest.update(json.dumps(kept).encode())
    return digest.hexdigest()


def killed_run(launcher: str, digits: Path, folder: Path, choose: random.Random, kills: int, seconds: float) -> str:
    """A run that is killed `kills` times, at moments up to `seconds` after its start line, and then left alone."""
    for _ in range(kills):
        run = Run(launcher, digits, folder)
        if run.wait_for(START):
            time.sleep(choose.uniform(0, seconds / kills))  # each start has less left to do
            ranks = run.ranks()  # none where it has just ended
            victims: list[Callable[[], object]] = [run.kill_all, run.process.kill, *(rank.kill for rank in ranks)]
            choose.choice(victims)()
        run.end()
    run = Run(launcher, digits, folder)
    status = run.end()
    if status != 0:
        raise RuntimeError(f"the last start ended with status {status}:\n{run.said()}")
    return outcome(folder)


@contextmanager
def _trial(name: str, results: list[bool]) -> Iterator[list[str]]:
    """Counts what the block says of a trial; what it adds to the list is printed."""
    started = time.monotonic()
    remarks: list[str] = []
    try:
        yield remarks
        results.append(True)
        print("  ok    " + ", ".join([name, *remarks]) + f" ({time.monotonic() - started:.0f} s)", flush=True)
    except Exception as error:
        results.append(False)
        print(f"  LOST  {name}: {error}", flush=True)


def kill_trials(scratch: Path, digits: Path, launchers: list[str], quick: bool, results: list[bool]) -> None:
    """Runs killed at random moments equal the one that was left alone."""
    choose = random.Random(0)
    for launcher in launchers:
        untouched = scratch / f"untouched-{launcher}"
        run = Run(launcher, digits, untouched)
        run.wait_for(START)
        started = time.monotonic()
        if run.end() != 0:
            raise RuntimeError(run.said())
        seconds = time.monotonic() - started
        expected = outcome(untouched)
        for trial in range(1 if quick else 10):
            kills = 1 + trial % 3
            with _trial(f"{launcher}, killed {kills} times, trial {trial + 1}", results):
                got = killed_run(launcher, digits, scratch / f"killed-{launcher}-{trial}", choose, kills, seconds)
                assert got == expected, "weights, metrics or result differ from the run that was left alone"


def check_signal(
    launcher: str, target: str, number: signal.Signals, moment: str, digits: Path, folder: Path, go_on: bool = True
) -> float:
    """A stop signal saves and ends all processes in 5 s, with one step lost at most, and the next start goes on.

    Args:
        launcher: a key of LAUNCHERS.
        target: "launcher" or "last rank".
        number: SIGTERM or SIGINT.
        moment: a key of MOMENTS, or what the run has printed when the signal is sent.
        digits: the CSV to train on.
        folder: the run folder.
        go_on: whether to try the next start.

    Returns:
        Seconds from the signal until all processes were gone.

    Raises:
        AssertionError: it does not.
    """
    script, stay, words = folder.with_name(f"{folder.name}-train.py"), "", moment
    if moment in MOMENTS:
        function, call = MOMENTS[moment]
        stay = STAYS.format(function=function, call=call, moment=moment)
        words = f"{moment} is under way"
    script.write_text(TELLS.format(stay=stay))
    # No checkpoints but those of epochs: one in the middle of them is the stop's own.
    flags = ("--epochs", "1000", "--patience", "1000", "--checkpoint_every_steps", "0")
    run = Run(launcher, digits, folder, *flags, script=script)
    try:
        assert run.wait_for(START), run.said()
        victim = run.process if target == "launcher" else run.ranks()[-1]  # takes a while to find
        assert run.wait_for(words), run.said()
        victim.send_signal(number)
        started = time.monotonic()
        assert f"{moment} goes on" not in run.said(), f"the signal came too late for {moment}"
        while run.session():
            assert time.monotonic() - started < 5, f"still there after 5 s: {run.session()}\n{run.said()}"
            time.sleep(0.05)
        seconds = time.monotonic() - started
    finally:
        status = run.end()
    own = launcher in ("python", "self-started")  # other launchers turn every failure into 1
    assert status == (128 + number if own else status or 1), f"exit status {status}\n{run.said()}"
    assert "Traceback" not in run.said() or not own, run.said()
    assert json.loads((folder / "result.json").read_text())["status"] == "preempted"
    newest = max((folder / "checkpoints").iterdir())
    taken, saved = max(_steps(run)), json.loads((newest / "state.json").read_text())["step"]
    assert saved in (taken - 1, taken), f"{taken} steps taken, {saved} saved\n{run.said()}"
    epochs = len((folder / "metrics.jsonl").read_text().splitlines())
    if not go_on:
        return seconds
    script.write_text(TELLS.format(stay=""))
    again = Run(launcher, digits, folder, "--epochs", str(epochs + 2), "--patience", "1000", script=script)
    assert again.end() == 0, again.said()
    assert "resumed after" in again.said(), again.said()
    assert min(_steps(again)) == saved + 1, again.said()
    done = [json.loads(line)["epoch"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert done == list(range(1, epochs + 3))
    return seconds


def _steps(run: Run) -> list[int]:
    """The optimizer steps that a run of TELLS has taken, counted from 1 over all its starts."""
    return [int(step) for step in re.findall(r"took step (\d+)", run.said())]


def signal_trials(scratch: Path, digits: Path, launchers: list[str], quick: bool, results: list[bool]) -> None:
    """SIGTERM to the launcher and to one rank at each moment, SIGINT in training; the first of them are resumed."""
    for launcher in launchers:
        for target in ("launcher", "last rank")[: 1 if launcher == "python" else 2]:  # python is its only rank
            first = target == "launcher"
            trials = [(signal.SIGTERM, START)] if first else []
            trials += [*((signal.SIGTERM, moment) for moment in MOMENTS), (signal.SIGINT, "training")]
            if quick:
                trials = trials[-1:] if first else []
            for number, moment in trials:
                when = f"in {moment}" if moment in MOMENTS else "after the start line"
                with _trial(f"{launcher}, {number.name} to {target} {when}", results) as remarks:
                    folder = scratch / f"signal-{len(results)}"
                    seconds = check_signal(launcher, target, number, moment, digits, folder, go_on=first)
                    remarks.append(f"gone after {seconds:.1f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one trial of each kind")
    parser.add_argument("--json", default="benchmark_faults.json", help="where to write the figures")
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS), help="only these")
    args = parser.parse_args()
    quick = args.quick
    results: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        digits = write_digits(scratch / "digits.csv", 1000)
        print("killed with SIGKILL at random moments, started again until done:")
        launchers = ("python",) if quick else ("python", "torchrun")
        kill_trials(scratch, digits, [name for name in launchers if name in args.launchers], quick, results)
        print("stopped with a signal, started again:")
        signal_trials(scratch, digits, ["self-started"] if quick else args.launchers, quick, results)
    print(f"survived {sum(results)} of {len(results)}")
    Path(args.json).write_text(json.dumps({"survived": sum(results), "of": len(results)}))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
