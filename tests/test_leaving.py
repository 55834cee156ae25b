"""However a run ends, all of its processes leave together, and the reason is told once.

python -m pytest tests/test_leaving.py
"""

import re
from pathlib import Path

import pytest
from launching import ROOT, Ended, run

pytestmark = pytest.mark.timeout(240)

WITHIN_SECONDS = 10
TORCHRUN = "torchrun --standalone --nproc_per_node 3"
ACCELERATE = "accelerate launch --multi_gpu --num_processes 3"
SELF_STARTED = "python"

# train_accel.py with a function of the loop that fails on one rank. Processes that are spawned import it too.
FAULT = """
import os, signal, sys, time

import train_accel
from mnist_ddp.errors import exit_with_one_line
from mnist_ddp.training import loop

sound, calls = loop.{function}, 0


def faulty(*args, **kwargs):
    global calls
    calls += 1
    if os.environ["RANK"] == "{rank}" and calls == {call}:
        print(f"fault at {{time.time()}}", file=sys.stderr, flush=True)
        {fault}
    return sound(*args, **kwargs)


loop.{function} = faulty
if __name__ == "__main__":
    with exit_with_one_line():
        sys.exit(train_accel.main())
"""

# train_accel.py that trains until rank 0 alone has wanted to stop, goes on until rank 1 alone has, and so forth.
STOP = """
import sys

import train_accel
from mnist_ddp.errors import exit_with_one_line
from mnist_ddp.training import loop
from mnist_ddp.training.early_stopping import EarlyStopping

fit = loop.fit


class OneRankStops(EarlyStopping):
    def __init__(self, mine):
        super().__init__("accuracy", patience=1000)
        self.mine, self.updates = mine, 0

    def update(self, accuracy, loss):
        self.updates += 1
        return super().update(accuracy, loss)

    @property
    def should_stop(self):
        return self.mine and self.updates == 2


def fit_once_for_each_rank(accelerator, state, *args, **kwargs):
    for rank in range(accelerator.num_processes):
        state.status, state.stopper = None, OneRankStops(rank == accelerator.process_index)
        yield from fit(accelerator, state, *args, **kwargs)
        sys.stderr.write(f"rank {accelerator.process_index} left after epoch {state.epoch}: {state.status}\\n")


loop.fit = fit_once_for_each_rank
if __name__ == "__main__":
    with exit_with_one_line():
        sys.exit(train_accel.main())
"""


# train_accel.py that tells, as the process group closes, how many models of DDP there are still and have been.
CLOSES = """
import sys
import weakref

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import train_accel

init, destroy, models = DistributedDataParallel.__init__, dist.destroy_process_group, []


def init_and_remember(self, *args, **kwargs):
    models.append(weakref.ref(self))
    init(self, *args, **kwargs)


def tell_and_destroy(*args, **kwargs):
    left = sum(model() is not None for model in models)
    sys.stderr.write(f"{left} of {len(models)} left\\n")
    destroy(*args, **kwargs)


DistributedDataParallel.__init__ = init_and_remember
dist.destroy_process_group = tell_and_destroy
if __name__ == "__main__":
    sys.exit(train_accel.main())
"""


def run_three(launcher: str, script: str, small_csv: Path, tmp_path: Path, *, epochs: int = 50) -> Ended:
    path = tmp_path / "train.py"
    path.write_text(script)
    own = " --num_processes 3" if launcher == SELF_STARTED else ""
    flags = f"--mnist_file_path {small_csv} --batch_size 20 --width 4 --epochs {epochs} --log_with none"
    flags += " --timeout_seconds 60"
    return run(f"{launcher} {path} {flags}{own}", tmp_path / "run", PYTHONPATH=str(ROOT))


def seconds_since_fault(ended: Ended) -> float:
    moments = re.findall(r"^fault at (.*)$", ended.stderr, re.M)
    assert len(moments) == 1, ended
    return ended.end_time - float(moments[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "function", "rank"),
    [
        (SELF_STARTED, "train_step", 0),
        (SELF_STARTED, "evaluate", 1),
        (TORCHRUN, "train_step", 2),
        (ACCELERATE, "evaluate", 0),
    ],
)
def test_an_exception_on_one_rank_ends_all(
    launcher: str, function: str, rank: int, small_csv: Path, tmp_path: Path
) -> None:
    script = FAULT.format(function=function, rank=rank, call=2, fault='raise RuntimeError("injected")')
    ended = run_three(launcher, script, small_csv, tmp_path)
    assert seconds_since_fault(ended) < WITHIN_SECONDS
    assert ended.status == 1, ended
    assert ended.stderr.count("RuntimeError: injected") == 1, ended
    assert ended.stderr.count("in faulty\n") == 1, ended
    # Its traceback, and the launcher's own report where there is one; none of the ranks that lost it.
    assert ended.stderr.count("Traceback (most recent call last)") == (1 if launcher == SELF_STARTED else 2), ended
    assert "error: " not in ended.stderr, ended
    assert ended.result is None


@pytest.mark.slow
def test_a_killed_rank_ends_all(small_csv: Path, tmp_path: Path) -> None:
    fault = "os.kill(os.getpid(), signal.SIGKILL)"
    script = FAULT.format(function="train_step", rank=0, call=7, fault=fault)
    ended = run_three(SELF_STARTED, script, small_csv, tmp_path)
    assert seconds_since_fault(ended) < WITHIN_SECONDS
    assert ended.status == 1, ended
    assert re.search(r"^error: process 0 was ended by SIGKILL; ", ended.stderr, re.M), ended
    assert "train_accel.py" not in ended.stderr, ended  # no traceback of the ranks that lost it
    assert ended.result is None


@pytest.mark.slow
def test_all_leave_in_the_epoch_in_which_any_one_rank_wants_to_stop(small_csv: Path, tmp_path: Path) -> None:
    ended = run_three(TORCHRUN, STOP, small_csv, tmp_path)
    assert ended.status == 0, ended
    left = re.findall(r"^rank (\d) left after epoch (\d+): (\w+)$", ended.stderr, re.M)
    expected = [(str(rank), str(epoch), "early_stopped") for rank in range(3) for epoch in (2, 4, 6)]
    assert sorted(left) == expected, ended
    assert [line["epoch"] for line in ended.metrics] == [1, 2, 3, 4, 5, 6]
    assert ended.result is not None
    assert (ended.result["status"], ended.result["epochs"]) == ("early_stopped", 6)


@pytest.mark.slow
def test_the_group_outlives_the_model(small_csv: Path, tmp_path: Path) -> None:
    """Else the exit may hang, see `distributed._run`."""
    ended = run_three(TORCHRUN, CLOSES, small_csv, tmp_path, epochs=2)
    assert ended.status == 0, ended
    assert re.findall(r"^(\d) of (\d) left$", ended.stderr, re.M) == [("0", "1")] * 3, ended


def test_a_process_left_behind_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match=r"left behind .*sleep 60"):
        run("sh -c 'setsid sleep 60 & exit 0'")


def test_a_command_that_does_not_end_is_killed() -> None:
    with pytest.raises(AssertionError, match=r"did not end within 0\.5 s"):
        run("sh -c 'setsid sleep 60 & sleep 60'", timeout_seconds=0.5)
