"""Smoke tests of benchmarks: they run to their end and measure everything. What they measure is not judged here.

python -m pytest tests/test_benchmarks.py
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT


def figures_of(benchmark: str, folder: Path, *flags: str) -> dict[str, Any]:
    output = folder / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--quick", "--json", str(output), *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert output.exists(), ended.stderr  # the last thing that they do; 1 is the status of a bound that was missed
    assert ended.returncode in (0, 1)
    figures: dict[str, Any] = json.loads(output.read_text())
    return figures


@pytest.mark.slow
def test_training_measures_ours_the_limit_and_all_peers(tmp_path: Path) -> None:
    figures = figures_of("training", tmp_path, "--processes", "2")["2"]
    peers = ["plain DDP", "plain Accelerate", "Lightning Fabric"]
    alike = [f"{peer}, our precision, format" for peer in peers]
    assert {*figures["ours_over"]} == {"ours", "bare loop, one process", "ours, plain BatchNorm", *peers, *alike}
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in figures["ours_over"].values())
    assert all(0 < share < 1 for share in [figures["data_wait_share"], *figures["collective_shares"].values()])


@pytest.mark.slow
def test_data_measures_reading_parsing_and_memory(tmp_path: Path) -> None:
    figures = figures_of("data", tmp_path)
    assert {"speed", "parsing", "training"} <= {*figures}
