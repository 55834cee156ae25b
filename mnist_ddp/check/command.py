"""Checks that this machine trains as it should, alone or with others.

    accelerate launch --multi_gpu --num_processes 2 -m mnist_ddp.check
    torchrun --standalone --nproc_per_node 2 -m mnist_ddp.check
    python -m mnist_ddp.check
    python -m mnist_ddp.check --num_processes 2

Start it as training will be started: with the same launcher, the same config and on the same machines.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mnist_ddp.errors import UserError
from mnist_ddp.settings import Settings, parse_settings

if TYPE_CHECKING:
    from mnist_ddp.check.rows import Row

# The settings that change what is checked; training has more.
FLAGS = (
    *("pt_path", "cache_dir", "width", "batch_size", "seed", "mixed_precision"),
    *("gpu", "num_processes", "master_addr", "port", "timeout_seconds"),
)
_TIMEOUT_SECONDS = 60.0  # of the check, where no other is given
_COLUMNS = 100


def check(settings: Settings, json_path: str) -> int:
    """The table, on each of the processes; rank 0 prints it.

    Returns:
        The exit status: 0 where every row passed, else 1.
    """
    from mnist_ddp.check.rows import rows
    from mnist_ddp.distributed import leaving, start_accelerator

    started = time.perf_counter()
    timeout_seconds = settings.timeout_seconds
    if timeout_seconds == Settings().timeout_seconds:
        timeout_seconds = _TIMEOUT_SECONDS
    accelerator = start_accelerator(
        mixed_precision=settings.mixed_precision,
        gradient_accumulation_steps=1,
        timeout_seconds=timeout_seconds,
        log_with="none",
        project_dir=settings.pt_path,
    )
    found: list[Row] = []
    with leaving(accelerator):
        for row in rows(accelerator, settings):
            found.append(row)
            if accelerator.is_main_process:
                print(format_row(row), flush=True)
        seconds = time.perf_counter() - started
        failed = [row.name for row in found if not row.passed]
        if accelerator.is_main_process:
            verdict = f"failed: {', '.join(failed)}" if failed else "passed"
            print(f"{verdict} ({len(found)} rows, {seconds:.0f} s)", flush=True)
            if json_path:
                report = {
                    "passed": not failed,
                    "seconds": round(seconds, 3),
                    "rows": [dataclasses.asdict(row) for row in found],
                }
                Path(json_path).write_text(json.dumps(report, indent=2) + "\n")
    return 1 if failed else 0


def format_row(row: "Row") -> str:
    """One row, wrapped under its column; with what to do where it failed."""
    words = row.text + (f"\n-> {row.advice}" if row.advice and not row.passed else "")
    lines = [part for line in words.splitlines() for part in textwrap.wrap(line, _COLUMNS)] or [""]
    head = f"{'pass' if row.passed else 'FAIL'}  {row.name:<24}"
    return "\n".join((head if number == 0 else " " * len(head)) + line for number, line in enumerate(lines))


def parse(args: Sequence[str]) -> tuple[Settings, str]:
    """The settings, and the file for --json, empty for none.

    Raises:
        UserError: a flag that is unknown, or says nothing about a machine.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mnist_ddp.check",
        description=__doc__,
        epilog=f"Of the settings of train_accel.py it takes --{', --'.join(FLAGS)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", default="", metavar="FILE", help="write the rows and their figures there as well")
    known, others = parser.parse_known_args(args)
    settings, default = parse_settings(others), Settings()
    for setting in dataclasses.fields(Settings):
        name = setting.name
        if name not in FLAGS and getattr(settings, name) != getattr(default, name):
            raise UserError(f"--{name} says nothing about a machine; the check takes --json, --{', --'.join(FLAGS)}")
    folder = os.path.dirname(os.path.abspath(known.json))
    if known.json and (os.path.isdir(known.json) or not os.access(folder, os.W_OK)):
        raise UserError(f"--json {known.json}: is a folder, or in one that does not exist or cannot be written")
    return settings, known.json


def main() -> int:
    settings, json_path = parse(sys.argv[1:])
    from mnist_ddp.distributed import launch

    return launch(functools.partial(check, json_path=json_path), settings)
