"""Messages between real processes, through shared memory and through Gloo.

python -m pytest tests/model/test_exchange.py
"""

import gc
import mmap
import os
import platform
import subprocess
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import accelerator_of, run_ranks
from torch.nn.parallel import DistributedDataParallel

from mnist_ddp.distributed import _lost_peer
from mnist_ddp.model import exchange
from mnist_ddp.model.batchnorm import SyncBatchNorm
from mnist_ddp.model.exchange import _SharedMemory, average_gradients, gather

TURNS = 300


def message(rank: int, turn: int, size: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    values = torch.arange(size, dtype=dtype) + 1000 * turn + 1e6 * rank  # whole numbers that fp32 holds too
    return [values, -values]


def exchanged(processor: str, delays: bool) -> str:
    """All turns on one rank, each of another size; returns what passed them on."""
    accelerator = accelerator_of()
    P, rank = accelerator.num_processes, accelerator.process_index
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "CAPACITY", 256)
        patch.setattr(platform, "machine", lambda: processor)
        patch.setattr(exchange, "_of_groups", weakref.WeakKeyDictionary())
        sleeps = torch.rand(TURNS, P, generator=torch.Generator().manual_seed(0)).pow(8) / 100
        for turn in range(TURNS):
            if delays:
                time.sleep(sleeps[turn, rank].item())  # each in its turn comes late
            size = 1 + turn % 100
            dtype = (torch.float32, torch.float64)[turn // 100 % 2]
            gathered, counts = gather(message(rank, turn, size, dtype), dist.group.WORLD, turn + rank)
            expected = torch.stack([torch.stack(message(other, turn, size, dtype)) for other in range(P)])
            torch.testing.assert_close(gathered, expected, rtol=0, atol=0)
            assert list(counts) == [turn + other for other in range(P)]
        memory = exchange._of_groups[dist.group.WORLD]
        shared = memory is not None and memory.turn > 0
        longer, _ = gather(message(rank, 0, 129), dist.group.WORLD)  # through Gloo
        assert torch.equal(longer[-1], torch.stack(message(P - 1, 0, 129)))
    return "memory" if shared else "Gloo"


@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize(("processor", "way"), [("x86_64", "memory"), ("aarch64", "Gloo")])
def test_messages_arrive_whole_and_in_order(processes: int, processor: str, way: str) -> None:
    assert run_ranks(exchanged, processes, processor, way == "memory") == [way] * processes


@pytest.mark.parametrize(("killed", "words"), [(True, "closed by peer"), (False, "Timed out")])
def test_a_process_that_ends_or_does_not_come_is_noticed(killed: bool, words: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as peer:
        memory = _SharedMemory(
            mmap.mmap(-1, _SharedMemory.size(2)), rank=0, pids=[os.getpid(), peer.pid], timeout_seconds=0.5
        )
        if killed:
            peer.kill()  # it stays a zombie until it is waited for
        started = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match=words) as caught:
            memory.gather([torch.zeros(1)], 0)
        assert time.monotonic() - started < (0.4 if killed else 3)
        assert _lost_peer(caught.value)
        peer.kill()


def test_nothing_is_left_open() -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    memory = _SharedMemory(mmap.mmap(-1, _SharedMemory.size(2)), rank=0, pids=[os.getpid(), 1], timeout_seconds=1)
    assert len(os.listdir("/proc/self/fd")) > len(before)
    del memory
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def gradients(hook: bool) -> list[torch.Tensor]:
    """Of two micro-batches, the first without a reduction; each layer in a bucket of its own."""
    accelerator = accelerator_of()
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    model = DistributedDataParallel(net, bucket_cap_mb=0.02, gradient_as_bucket_view=True)
    if hook:
        model.register_comm_hook(None, average_gradients)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(3):  # the buckets are laid out anew after the first backward pass
        model.zero_grad()
        with model.no_sync():
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


@pytest.mark.parametrize("processes", [2, 3])
def test_gradients_are_averaged_as_without_the_hook(processes: int) -> None:
    with_hook, without = (run_ranks(gradients, processes, hook) for hook in (True, False))
    for ours, theirs in zip(with_hook, without, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(with_hook[0], with_hook[1], rtol=0, atol=0)


def mismatched(differ: str, capacity: int) -> str:
    """The error where two processes call for messages that do not belong together."""
    rank = accelerator_of().process_index
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "CAPACITY", capacity)
        patch.setattr(exchange, "_of_groups", weakref.WeakKeyDictionary())
        gather([torch.zeros(3)], dist.group.WORLD)
        message = torch.zeros(3 + rank if differ == "size" else 3)
        if differ == "dtype" and rank == 1:
            message = message.double()
        try:
            gather([message], dist.group.WORLD, 5 if differ == "direction" and rank == 1 else -1)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("differ", "capacity", "words"),
    [
        ("size", 256, "they exchange [12, 16] bytes"),
        ("dtype", 256, "they exchange [12, 24] bytes"),
        ("direction", 256, "some are in the forward pass, others in backward"),
        ("direction", 0, "some are in the forward pass, others in backward"),
    ],
)
def test_processes_at_different_layers_are_noticed(differ: str, capacity: int, words: str) -> None:
    said = run_ranks(mismatched, 2, differ, capacity)
    assert any(f"not at the same layer: {words}" in words_of_one for words_of_one in said), said


def trained_after_inference() -> float:
    accelerator_of()
    layer, x = SyncBatchNorm(2), torch.arange(6.0).view(3, 2)
    with torch.inference_mode():
        layer(x)
    for _ in range(3):  # to both slots
        layer(x.requires_grad_()).sum().backward()
    return x.grad.abs().max().item()


def test_an_exchange_in_inference_mode_leaves_training_possible() -> None:
    assert run_ranks(trained_after_inference, 2) == pytest.approx([0.0, 0.0], abs=1e-6)
