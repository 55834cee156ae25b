"""Where the time of a step goes: a trace to look at, and a table to read."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

from mnist_ddp.files import write_whole
from mnist_ddp.training.checkpoint import writing

# The first steps are not like the others: kernels are chosen, memory is allocated, DDP builds its buckets anew.
_WAIT, _WARMUP, _ACTIVE = 3, 2, 8
_ROWS = 25


@contextlib.contextmanager
def profile_steps(accelerator: Accelerator, folder: Path) -> Iterator[Callable[[], None]]:
    """Records a few training steps of each process, early in the block.

    Writes trace-RANK.json, for Perfetto or chrome://tracing, and steps-RANK.txt, the operators that took most time of
    the CPU or, where there is one, of the GPU.

    Args:
        accelerator: of this run.
        folder: in that of a run; is created.

    Yields:
        What to call after each step; raises UserError where the files cannot be written.
    """
    rank, on_gpu = accelerator.process_index, accelerator.device.type == "cuda"
    written = False

    def write(profiler: torch.profiler.profile) -> None:
        nonlocal written
        steps = profiler.step_num - _WAIT - _WARMUP  # fewer than planned where the run ends before
        written = steps > 0
        if not written:
            return
        key = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=_ROWS, max_name_column_width=60)
        trace, unfinished = folder / f"trace-{rank}.json", folder / f".trace-{rank}.json"
        with writing(folder, folder.parent):
            folder.mkdir(exist_ok=True)
            write_whole(folder / f"steps-{rank}.txt", f"{steps} training steps of process {rank}\n{table}\n".encode())
            profiler.export_chrome_trace(str(unfinished))
            if not unfinished.exists():  # torch only logs why
                for leftover in folder.glob(f"{unfinished.name}*"):
                    leftover.unlink()
                raise OSError(errno.ENOSPC, "no room for the trace")
            os.replace(unfinished, trace)

    options = ProfileKwargs(
        activities=["cpu", "cuda"] if on_gpu else ["cpu"],
        schedule_option={"wait": _WAIT, "warmup": _WARMUP, "active": _ACTIVE, "repeat": 1},
        on_trace_ready=write,
    )
    with accelerator.profile(options) as profiler:
        yield profiler.step
    if not written and accelerator.is_main_process:
        print(f"note: the run was too short for --profile, which skips {_WAIT + _WARMUP} steps and takes {_ACTIVE}")
