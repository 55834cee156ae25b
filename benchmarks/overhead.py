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
_LOCAL_SECONDS = 5e-5  # a step that does not reduce takes a microsecond, one that does some 500
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
    """The figures of a run, from the times of its two processes.

    Returns:
        "epochs": seconds of the usual ones; "costs": for each, how often it comes in an epoch, its median in seconds,
        and its share of an epoch, of medians and of means; "usual_over": quartiles of the ratios in each three epochs.
    """
    threes = list(zip(*(iter(_durations(main["epoch"])),) * 3, strict=False))[1:]  # the first warm up
    usual = [three[0] for three in threes]
    saves = list(zip(main["save"], other["save"], strict=True))
    pairs = zip(_durations(main["agree"]), _durations(other["agree"]), strict=True)
    reductions = [pair for pair in pairs if min(pair) > _LOCAL_SECONDS]
    per_epoch = len(reductions) / (len(main["epoch"]) * 2 / 3)
    costs: dict[str, tuple[float, list[float]]] = {
        # Once an epoch: as if each were the best so far.
        "checkpoint": (1, [ours[1] - max(ours[0], theirs[0]) for ours, theirs in saves]),
        "checkpoint, wait of the other process": (1, [ours[1] - theirs[1] for ours, theirs in saves]),
        "best model": (1, _durations(main["save model"])),
        # The last to come does not wait.
        "agreement": (per_epoch, [min(pair) for pair in reductions]),
        "agreement, wait for the slower process": (per_epoch, [max(pair) - min(pair) for pair in reductions]),
    }
    return {
        "epochs": usual,
        "costs": {
            name: {
                "per_epoch": times,
                "seconds": statistics.median(values),
                "share": times * statistics.median(values) / statistics.median(usual),
                "share_of_means": times * statistics.mean(values) / statistics.mean(usual),
            }
            for name, (times, values) in costs.items()
        },
        "usual_over": {
            name: statistics.quantiles([three[0] / three[i] for three in threes], n=4)
            for i, name in enumerate(KINDS)
            if i > 0
        },
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
    costs = figures["costs"]
    shares = {"saving": costs["checkpoint"]["share"] + costs["best model"]["share"]}
    shares["agreement"] = costs["agreement"]["share"]
    print(f"\nan epoch takes {1000 * statistics.median(figures['epochs']):,.0f} ms; medians of {epochs} epochs:")
    print(f"{'':42}{'ms':>8}{'times':>8}{'share':>8}{'of means':>10}")
    for name, cost in costs.items():
        print(
            f"{name:42}{1000 * cost['seconds']:8.1f}{cost['per_epoch']:8.1f}{cost['share']:8.2%}"
            f"{cost['share_of_means']:10.2%}"
        )
    for name, (low, middle, high) in figures["usual_over"].items():
        print(f"a usual epoch over one {name}: {middle:.3f}, in half of the threes {low:.3f} to {high:.3f}")
    for name, bound in BOUNDS.items():
        print(f"{name}: {shares[name]:.2%} (bound: {bound:.0%}){'' if shares[name] <= bound else '  MISSED'}")
    Path(args.json).write_text(json.dumps(figures | {"shares": shares}, indent=2))
    return 0 if all(shares[name] <= bound for name, bound in BOUNDS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
