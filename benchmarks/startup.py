"""Seconds from the command to the end of the first training step, against what no such program can avoid.

    python -m benchmarks.startup
    python -m benchmarks.startup --quick    # a smoke test

The floor imports torch and accelerate and forms the process group, started in the same way, and ends: by torchrun, or
by processes of its own, forked where ours are. Both sides take turns; prints the medians and the median of the rounds'
ratios, and writes them to a JSON file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from mnist_ddp.distributed import start_method

ROOT = Path(__file__).resolve().parents[1]
# Each tells when it got there in one write: two processes share the pipe.
FLOOR = r"""
import os
import sys
import time
import torch
import accelerate
import torch.distributed as dist
import torch.multiprocessing as mp

def reach(rank, processes):
    own = {"init_method": f"file://{__file__}.store", "rank": rank, "world_size": processes}
    dist.init_process_group("gloo", **(own if processes else {}))
    dist.barrier()
    os.write(1, f"reached at {time.time()}\n".encode())

if __name__ == "__main__":
    if sys.argv[1:]:
        mp.start_processes(reach, (int(sys.argv[2]),), nprocs=int(sys.argv[2]), start_method=sys.argv[3])
    else:
        reach(0, 0)
"""
OURS = r"""
import os, sys, time
import train_accel
train_step = None

def first_step(*args, **kwargs):
    result = train_step(*args, **kwargs)
    os.write(1, f"reached at {time.time()}\n".encode())
    return result

def train(settings):
    global train_step
    from mnist_ddp.training import loop
    if train_step is None:
        train_step, loop.train_step = loop.train_step, first_step
    return run(settings)

if __name__ == "__main__":
    run, train_accel.train = train_accel.train, train
    sys.exit(train_accel.main())
"""


def seconds(script: str, launcher: str, processes: int, *flags: str) -> float:
    """From the command until the last process got there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(script)
        command = [sys.executable, str(path), "--num_processes", str(processes)]
        if launcher == "torchrun":
            run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
            command = [*run, str(path)]
        started = time.time()
        ended = subprocess.run(
            [*command, *flags],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    reached = [float(line.split()[-1]) for line in ended.stdout.splitlines() if line.startswith("reached at")]
    first = sorted(reached)[:processes]
    assert len(first) == processes, ended.stdout + ended.stderr
    return first[-1] - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, of two processes that start themselves")
    parser.add_argument("--json", default="benchmark_startup.json", help="where to write the figures")
    args = parser.parse_args()
    figures = {}
    ways = [("torchrun", 1), ("torchrun", 2), ("self-started", 2)]
    for launcher, processes in ways[2:] if args.quick else ways:
        ours, floor = [], []
        own = launcher == "self-started"
        method = [start_method(sys.platform, gpu=torch.accelerator.is_available())] if own else []
        for round_ in range(1 if args.quick else 6):
            with tempfile.TemporaryDirectory() as folder:
                flags = ["--pt_path", folder, "--epochs", "1", "--log_with", "none"]
                pair = seconds(OURS, launcher, processes, *flags), seconds(FLOOR, launcher, processes, *method)
            if round_ > 0 or args.quick:  # the first fills the cache of parsed files, and the kernel's of all else
                ours.append(pair[0])
                floor.append(pair[1])
        ratio = statistics.median(a / b for a, b in zip(ours, floor, strict=True))
        figures[f"{launcher} {processes}"] = {"ours": ours, "floor": floor, "ratio": ratio}
        print(
            f"{launcher}, {processes} process{'es' * (processes > 1)}: first step after {statistics.median(ours):.1f} "
            f"s, imports and process group alone {statistics.median(floor):.1f} s; ratio {ratio:.2f}",
            flush=True,
        )
    Path(args.json).write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
