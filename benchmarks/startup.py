"""Seconds from the command to the end of the first training step, against what no such program can avoid.

    python -m benchmarks.startup
    python -m benchmarks.startup --quick    # a smoke test

The floor imports torch and accelerate and forms the process group, under the same launcher, and ends. Both sides take
turns; prints the medians and the median of the rounds' ratios, and writes them to a JSON file.
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

ROOT = Path(__file__).resolve().parents[1]
# Each tells when it got there in one write: two processes share the pipe.
FLOOR = r"""
import os
import time
import torch
import accelerate
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
os.write(1, f"reached at {time.time()}\n".encode())
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


def seconds(script: str, processes: int, *flags: str) -> float:
    """From the start of the launcher until the last process got there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(script)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        started = time.time()
        ended = subprocess.run(
            [*launcher, str(path), *flags],
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
    parser.add_argument("--quick", action="store_true", help="one round, with two processes")
    parser.add_argument("--json", default="benchmark_startup.json", help="where to write the figures")
    args = parser.parse_args()
    figures = {}
    for processes in (2,) if args.quick else (1, 2):
        ours, floor = [], []
        for round_ in range(1 if args.quick else 6):
            with tempfile.TemporaryDirectory() as folder:
                flags = ["--pt_path", folder, "--epochs", "1", "--log_with", "none"]
                pair = seconds(OURS, processes, *flags), seconds(FLOOR, processes)
            if round_ > 0 or args.quick:  # the first fills the cache of parsed files, and the kernel's of all else
                ours.append(pair[0])
                floor.append(pair[1])
        ratio = statistics.median(a / b for a, b in zip(ours, floor, strict=True))
        figures[str(processes)] = {"ours": ours, "floor": floor, "ratio": ratio}
        print(
            f"{processes} process{'es' * (processes > 1)}: first step after {statistics.median(ours):.1f} s, imports "
            f"and process group alone {statistics.median(floor):.1f} s; ratio {ratio:.2f}"
        )
    Path(args.json).write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
