"""What processes on CPUs wait for in each step: BatchNorm's small messages, and the average of the gradients.

A core on which a process waits goes to sleep, and takes longer to wake than a message takes, above all in a virtual
machine. So whoever waits here polls for a while, and yields the core to Gloo's threads, and to other processes where
cores are few. On one machine, messages pass through memory that the processes share: Gloo's go from thread to thread at
both ends, and on cores that are busy with training that takes ten times longer than the message itself.
"""

import contextlib
import mmap
import os
import platform
import select
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

_NAME = "mnist_ddp"
CAPACITY = 8192  # values of a message; longer ones go through Gloo
_POLL_SECONDS = 0.05  # longer than the steps of processes in good health differ by
_NAP_SECONDS = 0.001
_LOOK_SECONDS = 0.02  # how often a waiting process looks whether the others are alive
_SIZE_BITS = 20  # of a counter, for the bytes of the message; the rest is the turn
_LINE = 8  # counters to a cache line, so that no two processes write to the same
_yield = getattr(os, "sched_yield", lambda: time.sleep(0))


def gather(local: list[Tensor], group: Any, count: int = -1) -> tuple[Tensor, Sequence[int]]:
    """Collects a message of each process. They call it together; the order is that of their ranks.

    Args:
        local: K tensors (C,) on the CPU. K, C and the dtype are the same on all processes.
        group: the processes, more than one.
        count: goes with the message; -1 for none, on all processes alike.

    Returns:
        (P, K, C) and all counts. They are to be read before the next call, and not to be written to.

    Raises:
        dist.DistNetworkError: another process has ended, or did not come within the group's timeout.
        RuntimeError: Gloo's, for the same reasons; or the messages of the processes do not belong together.
    """
    if group not in _of_groups:
        _of_groups[group] = _share_memory(group)
    memory, K, C = _of_groups[group], len(local), len(local[0])
    if memory is not None and K * C <= CAPACITY:
        return memory.gather(local, count)
    message = torch.cat([*local, local[0].new_tensor([count], dtype=torch.float64)])  # which holds every count
    gathered = message.new_empty(dist.get_world_size(group), len(message))
    work = dist.all_gather(list(gathered), message, group, async_op=True)  # for so few bytes faster than all_reduce
    _wait_for(work)
    counts = gathered[:, -1].long().tolist()
    _check_alike(counts)
    return gathered[:, :-1].to(local[0].dtype).unflatten(1, (K, C)), counts


def _check_alike(counts: Sequence[int]) -> None:
    """Raises RuntimeError where only some have a count: BatchNorm's forward messages do, those of backward do not."""
    if min(counts) < 0 <= max(counts):
        raise RuntimeError("the processes are not at the same layer: some are in the forward pass, others in backward")


