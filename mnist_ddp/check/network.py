"""How long collectives take, and what follows for more processes than there are here.

The alpha-beta model: a message of S bytes takes alpha + S / beta seconds from one process to the next, alpha the
latency and beta the bandwidth of the slowest link. On a ring of N processes

    all-reduce of S bytes        2 (N - 1) alpha + 2 (N - 1) / N S / beta
    all-gather of S bytes each     (N - 1) alpha +   (N - 1)     S / beta

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section 4;
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). Gloo reduces and
gathers on a ring. NCCL takes a tree over many nodes, whose latency grows with log N: there the prediction is a lower
bound. All wait for the slowest, and the more there are, the slower it is: see `mean_of_slowest`.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mnist_ddp.distributed import on_main

_SECONDS_EACH = 0.4
_SMALL_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """What the processes exchange in one training step.

    Attributes:
        gathered: bytes from each process, of the all-gathers one after the other: each BatchNorm layer has one in the
            forward and one in the backward pass.
        reduced: bytes of the gradients, which DDP reduces in one bucket once the backward pass is over.
    """

    gathered: tuple[int, ...]
    reduced: int

    @classmethod
    def of(cls, model: nn.Module) -> "Traffic":
        """That of training `model` with synchronised BatchNorm, over Gloo: two float64 and a count."""
        channels = [layer.num_features for layer in model.modules() if isinstance(layer, _BatchNorm)]
        gathered = [8 * (2 * C + 1) for C in channels for _ in ("forward", "backward")]
        return cls(tuple(gathered), sum(p.numel() * p.element_size() for p in model.parameters()))


@dataclass(frozen=True)
class Link:
    """The slowest link between two processes.

    Attributes:
        alpha: latency of a message, in seconds.
        beta: bandwidth, in bytes per second.
    """

    alpha: float
    beta: float

    def seconds_per_step(self, traffic: Traffic, processes: int) -> float:
        """Time in which all processes only exchange, by the formulas at the top of this file."""
        N = processes
        reduce = 2 * (N - 1) * self.alpha + 2 * (N - 1) / N * traffic.reduced / self.beta
        return reduce + sum((N - 1) * self.alpha + (N - 1) * size / self.beta for size in traffic.gathered)

    def efficiency(self, traffic: Traffic, processes: int, compute_seconds: Sequence[float]) -> float:
        """Share of a step in which a process computes, 0 to 1; the rest it exchanges, or waits for the slowest.

        Nothing overlaps: BatchNorm waits for its sums, and the one bucket of gradients is complete with the last one.

        Args:
            traffic: of a step.
            processes: world size.
            compute_seconds: durations of single steps without communication, of all processes that were measured.
        """
        mean = sum(compute_seconds) / len(compute_seconds)
        return mean / (mean_of_slowest(compute_seconds, processes) + self.seconds_per_step(traffic, processes))


def mean_of_slowest(seconds: Sequence[float], processes: int) -> float:
    """Expected largest of `processes` durations, drawn at random from those measured.

    (k / n)^N is the chance that N draws are all among the k smallest of n: David and Nagaraja, "Order Statistics"
    (2003), section 2.1.
    """
    n = len(seconds)
    chances = [(k / n) ** processes for k in range(n + 1)]
    return sum(value * (chances[k + 1] - chances[k]) for k, value in enumerate(sorted(seconds)))


def all_reduce_seconds(size: int, device: torch.device) -> float:
    """Median duration of an all-reduce of `size` bytes in fp32, when nothing else runs."""
    tensor = torch.zeros(size // 4, device=device)
    return median_seconds(lambda: dist.all_reduce(tensor), device)


def all_gather_seconds(size: int, device: torch.device) -> float:
    """Median duration of an all-gather of `size` bytes from each process."""
    local = torch.zeros(size // 4, device=device)
    parts = [torch.zeros_like(local) for _ in range(dist.get_world_size())]
    return median_seconds(lambda: dist.all_gather(parts, local), device)


def median_seconds(collective: Callable[[], object], device: torch.device) -> float:
    """Median duration of a collective, as rank 0 sees it; the same on all processes, which call it together."""
    collective()  # connects
    seconds = [_timed(collective, device) for _ in range(3)]
    repeats = on_main(lambda: int(min(max(_SECONDS_EACH / max(seconds), 3), 200)))
    seconds += [_timed(collective, device) for _ in range(repeats)]
    return on_main(lambda: sorted(seconds)[len(seconds) // 2])


def _timed(collective: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    collective()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Waits for the kernels that were started on `device`."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_link(traffic: Traffic, device: torch.device) -> tuple[Link, dict[int, float]]:
    """Latency and bandwidth from an all-reduce of one number and one of the gradients.

    Between those two sizes the model is exact, and no other size of all-reduce occurs.

    Returns:
        The link, and the measured seconds by the bytes of the all-reduce.
    """
    N = dist.get_world_size()
    small, large = (all_reduce_seconds(size, device) for size in (_SMALL_BYTES, traffic.reduced))
    transfer = max(large - small, 1e-9) / (2 * (N - 1) / N)
    return Link(small / (2 * (N - 1)), traffic.reduced / transfer), {_SMALL_BYTES: small, traffic.reduced: large}


def world_sizes(up_to: int = 1024) -> Sequence[int]:
    """2, 4, 8 ... `up_to`."""
    return [2**k for k in range(1, int(math.log2(up_to)) + 1)]


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference; infinite where one of them is not finite."""
    difference = (ours.double().cpu() - theirs.double().cpu()).abs().max().item()
    return difference if math.isfinite(difference) else math.inf
