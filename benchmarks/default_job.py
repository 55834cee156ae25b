"""The first command of the README with several seeds: test accuracy, and wall time from the command to its exit.

    python -m benchmarks.default_job              # seeds 1 to 5
    python -m benchmarks.default_job --seeds 10
    python -m benchmarks.default_job --quick    # a smoke test: one seed, one epoch

Flags after -- go to train_accel.py, for example: -- --config recipes/original.yaml
"""

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch")
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 1 on")
    parser.add_argument("--json", default="benchmark_default_job.json", help="where to write the figures")
    parser.add_argument("flags", nargs="*", help="of train_accel.py")
    args = parser.parse_args()
    launcher = [f"{sysconfig.get_path('scripts')}/accelerate", "launch", "--config_file", "accelerate_config.yaml"]
    runs = []
    for seed in range(1, (1 if args.quick else args.seeds) + 1):
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--seed", str(seed), "--pt_path", folder, *args.flags, *(["--epochs", "1"] if args.quick else [])]
            started = time.perf_counter()
            subprocess.run(
                [*launcher, "train_accel.py", *flags], check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=1200
            )
            seconds = time.perf_counter() - started
            result = json.loads((Path(folder) / "result.json").read_text())
        runs.append({"seed": seed, "seconds": seconds, **result})
        print(
            f"seed {seed}: {result['status']} after {result['epochs']} epochs, validation "
            f"{result['best_val_accuracy']:.4f}, test {result['test_accuracy']:.4f}, {seconds:.1f} s",
            flush=True,
        )
    accuracies, times = [run["test_accuracy"] for run in runs], [run["seconds"] for run in runs]
    print(
        f"mean test accuracy {statistics.mean(accuracies):.4f} (lowest {min(accuracies):.4f}); seconds: mean "
        f"{statistics.mean(times):.1f}, most {max(times):.1f}"
    )
    Path(args.json).write_text(json.dumps(runs, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