def average_gradients(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """A communication hook for DistributedDataParallel: what it does without one, but for how it waits.

    Args:
        group: the processes; None means all.
        bucket: of gradients on the CPU. The last is waited for here, the others while the backward pass goes on.

    Returns:
        The bucket's gradients, flat, averaged over the processes.
    """
    gradients = bucket.buffer().div_(dist.get_world_size(group))
    work = dist.all_reduce(gradients, group=group, async_op=True)
    if bucket.is_last():
        _wait_for(work)
    return work.get_future().then(lambda future: future.value()[0])


def _wait_for(work: dist.Work) -> None:
    give_up = time.monotonic() + _POLL_SECONDS
    while not work.is_completed() and time.monotonic() < give_up:
        _yield()
    work.wait()


class _SharedMemory:
    """Two slots and a line of counters for each process.

    A process writes its message to a slot, then the number of its turn to its counter, and waits until no counter is
    behind. Slots alternate: whoever is at turn t + 1 writes to the other one, and turn t + 2 begins only when all have
    come to t + 1, and so have read turn t.

    That a message is there when its number is needs a processor that keeps the order of loads and of stores: x86-64.

    Args:
        memory: of `size(P)` bytes, shared by all.
        rank: this process's in the group.
        pids: of all processes.
        timeout_seconds: after which a wait fails.
    """

    def __init__(self, memory: mmap.mmap, rank: int, pids: list[int], timeout_seconds: float) -> None:
        P = len(pids)
        self.rank, self.timeout_seconds = rank, timeout_seconds
        self.turn = 0
        words = memoryview(memory).cast("q")
        self.turns = words[: P * _LINE : _LINE]
        self.counts = [words[1 + parity : P * _LINE : _LINE] for parity in range(2)]
        self.slots = torch.frombuffer(memory, dtype=torch.float64, offset=8 * P * _LINE).view(2, P, CAPACITY)
        self.views: dict[tuple[int, int, int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self.ended = select.poll()
        for peer, pid in enumerate(pids):
            if peer != rank:
                descriptor = os.pidfd_open(pid)
                weakref.finalize(self, os.close, descriptor)
                self.ended.register(descriptor, select.POLLIN)

    @staticmethod
    def size(processes: int) -> int:
        """Bytes for so many processes."""
        return 8 * processes * (_LINE + 2 * CAPACITY)

    def gather(self, local: list[Tensor], count: int) -> tuple[Tensor, Sequence[int]]:
        self.turn += 1
        parity, K, C = self.turn % 2, len(local), len(local[0])
        key = parity, K, C, local[0].dtype
        if key not in self.views:  # made once: a view takes as long as the copying of a message
            with torch.inference_mode(False):  # as the slots
                messages = self.slots[parity].view(local[0].dtype)[:, : K * C]
                self.views[key] = messages[self.rank], messages.unflatten(1, (K, C))
        mine, messages = self.views[key]
        torch.cat(local, out=mine)
        self.counts[parity][self.rank] = count
        self.turns[self.rank] = self.turn << _SIZE_BITS | mine.nbytes
        if min(self.turns) < self.turn << _SIZE_BITS:
            self._wait()
        # One that is a turn ahead has made this comparison itself.
        sizes = {turn & (1 << _SIZE_BITS) - 1 for turn in self.turns if turn >> _SIZE_BITS == self.turn}
        if sizes != {mine.nbytes}:
            raise RuntimeError(f"the processes are not at the same layer: they exchange {sorted(sizes)} bytes")
        _check_alike(self.counts[parity])
        return messages, self.counts[parity]

    def _wait(self) -> None:
        started = now = time.monotonic()
        looked = now
        while min(self.turns) < self.turn << _SIZE_BITS:
            if now - started < _POLL_SECONDS:
                _yield()
            else:
                time.sleep(_NAP_SECONDS)
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS:
                looked = now
                if self.ended.poll(0) and min(self.turns) < self.turn << _SIZE_BITS:
                    raise dist.DistNetworkError("Connection closed by peer: it has ended")
                if now - started > self.timeout_seconds:
                    raise dist.DistNetworkError(f"Timed out waiting {self.timeout_seconds:.0f} s for another process")


_of_groups: weakref.WeakKeyDictionary[Any, _SharedMemory | None] = weakref.WeakKeyDictionary()


def _share_memory(group: Any) -> _SharedMemory | None:
    """Memory that all processes of the group share; None, on all alike, where they are not on one machine.

    The first of them makes a file without a name, which the kernel removes with the last process however that ends. The
    others open it through /proc, and know it by a random number.
    """
    P, rank = dist.get_world_size(group), dist.get_rank(group)
    possible = platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    timeout_seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    size, token = mmap.PAGESIZE + _SharedMemory.size(P), os.urandom(16)
    fd = -1
    if rank == 0 and possible:
        with contextlib.suppress(OSError):
            fd = os.memfd_create(_NAME)
            os.ftruncate(fd, size)
            os.pwrite(fd, token, size - mmap.PAGESIZE)
    offers: list[Any] = [None] * P
    dist.all_gather_object(offers, (os.getpid(), fd, token), group)
    pids = [pid for pid, _, _ in offers]
    first_pid, first_fd, token = offers[0]
    memory = None
    if possible and first_fd >= 0:
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            path = f"/proc/{first_pid}/fd/{first_fd}"
            # Processes of other namespaces have other numbers: behind this one there may be anything.
            if rank > 0 and os.readlink(path).startswith(f"/memfd:{_NAME}"):
                fd = os.open(path, os.O_RDWR)
            if fd >= 0 and os.pread(fd, len(token), size - mmap.PAGESIZE) == token:
                with torch.inference_mode(False):  # else training could not write to it
                    memory = _SharedMemory(mmap.mmap(fd, _SharedMemory.size(P)), rank, pids, timeout_seconds)
    answers: list[Any] = [None] * P
    dist.all_gather_object(answers, memory is not None, group)
    if fd >= 0:
        os.close(fd)
    return memory if all(answers) else None
