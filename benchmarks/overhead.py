"""What saving, and the agreement on signals, cost the default job: shares of an epoch, in the run itself.

    python -m benchmarks.overhead            # two minutes on two cores
    python -m benchmarks.overhead --quick    # a smoke test

Trains the default recipe on the embedded digits with two processes, for more epochs than it needs, and times each save
and each agreement. What processes do together counts from when the last of them has come to it: for the slower one they
would wait at the next step as well. As a check, epochs without saving and without agreement take turns with usual ones,
and are compared in threes. Prints the shares and their bounds, and writes the figures to a JSON file. Exit status 1
where a bound is missed.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import train_accel
from mnist_ddp.distributed import launch
from mnist_ddp.settings import Settings, parse_settings
from mnist_ddp.training import loop
from mnist_ddp.training.run_folder import RunFolder

KINDS = ("usual", "without saving", "without agreement")  # of epochs, in turn
BOUNDS = {"saving": 0.03, "agreement": 0.01}  # shares of an epoch; that of all its agreements is that of a step's
Calls = list[tuple[float, float]]  # start and end, seconds on a clock that all processes of a machine share


def train(settings: Settings) -> int:
    """`train_accel.train`, with a watch on what is measured; writes each process's times to the run folder."""
    times: dict[str, Calls] = {name: [] for name in ("epoch", "save", "save model", "agree")}
    fit = loop.fit

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            result = function(*args, **kwargs)
            times[name].append((start, time.monotonic()))
            return result

        return call

    def fit_in_turns(*args: Any, signals: Any, save: Callable[[], None], **kwargs: Any) -> Iterator[loop.EpochResult]:
        agreeing = timed("agree", signals.step), timed("agree", signals.agree)
        signals.step, signals.agree = agreeing
        timed_save = timed("save", save)

        def save_in_turns() -> None:
            if KINDS[len(times["epoch"]) % 3] != "without saving":
                timed_save()

        start = time.monotonic()
        for epoch in fit(*args, signals=signals, save=save_in_turns, **kwargs):
            yield epoch
            times["epoch"].append((start, time.monotonic()))
            start = time.monotonic()
            agrees = KINDS[len(times["epoch"]) % 3] != "without agreement"
            signals.step, signals.agree = agreeing if agrees else (lambda: False,) * 2

    loop.fit = fit_in_turns
    RunFolder.save_model = timed("save model", RunFolder.save_model)  # type: ignore[method-assign]
    status = train_accel.train(settings)
    (Path(settings.pt_path) / f"times-{os.environ['RANK']}.json").write_text(json.dumps(times))
    return status


def summary(main: dict[str, Calls], other: dict[str, Calls]) -> dict[str, Any]:
    """The figures of a run, from the times of its two processes; seconds per epoch, and shares of it."""
    turns = list(zip(*(iter(_durations(main["epoch"])),) * 3, strict=False))[1:]  # the first warm up
    usual = statistics.mean(turn[0] for turn in turns)
    saves = list(zip(main["save"], other["save"], strict=True))
    agreements = list(zip(_durations(main["agree"]), _durations(other["agree"]), strict=True))
    agreeing_epochs = len(main["epoch"]) * 2 / 3
    seconds = {
        "checkpoint": statistics.mean(ours[1] - max(ours[0], theirs[0]) for ours, theirs in saves),
        "checkpoint, wait of the other process": statistics.mean(ours[1] - theirs[1] for ours, theirs in saves),
        "best model": statistics.mean(_durations(main["save model"])),
        # The last to come does not wait. A step without agreement takes a microsecond.
        "agreement": sum(min(pair) for pair in agreements) / agreeing_epochs,
        "agreement, wait for the slower process": sum(max(p) - min(p) for p in agreements) / 2 / agreeing_epochs,
    }
    ratios = {name: [turn[0] / turn[i] for turn in turns] for i, name in enumerate(KINDS) if i > 0}
    return {
        "epoch_seconds": usual,
        "epochs": len(main["epoch"]),
        "reductions_per_epoch": sum(min(pair) > 5e-5 for pair in agreements) / agreeing_epochs,
        "seconds": seconds,
        "shares": {
            # As if each epoch were the best so far.
            "saving": (seconds["checkpoint"] + seconds["best model"]) / usual,
            "agreement": seconds["agreement"] / usual,
        },
        "usual_over": {name: statistics.quantiles(values, n=4) for name, values in ratios.items()},
    }


def _durations(calls: Calls) -> list[float]:
    return [end - start for start, end in calls]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="nine epochs")
    parser.add_argument("--json", default="benchmark_overhead.json", help="where to write the figures")
    args = parser.parse_args()
    epochs = "9" if args.quick else "60"
    # Here, as a run's folder is by default: /tmp may lie in memory, where a file is safe at once.
    with tempfile.TemporaryDirectory(dir=".") as folder:
        flags = ["--num_processes", "2", "--epochs", epochs, "--patience", epochs, "--pt_path", folder]
        status = launch(train, parse_settings(flags))
        if status != 0:
            return status
        figures = summary(*(json.loads((Path(folder) / f"times-{rank}.json").read_text()) for rank in range(2)))
    usual, seconds = figures["epoch_seconds"], figures["seconds"]
    print(f"\n{'an epoch takes':42}{1000 * usual:8.1f} ms  in the mean, as those below")
    for name, value in seconds.items():
        print(f"{name:42}{1000 * value:8.1f} ms {value / usual:8.2%}")
    for name, (low, middle, high) in figures["usual_over"].items():
        print(f"usual epoch over one {name + ':':21}{middle:8.3f}     half of the threes: {low:.3f} to {high:.3f}")
    print(f"reductions in an epoch: {figures['reductions_per_epoch']:.1f}")
    for name, bound in BOUNDS.items():
        share = figures["shares"][name]
        print(f"{name}: {share:.2%} (bound: {bound:.0%}){'' if share <= bound else '  MISSED'}")
    Path(args.json).write_text(json.dumps(figures, indent=2))
    return 0 if all(figures["shares"][name] <= bound for name, bound in BOUNDS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
