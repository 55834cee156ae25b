"""The recipes in launch/ are what their readers take them for.

python -m pytest tests/cluster/test_launch_files.py
"""

import json
import os
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from launching import ROOT, Ended, run, warm_programs

LAUNCH = ROOT / "launch"
pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("name", "kind", "processes", "machines"),
    [
        ("cpu", "MULTI_GPU", 2, 1),
        ("one_gpu", "NO", 1, 1),
        ("multi_gpu", "MULTI_GPU", 8, 1),
        ("multi_node", "MULTI_GPU", 16, 2),
    ],
)
def test_accelerate_loads_the_config(name: str, kind: str, processes: int, machines: int) -> None:
    config = load_config_from_file(str(LAUNCH / "accelerate" / f"{name}.yaml"))  # raises at an unknown key
    assert (config.distributed_type, config.num_processes, config.num_machines) == (kind, processes, machines)
    assert config.use_cpu is False
    assert config.rdzv_backend == "static"


def test_the_configs_differ_where_they_must() -> None:
    """All have the same keys, so that one can be compared with another; only that of several machines has two more."""
    keys = {path.stem: set(yaml.safe_load(path.read_text())) for path in (LAUNCH / "accelerate").iterdir()}
    assert set(keys) == {"cpu", "one_gpu", "multi_gpu", "multi_node"}
    assert keys["cpu"] == keys["one_gpu"] == keys["multi_gpu"]
    assert keys["multi_node"] - keys["cpu"] == {"main_process_ip", "main_process_port"}


@pytest.mark.parametrize("script", ["launch/slurm.sbatch", ".ci/run"])
def test_shellcheck_has_nothing_to_say(script: str) -> None:
    ended = run(f"shellcheck {script}")
    assert ended.status == 0, ended


def test_the_trainjob_is_one() -> None:
    job = yaml.safe_load((LAUNCH / "trainjob.yaml").read_text())
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # unknown fields would be missing
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    command = job["spec"]["trainer"]["command"]
    assert not [word for word in command if word.startswith(("--nnodes", "--nproc", "--node", "--master", "--rdzv"))]
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert command[-1].startswith(container["volumeMounts"][0]["mountPath"])


# ---- SLURM, with stand-ins for its commands


def stand_in(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.slow
def test_the_batch_script_asks_for_another_turn_after_a_time_limit(small_csv: Path, tmp_path: Path) -> None:
    """One node of two processes. TERM comes to the job's step, as with --signal; the second turn ends by itself."""
    stand_in(tmp_path, "srun", 'shift; echo $$ > "$STEP"; exec "$@"')
    stand_in(tmp_path, "scontrol", '[ "$1" = show ] && echo localhost && exit; echo "$@" >> "$CALLS"')
    folder, step, calls = tmp_path / "run", tmp_path / "step", tmp_path / "calls"
    script = tmp_path / "slurm.sbatch"
    text = (LAUNCH / "slurm.sbatch").read_text()
    # Names and numbers only, as a user would.
    text = text.replace("folder=runs/mnist ", f"folder={folder} ").replace(":29500", ":0")
    script.write_text(
        text.replace(
            "train_accel.py ",
            f"train_accel.py --mnist_file_path {small_csv} --width 4 --batch_size 20 --log_with none "
            '--patience 100000 --epochs "$EPOCHS" ',
        )
    )
    environment = {
        "PATH": os.pathsep.join([str(tmp_path), warm_programs(), os.environ["PATH"]]),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1]",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "STEP": str(step),
        "CALLS": str(calls),
    }

    def turn(epochs: int) -> Ended:
        return run(f"bash {script}", **environment, EPOCHS=str(epochs))  # type: ignore[arg-type]

    def epochs_done() -> int:
        metrics = folder / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(turn, 100_000)
        deadline = time.monotonic() + 90
        while epochs_done() < 2:
            assert not first.done(), str(first.result())
            assert time.monotonic() < deadline
            time.sleep(0.05)
        psutil.Process(int(step.read_text())).send_signal(signal.SIGTERM)
        stopped = first.result()
    assert calls.read_text() == "requeue 7\n", stopped
    assert json.loads((folder / "result.json").read_text())["status"] == "preempted"
    done = epochs_done()
    ended = turn(done + 1)
    assert ended.status == 0, ended
    assert "resumed after" in ended.stdout
    assert f"ran all epochs after {done + 1} epochs" in ended.stdout
    assert calls.read_text() == "requeue 7\n"  # not again
