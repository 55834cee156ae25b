"""A few steps of each process, as a trace and a table.

python -m pytest tests/training/test_profiling.py
"""

import json
from pathlib import Path

import torch
from accelerate import Accelerator
from runs import begin, made_up_splits

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


def test_a_run_too_short_to_profile_says_nothing(accelerator: Accelerator, tmp_path: Path) -> None:
    with profile_steps(accelerator, tmp_path / "profile") as after_step:
        torch.zeros(1)
        after_step()
    assert not (tmp_path / "profile").exists()
