"""Runs functions on the real processes of a gloo group.

The processes are started once and kept for the next function. They end with the test run, or when a function fails on
one of them.
"""

import atexit
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from launching import warm_programs

from mnist_ddp.distributed import start_accelerator


class _Rank(NamedTuple):
    process: mp.Process
    pipe: Connection


_ranks: list[_Rank] = []


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 100.0) -> list[Any]:
    """Calls `function(*args)` on ranks 0 to `world_size` - 1, under the environment that torchrun would give them.

    Args:
        function: defined at the top of a module. Joins the group itself, for example through `accelerator_of`.
        world_size: number of processes.
        args: can be pickled, as the returned values must be.
        timeout: seconds until all must have returned.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RuntimeError: a rank raised, with its traceback, or died, or did not return in time. All ranks are killed.
    """
    # The parent keeps the store, as torchrun's agent does: the kernel picks a port that no one else can take.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    surroundings = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    try:
        while len(_ranks) < world_size:
            _ranks.append(_start())
        for rank, (_, pipe) in enumerate(_ranks[:world_size]):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipe.send_bytes(pickle.dumps((surroundings | own, function, args)))
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(_ranks[:world_size])}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"ranks {sorted(waiting.values())} did not return within {timeout} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    # Bytes, not objects: torch would send its tensors through shared memory.
                    failure, results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError as error:
                    raise RuntimeError(f"rank {rank} died") from error
                if failure:
                    raise RuntimeError(f"rank {rank} raised\n{failure}")
    except BaseException:
        stop_ranks(grace_seconds=0)
        raise
    return [results[rank] for rank in range(world_size)]


@atexit.register
def stop_ranks(grace_seconds: float = 10.0) -> None:
    """Ends all ranks; the next call of `run_ranks` starts new ones."""
    for _, pipe in _ranks:
        pipe.close()  # ends an idle rank in good order
    for process, _ in _ranks:
        process.join(grace_seconds)
        process.kill()
        process.join()
    _ranks.clear()


def accelerator_of(**options: Any) -> Accelerator:
    """The project's Accelerator in this process: in fp32, without accumulation or trackers, unless `options` differ."""
    defaults: dict[str, Any] = {
        "mixed_precision": "no",
        "gradient_accumulation_steps": 1,
        "timeout_seconds": 60.0,
        "log_with": "none",
        "project_dir": "",
    }
    return start_accelerator(**defaults | options)


def leave_group() -> None:
    """Undoes `accelerator_of`: Accelerate keeps one state a process, which a later Accelerator would take over."""
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _start() -> _Rank:
    context = mp.get_context("spawn")
    context.set_executable(f"{warm_programs()}/python")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there,), daemon=True)
    process.start()
    there.close()  # so that the death of the process ends the pipe
    return _Rank(process, here)


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            surroundings, function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the test run is over, or was killed
            return
        # Only now: when this rank returned, another may still have been in its last collective.
        leave_group()
        os.environ.update(surroundings)
        failure = result = None
        try:
            result = function(*args)
        except Exception:
            failure = traceback.format_exc()
        pipe.send_bytes(pickle.dumps((failure, result)))
