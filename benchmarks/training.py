"""Training throughput, side by side with the bare loop and with what people write by hand.

    python -m benchmarks.training            # a few minutes on two cores
    python -m benchmarks.training --quick    # a smoke test

All contenders train the same network with the same optimizer on the same digits, in the same two processes, in turn,
without augmentation. The bare loop runs in one of the two, with the threads of both. Prints images per second and the
ratios of each round's pair, as medians over the rounds, and writes them to a JSON file.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mnist_ddp.data.loaders import Splits, Subset, make_loaders
from mnist_ddp.data.reading import read_files
from mnist_ddp.distributed import start_accelerator
from mnist_ddp.model import batchnorm
from mnist_ddp.model.convnet import ConvNet, build_model
from mnist_ddp.training.early_stopping import EarlyStopping
from mnist_ddp.training.loop import fit
from mnist_ddp.training.signals import StopSignals
from mnist_ddp.training.state import start_training

PROCESSES = 2
BATCH_SIZE = 256
LR = 1e-3


@dataclass(frozen=True)
class Digits:
    """The training images of all contenders: (N, H, W) uint8, and (N,) labels."""

    images: Tensor
    labels: Tensor
    splits: Splits


def network() -> ConvNet:
    return build_model(tuple("0123456789"), (28, 28), width=16, mean=0.1307, std=0.3081, seed=0)


# ---- contenders: each yields once an epoch, on all processes


def ours(digits: Digits, *, synchronised: bool = True) -> Iterator[None]:
    """The project's own loop."""
    accelerator = start_accelerator(
        mixed_precision="auto", gradient_accumulation_steps=1, timeout_seconds=300, log_with="none", project_dir=""
    )
    loaders = make_loaders(
        digits.splits,
        accelerator.device,
        seed=0,
        augment=False,
        batch_size=BATCH_SIZE,
        processes=accelerator.num_processes,
        accumulation_steps=1,
    )
    train_loader, val_loader, _ = accelerator.prepare(*loaders)
    convert = batchnorm.convert_sync_batchnorm
    state = start_training(
        accelerator,
        network(),
        EarlyStopping("accuracy", 10**6),
        optimizer="adamw",
        lr=LR,
        warmup_steps=0,
        momentum=0.9,
        weight_decay=0.01,
        ema_decay=0.95,
    )
    assert convert is batchnorm.convert_sync_batchnorm
    if not synchronised:
        for layer in accelerator.unwrap_model(state.model).modules():
            if isinstance(layer, batchnorm.SyncBatchNorm):
                layer.__class__ = nn.BatchNorm2d
    signals = StopSignals(accelerator)
    for _ in fit(
        accelerator,
        state,
        train_loader,
        val_loader,
        epochs=10**6,
        num_classes=10,
        label_smoothing=0.0,
        max_grad_norm=0.0,
        target_accuracy=0.0,
        signals=signals,
    ):
        yield


def bare(digits: Digits) -> Iterator[None]:
    """The limit: the model over tensors in memory, with nothing around it. One process, the threads of all."""
    if dist.get_rank() > 0:
        while True:
            yield
    model = network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    size = BATCH_SIZE * PROCESSES
    while True:
        torch.set_num_threads(PROCESSES * torch.get_num_threads())
        for start in range(0, len(digits.labels) // size * size, size):
            loss = F.cross_entropy(model(digits.images[start : start + size]), digits.labels[start : start + size])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.set_num_threads(torch.get_num_threads() // PROCESSES)
        yield


def _floats(digits: Digits) -> TensorDataset:
    return TensorDataset(digits.images.float() / 255, digits.labels)


def plain_ddp(digits: Digits, *, channels_last: bool = False) -> Iterator[None]:
    """What people write by hand: TensorDataset, DistributedSampler, default DataLoader, DDP."""
    dataset = _floats(digits)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, drop_last=True)
    model = network()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=LR)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(images), labels)
            loss.backward()
            optimizer.step()
            loss.item()
        epoch += 1
        yield


