"""How fast a CSV file is read, and in how much memory, side by side with pandas.

    python -m benchmarks.data            # 60,000 and 1,000,000 rows: about 2 GB of temporary files
    python -m benchmarks.data --quick    # 10,000 and 50,000 rows

The tables hold the embedded digits, over and over. Prints one table and writes it to a JSON file.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from mnist_ddp.data.reading import read_image_set

ROOT = Path(__file__).resolve().parents[1]
_BATCH_SIZE = 256


def write_table(path: Path, rows: int) -> Path:
    """A headerless CSV file with `rows` rows of 28x28 pixels."""
    digits = gzip.decompress((ROOT / "data/mnist_test.csv.gz").read_bytes()).splitlines(keepends=True)
    with path.open("wb") as file:
        for start in range(0, rows, len(digits)):
            file.writelines(digits[: rows - start])
    return path


def compare_speed(path: Path, cache: Path, rounds: int) -> dict[str, float]:
    """Medians over `rounds` in which pandas, a first read with an empty cache and a read from the cache alternate."""
    import pandas as pd

    def seconds(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def read() -> None:
        read_image_set(path, cache_dir=str(cache))

    taken: dict[str, list[float]] = {"pandas": [], "first": [], "cached": []}
    for _ in range(rounds):
        taken["pandas"].append(seconds(lambda: pd.read_csv(path, header=None, dtype="uint8")))
        for file in cache.glob("*.arrow"):
            file.unlink()
        taken["first"].append(seconds(read))
        taken["cached"].append(seconds(read))
    ratios = [first / pandas for first, pandas in zip(taken["first"], taken["pandas"], strict=True)]
    return {f"{name}_seconds": statistics.median(all_) for name, all_ in taken.items()} | {
        "first_over_pandas": statistics.median(ratios)
    }


def megabytes(field: str) -> float:
    """A size from /proc/self/status, such as VmHWM: the most memory so far, shared pages and all."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1000


def measure_parsing(path: Path, cache: Path) -> dict[str, float]:
    """Seconds and peak memory over the bare process, in a process that has imported everything."""
    read_image_set(ROOT / "data/mnist_test.csv.gz", cache_dir=str(cache))  # imports all that is imported when needed
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to the current size
    before, start = megabytes("VmRSS"), time.perf_counter()
    rows = len(read_image_set(path, cache_dir=str(cache)))
    taken = time.perf_counter() - start
    return {"seconds": taken, "rows_per_second": rows / taken, "peak_mb": megabytes("VmHWM") - before}


def measure_training(path: Path, cache: Path) -> dict[str, float]:
    """Private and shared memory that an epoch of batches adds to a process which maps the cached images."""
    import torch

    from mnist_ddp.data.loaders import Subset, TrainingSamples

    before = {field: megabytes(field) for field in ("RssAnon", "RssFile")}
    images = read_image_set(path, cache_dir=str(cache))
    samples = TrainingSamples(
        Subset(images, torch.arange(len(images))), seed=0, augment=False, global_batch=_BATCH_SIZE
    )
    start = time.perf_counter()
    for first in range(0, len(samples), _BATCH_SIZE):
        samples.__getitems__(range(first, first + _BATCH_SIZE))
    taken = time.perf_counter() - start
    return {
        "private_mb": megabytes("RssAnon") - before["RssAnon"],
        "shared_mb": megabytes("RssFile") - before["RssFile"],
        "images_per_second": len(samples) / taken,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    parser.add_argument("--json", default="benchmark_data.json", help="where the figures go")
    args = parser.parse_args()
    rows, many_rows = (10_000, 50_000) if args.quick else (60_000, 1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        cache.mkdir()
        speed = compare_speed(write_table(Path(folder) / "table.csv", rows), cache, rounds=3 if args.quick else 5)
        large = write_table(Path(folder) / "large.csv", many_rows)
        large_gb = os.path.getsize(large) / 1e9
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn) as pool:
            parsing = pool.submit(measure_parsing, large, cache).result()
        with ProcessPoolExecutor(2, spawn, max_tasks_per_child=1) as pool:
            training = list(pool.map(measure_training, [large] * 2, [cache] * 2))
    private = sum(process["private_mb"] for process in training)
    lines = [
        (f"{rows:,} rows: pandas.read_csv", f"{speed['pandas_seconds']:.2f} s", ""),
        (f"{rows:,} rows: first read, cache written", f"{speed['first_seconds']:.2f} s", ""),
        ("  in terms of pandas, same round", f"{speed['first_over_pandas']:.2f} x", "at most 1.3"),
        (f"{rows:,} rows: from the cache", f"{speed['cached_seconds']:.3f} s", "at most 0.1"),
        (f"{many_rows:,} rows, {large_gb:.1f} GB: first read", f"{parsing['seconds']:.1f} s", ""),
        ("  rows per second", f"{parsing['rows_per_second']:,.0f}", ""),
        ("  peak memory over the bare process", f"{parsing['peak_mb']:.0f} MB", "at most 600"),
        ("2 processes, an epoch each: private memory added", f"{private:.0f} MB", "at most 100"),
        ("  shared pages of the file, per process", f"{training[0]['shared_mb']:.0f} MB", ""),
        ("  images per second fetched, per process", f"{training[0]['images_per_second']:,.0f}", ""),
    ]
    for what, figure, bound in lines:
        print(f"{what:<52}{figure:>12}   {bound}")
    figures = {"rows": rows, "many_rows": many_rows, "speed": speed, "parsing": parsing, "training": training}
    Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    within = (
        speed["first_over_pandas"] <= 1.3
        and speed["cached_seconds"] <= 0.1
        and parsing["peak_mb"] <= 600
        and private <= 100
    )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
