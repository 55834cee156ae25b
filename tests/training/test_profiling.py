"""A few steps of each process, as a trace and a table.

python -m pytest tests/training/test_profiling.py
"""

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from runs import begin, made_up_splits

from mnist_ddp.errors import UserError
from mnist_ddp.settings import Settings
from mnist_ddp.training.loop import train_step
from mnist_ddp.training.profiling import profile_steps


def test_trace_and_table_hold_the_steps(accelerator: Accelerator, tmp_path: Path) -> None:
    s = Settings(batch_size=8, width=4)
    state, train_loader, _ = begin(accelerator, made_up_splits(64), s)
    steps = 0
    with profile_steps(accelerator, tmp_path / "profile") as after_step:
        while steps < 16:
            for batch in train_loader:
                train_step(accelerator, state, batch, label_smoothing=0.0, max_grad_norm=0.0)
                after_step()
                steps += 1
    events = json.loads((tmp_path / "profile" / "trace-0.json").read_text())["traceEvents"]
    assert len([event for event in events if event.get("name") == "Optimizer.step#AdamW.step"]) == 8
    table = (tmp_path / "profile" / "steps-0.txt").read_text()
    assert table.startswith("8 training steps of process 0\n")
    assert "aten::mkldnn_convolution" in table or "aten::convolution" in table


def profile_some(accelerator: Accelerator, folder: Path, steps: int) -> None:
    with profile_steps(accelerator, folder) as after_step:
        for _ in range(steps):
            torch.zeros(1)
            after_step()


def test_a_run_too_short_to_profile_says_so(
    accelerator: Accelerator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_some(accelerator, tmp_path / "profile", 5)
    assert not (tmp_path / "profile").exists()
    assert capsys.readouterr().out == "note: the run was too short for --profile, which skips 5 steps and takes 8\n"


@pytest.mark.parametrize(("room", "reason"), [(0, "No space left on device"), (8192, "no room for the trace")])
def test_a_full_disk_is_one_line(accelerator: Accelerator, small_disk: Path, room: int, reason: str) -> None:
    (small_disk / "large").write_bytes(bytes(65536 - room))
    with pytest.raises(UserError, match=rf"^cannot write .*/profile: {reason}"):
        profile_some(accelerator, small_disk / "profile", 20)
    assert not list(small_disk.glob("profile/*trace*"))


@pytest.mark.parametrize(("steps", "taken"), [(8, 3), (13, 8), (20, 8)])
def test_the_table_says_how_many_steps_it_is_of(
    accelerator: Accelerator, tmp_path: Path, steps: int, taken: int
) -> None:
    profile_some(accelerator, tmp_path, steps)
    assert (tmp_path / "steps-0.txt").read_text().startswith(f"{taken} training steps of process 0\n")
