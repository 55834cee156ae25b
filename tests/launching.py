"""Runs a command as a user would, and sees to it that nothing of it is left behind."""

import atexit
import functools
import json
import os
import shlex
import subprocess
import sysconfig
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import warm

ROOT = Path(__file__).resolve().parents[1]
# Every process of a command inherits this variable. Process groups would not do: torchrun starts a new one for each
# worker.
_MARK = "MNIST_DDP_TEST_COMMAND"
# How long helpers, such as multiprocessing's resource tracker, may outlive the command.
_LINGER_SECONDS = 3.0


@dataclass(frozen=True)
class Ended:
    """A command that has ended.

    Attributes:
        status: exit status; negative where a signal ended it.
        stdout, stderr: of all its processes.
        end_time: seconds since the epoch.
        result: content of result.json in the run folder; None where there is none.
        metrics: the lines of metrics.jsonl in the run folder.
    """

    status: int
    stdout: str
    stderr: str
    end_time: float
    result: dict[str, Any] | None
    metrics: list[dict[str, Any]]

    def __str__(self) -> str:
        return f"exit status {self.status}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


@functools.cache
def warm_programs() -> str:
    """A folder with `python`, `torchrun` and `accelerate` that start at once, see warm.py, until the tests end."""
    folder = tempfile.TemporaryDirectory()
    server = warm.start(folder.name)

    def end() -> None:
        with server:
            server.kill()
        folder.cleanup()

    atexit.register(end)
    return folder.name


def run(
    command: str,
    folder: Path | None = None,
    *,
    timeout_seconds: float = 100.0,
    fresh: bool = False,
    **environment: str,
) -> Ended:
    """Runs `command` from the root of the repository, without GPUs, and waits for it.

    Args:
        command: split as a shell would; programs are those of the Python that runs the tests.
        folder: given to the command as --pt_path.
        timeout_seconds: after which all processes of the command are killed.
        fresh: whether its processes are interpreters of their own, as a user's, and not forked by `warm_programs`. So
            they are where the environment has settings of the Hub, which its library reads as it is imported.
        environment: beside PATH, HOME and the like, all that the command sees: what surrounds the tests cannot change
        them.

    Raises:
        AssertionError: the command did not end in time, or a process of it was left behind. It has been killed.
    """
    words = shlex.split(command) + (["--pt_path", str(folder)] if folder else [])
    fresh = fresh or any(name.startswith("HF_") for name in environment)
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as scratch:
        surroundings = {name: os.environ[name] for name in ("LANG", "LD_LIBRARY_PATH") if name in os.environ} | {
            "PATH": os.pathsep.join(
                [*([] if fresh else [warm_programs()]), sysconfig.get_path("scripts"), os.environ["PATH"]]
            ),
            "HOME": scratch,
            "TMPDIR": scratch,
            "CUDA_VISIBLE_DEVICES": "",
            _MARK: mark,
        }
        # Files, not pipes: a process left behind would hold a pipe open, and the wait for its end would hide it.
        outputs = [Path(scratch, name) for name in ("stdout", "stderr")]
        with open(outputs[0], "w") as stdout, open(outputs[1], "w") as stderr:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=surroundings | environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            status: int | None = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_time = time.time()
            left = _end_all(mark, 0 if process.poll() is None else _LINGER_SECONDS)
            process.wait()
        said = [path.read_text(errors="replace") for path in outputs]
    ended = Ended(status if status is not None else process.returncode, *said, end_time, *_read_folder(folder))
    assert status is not None, f"{command}: did not end within {timeout_seconds} s\n{ended}"
    assert not left, f"{command}: left behind {left}\n{ended}"
    return ended


def _end_all(mark: str, linger_seconds: float) -> list[str]:
    """Kills the processes that bear the mark after `linger_seconds`; their command lines."""
    deadline = time.monotonic() + linger_seconds
    left = _marked(mark)
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = _marked(mark)
    described = []
    for process in left:
        try:
            described.append(shlex.join(process.cmdline()))
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return described


def _marked(mark: str) -> list[psutil.Process]:
    everyone = psutil.process_iter(["environ"])  # that of a process which has ended, or of another user, is empty
    return [process for process in everyone if (process.info["environ"] or {}).get(_MARK) == mark]


def _read_folder(folder: Path | None) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    if folder is None:
        return None, []
    result, metrics = folder / "result.json", folder / "metrics.jsonl"
    return (
        json.loads(result.read_text()) if result.is_file() else None,
        [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else [],
    )
