"""Wall time from command to exit until 99.0% on the 10,000 MNIST test digits, against the classic MNIST example.

    python -m benchmarks.time_to_accuracy mnist_train.csv.gz            # 5 seeds; the classic takes minutes for each
    python -m benchmarks.time_to_accuracy mnist_train.csv.gz --classic_seeds 1
    python -m benchmarks.time_to_accuracy --quick    # a smoke test: both learn 9,000 test digits by heart, up to 80%

As in the field's time-to-accuracy benchmarks, both sides look at the test digits after each epoch and stop when they
reach the target. The classic is the network and recipe of the best-known MNIST example: two 3x3 convolutions of 32 and
64 channels, dropout, 128 hidden units, Adadelta with lr 1.0 that is multiplied by 0.7 after each epoch, batches of 64.
"""

import argparse
import gzip
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mnist_ddp.words import counted

ROOT = Path(__file__).resolve().parents[1]
TEST = ROOT / "data" / "mnist_test.csv.gz"
TARGET = 0.99


def run_classic(train_file: str, seed: int, target: float) -> None:
    """Trains the classic until it reaches the target; runs in a process of its own."""
    import pandas as pd
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    def read(path: str | Path) -> TensorDataset:
        table = torch.tensor(pd.read_csv(path, header=None, dtype="uint8").to_numpy())
        images = (table[:, 1:].reshape(-1, 1, 28, 28).float() / 255 - 0.1307) / 0.3081
        return TensorDataset(images, table[:, 0].long())

    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    train_loader = DataLoader(read(train_file), batch_size=64, shuffle=True)
    test_loader = DataLoader(read(TEST), batch_size=1000)
    accuracy = 0.0
    while accuracy < target:
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in test_loader)
        accuracy = right / 10_000
        print(f"{accuracy:.4f}", flush=True)


def run_ours(train_file: str, seed: int, processes: int, target: float, folder: str) -> bool:
    """Trains with the fast recipe; whether it reached the target."""
    recipe = ["--config", str(ROOT / "recipes" / "fast.yaml"), "--target_accuracy", str(target), "--log_with", "none"]
    files = ["--mnist_file_path", train_file, "--val_file_path", str(TEST), "--test_file_path", str(TEST)]
    where = ["--pt_path", folder, "--num_processes", str(processes), "--seed", str(seed)]
    where += ["--batch_size", str(96 // processes)]  # the same global batch
    command = [sys.executable, str(ROOT / "train_accel.py"), *recipe, *files, *where]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    return json.loads((Path(folder) / "result.json").read_text())["status"] == "target_reached"


def most_of_the_test_digits(folder: Path) -> str:
    """A file of 9,000 of them: all would be refused as training images."""
    with gzip.open(TEST, "rt") as digits:
        rows = list(digits)
    path = folder / "digits.csv"
    path.write_text("".join(rows[:9000]))
    return str(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "train_file",
        nargs="?",
        default="mnist_train.csv.gz",
        help="the 60,000 training digits as CSV; not part of the project",
    )
    parser.add_argument("--quick", action="store_true", help="one seed, the embedded digits and a low target")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--classic_seeds", type=int, default=5)
    parser.add_argument("--classic", type=int, help=argparse.SUPPRESS)  # runs the classic with this seed
    parser.add_argument("--json", default="benchmark_time_to_accuracy.json")
    args = parser.parse_args()
    target = TARGET
    if args.quick:
        target, args.seeds, args.classic_seeds = 0.8, 1, 1
        if args.classic is None:
            scratch = tempfile.TemporaryDirectory()  # is removed at exit
            args.train_file = most_of_the_test_digits(Path(scratch.name))
    if args.classic is not None:
        run_classic(args.train_file, args.classic, target)
        return 0
    if not Path(args.train_file).is_file():
        print(f"skipped: {args.train_file} is not here; it holds the 60,000 training digits")
        return 0

    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: list[str] | None, seed: int, processes: int = 1) -> None:
        start, reached = time.perf_counter(), True
        if work is not None:
            subprocess.run(work, check=True, stdout=subprocess.DEVNULL, timeout=3600, cwd=ROOT)
        else:
            with tempfile.TemporaryDirectory() as folder:
                reached = run_ours(args.train_file, seed, processes, target, folder)
        seconds.setdefault(name, []).append(time.perf_counter() - start if reached else math.inf)
        print(f"{name}, seed {seed}: {seconds[name][-1]:.1f} s", flush=True)

    for seed in range(1, max(args.seeds, args.classic_seeds) + 1):
        for processes in (1, 2):
            if seed <= args.seeds:
                timed(f"ours, {counted(processes, 'process')}", None, seed, processes)
        if seed <= args.classic_seeds:
            script = [sys.executable, "-m", "benchmarks.time_to_accuracy", os.path.abspath(args.train_file)]
            timed("classic", [*script, "--classic", str(seed), *(["--quick"] if args.quick else [])], seed)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print("medians: " + ", ".join(f"{name} {value:.1f} s" for name, value in medians.items()))
    if "classic" in medians:
        best = min(value for name, value in medians.items() if name != "classic")
        print(f"classic / ours: {medians['classic'] / best:.1f}")
    known = {name: [value if math.isfinite(value) else None for value in values] for name, values in seconds.items()}
    Path(args.json).write_text(json.dumps({"seconds": known}, indent=2))  # null: the target was not reached
    return 0


if __name__ == "__main__":
    sys.exit(main())
