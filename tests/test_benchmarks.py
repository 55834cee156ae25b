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

from mnist_ddp.model.convnet import ConvNet


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


@pytest.mark.slow
def test_startup_measures_ours_and_the_floor(tmp_path: Path) -> None:
    figures = figures_of("startup", tmp_path)["self-started 2"]
    assert figures["ours"][0] > 0 < figures["floor"][0]
    assert figures["ratio"] == pytest.approx(figures["ours"][0] / figures["floor"][0])


@pytest.mark.slow
def test_overhead_measures_saving_and_agreement(tmp_path: Path) -> None:
    figures = figures_of("overhead", tmp_path)
    assert {"checkpoint", "best model", "agreement"} <= {*figures["costs"]}
    assert all(0 < share < 1 for share in figures["shares"].values())


@pytest.mark.slow
def test_default_job_measures_accuracy_and_time(tmp_path: Path) -> None:
    (run,) = figures_of("default_job", tmp_path)
    assert (run["seed"], run["epochs"]) == (1, 1)
    assert run["test_accuracy"] > 0.5
    assert run["seconds"] > 0


@pytest.mark.slow
def test_time_to_accuracy_measures_both_process_counts_and_the_classic(tmp_path: Path) -> None:
    seconds = figures_of("time_to_accuracy", tmp_path)["seconds"]
    assert {*seconds} == {"ours, 1 process", "ours, 2 processes", "classic"}
    assert all(len(values) == 1 and values[0] is not None for values in seconds.values()), seconds


@pytest.mark.slow
def test_predict_measures_prediction_and_evaluation(tmp_path: Path) -> None:
    ConvNet("0123456789", (28, 28), width=2, mean=0.13, std=0.31).save_pretrained(tmp_path / "cnn")
    figures = figures_of("predict", tmp_path, str(tmp_path))
    assert figures["images"] == 10_000
    assert figures["ratios"] == pytest.approx([figures["prediction"][0] / figures["evaluation"][0]])


@pytest.mark.slow
def test_prediction_measures_the_efficiency_that_it_predicts(tmp_path: Path) -> None:
    (figures,) = figures_of("prediction", tmp_path)
    assert figures["processes"] == 2
    assert 0 < figures["measured"] < 2
    assert 0 < figures["predicted"] <= 1


@pytest.mark.slow
def test_faults_kills_and_stops_runs(tmp_path: Path) -> None:
    assert figures_of("faults", tmp_path) == {"survived": 2, "of": 2}