def plain_accelerate(digits: Digits, *, channels_last: bool = False) -> Iterator[None]:
    """The same with a plain Accelerate loop."""
    accelerator = Accelerator(cpu=True)
    model = network()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(_floats(digits), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while True:
        for images, labels in loader:
            logits = wrapped(images)
            loss = F.cross_entropy(logits, labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.gather_for_metrics((logits.argmax(1), labels))
        yield


def fabric(digits: Digits, *, channels_last: bool = False) -> Iterator[None]:
    """The same with Lightning Fabric."""
    from lightning_fabric import Fabric

    fab = Fabric(accelerator="cpu", devices=PROCESSES, strategy="ddp")
    fab.launch()
    model = network()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wrapped, optimizer = fab.setup(model, torch.optim.AdamW(model.parameters(), lr=LR))
    loader = fab.setup_dataloaders(DataLoader(_floats(digits), batch_size=BATCH_SIZE, shuffle=True, drop_last=True))
    while True:
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(images), labels)
            fab.backward(loss)
            optimizer.step()
            loss.item()
        yield


CONTENDERS: dict[str, Callable[[Digits], Iterator[None]]] = {
    "ours": ours,
    "ours, plain BatchNorm": lambda digits: ours(digits, synchronised=False),
    "bare loop, 1 process": bare,
    "plain DDP": plain_ddp,
    "plain DDP, channels_last": lambda digits: plain_ddp(digits, channels_last=True),
    "plain Accelerate": plain_accelerate,
    "plain Accelerate, channels_last": lambda digits: plain_accelerate(digits, channels_last=True),
    "Lightning Fabric": fabric,
    "Lightning Fabric, channels_last": lambda digits: fabric(digits, channels_last=True),
}


def collective_seconds(rounds: int = 200) -> float:
    """Median time of one gather as a BatchNorm layer of 32 channels needs it, in a process that only waits."""
    local = torch.zeros(65, dtype=torch.float64)
    parts = [torch.zeros_like(local) for _ in range(dist.get_world_size())]
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        dist.all_gather(parts, local)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def measure(rank: int, port: int, rounds: int, epochs: int, output: str) -> None:
    """Runs all contenders in turn on this process; rank 0 writes their images per second to `output`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(PROCESSES), LOCAL_WORLD_SIZE=str(PROCESSES))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    main = read_files("")["train"]
    everything, few = torch.arange(len(main)), torch.arange(PROCESSES)
    digits = Digits(main.images, main.labels, Splits(Subset(main, everything), Subset(main, few), Subset(main, few)))
    running = {name: start(digits) for name, start in CONTENDERS.items()}
    per_epoch = len(main) // (BATCH_SIZE * PROCESSES) * BATCH_SIZE * PROCESSES
    rates: dict[str, list[float]] = {name: [] for name in running}
    for round_ in range(rounds + 1):
        for name, contender in running.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(epochs):
                next(contender)
            dist.barrier()
            if round_ > 0:  # the first warms up
                rates[name].append(per_epoch * epochs / (time.perf_counter() - start))
    latency = collective_seconds()
    if rank == 0:
        Path(output).write_text(json.dumps({"images_per_second": rates, "collective_seconds": latency}))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--json", default="benchmark_training.json", help="where to write the figures")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // PROCESSES))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    rounds, epochs = (1, 1) if args.quick else (7, 2)
    mp.spawn(measure, (store.port, rounds, epochs, args.json), nprocs=PROCESSES)

    figures = json.loads(Path(args.json).read_text())
    rates = figures["images_per_second"]
    steps = rounds and 19  # of 10,000 digits
    print(f"{'contender':34}{'images/s':>10}{'ours / it':>12}   (medians of {rounds} rounds, {PROCESSES} processes)")
    figures["ratios"] = {}
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(rates["ours"], values, strict=True))
        figures["ratios"][name] = ratio
        print(f"{name:34}{statistics.median(values):10,.0f}{ratio:12.2f}")
    layers = 3
    step_seconds = PROCESSES * BATCH_SIZE / statistics.median(rates["ours"])
    share = (2 * layers + 1) * figures["collective_seconds"] / step_seconds
    print(
        f"one small collective takes {figures['collective_seconds'] * 1e3:.2f} ms when nothing else runs; the {2 * layers} "
        f"of BatchNorm and DDP's own are {share:.1%} of our step of {step_seconds * 1e3:.1f} ms"
    )
    figures["collective_share"] = share
    Path(args.json).write_text(json.dumps(figures, indent=2))
    return 0 if steps else 1


if __name__ == "__main__":
    sys.exit(main())
