"""How well the check predicts the efficiency of 2, 3 and 4 processes.

    python -m benchmarks.prediction            # some two minutes on two cores
    python -m benchmarks.prediction --quick    # a smoke test: two processes

Runs `python -m mnist_ddp.check` with each number of processes. Prints, for each, the efficiency that was measured:
the share of a training step that is left when the processes exchange nothing. Beside it stand the one predicted from
latency and bandwidth as measured with that number of processes, and the one predicted from those of two processes
alone, which is how a check on two machines predicts many. Writes the figures to a JSON file.

More processes than cores take turns: one that waits for the others' turns counts as inefficient, and the model, in
which each process has a core of its own, knows nothing of it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mnist_ddp.check.network import Link, Traffic

ROOT = Path(__file__).resolve().parents[1]


def check(processes: int, scratch: Path) -> dict[str, dict[str, Any]]:
    """Figures of the check's rows, by the rows' names."""
    report = scratch / f"{processes}.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "mnist_ddp.check", "--num_processes", str(processes)),
            *("--json", str(report), "--pt_path", str(scratch / "pt")),
        ],
        cwd=ROOT,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    return {row["name"]: row["figures"] for row in json.loads(report.read_text())["rows"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two processes only")
    parser.add_argument("--json", default="benchmark_prediction.json", help="where to write the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = {processes: check(processes, Path(scratch)) for processes in ((2,) if args.quick else (2, 3, 4))}
    network = found[2]["network"]
    link = Link(network["alpha_seconds"], network["beta_bytes_per_second"])
    traffic = Traffic(**found[2]["prediction"]["traffic"])
    figures = []
    print(f"{len(os.sched_getaffinity(0))} cores; efficiency:")
    print("processes  measured  predicted  from 2 processes' network")
    for processes, rows in found.items():
        speed = rows["speed"]
        figures.append(
            {
                "processes": processes,
                "measured": speed["efficiency"],
                "predicted": speed["predicted_efficiency"],
                "predicted_from_two": link.efficiency(traffic, processes, speed["compute_steps_seconds"]),
            }
        )
        print("{processes:9}  {measured:8.1%}  {predicted:9.1%}  {predicted_from_two:9.1%}".format(**figures[-1]))
    Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
