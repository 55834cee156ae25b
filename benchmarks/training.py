"""Training throughput, side by side with the bare loop and with what people write by hand.

    python -m benchmarks.training            # a few minutes on two cores
    python -m benchmarks.training --quick    # a smoke test

All contenders train the same network with the same rule on the same digits, without augmentation, in turn and in the
same processes. The bare loop runs in one of them, with the threads of all. Prints images per second and our ratio to
each contender, as the median of the rounds' ratios, and writes the figures to a JSON file.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.data.loaders import Splits, Subset, make_loaders
from mnist_ddp.data.reading import read_files
from mnist_ddp.distributed import resolve_precision, start_accelerator
from mnist_ddp.model import batchnorm, exchange
from mnist_ddp.model.convnet import ConvNet, build_model
from mnist_ddp.training.early_stopping import EarlyStopping
from mnist_ddp.training.loop import fit
from mnist_ddp.training.signals import StopSignals
from mnist_ddp.training.state import start_training

BATCH_SIZE = 256
LR = 1e-3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = resolve_precision("auto", DEVICE) == "bf16"


def network(channels_last: bool) -> ConvNet:
    model = build_model(tuple("0123456789"), (28, 28), width=16, mean=0.1307, std=0.3081, seed=0)
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


# ---- contenders: each trains one epoch, on all processes, and yields


def ours(digits: ImageSet, *, synchronised: bool = True, wait: list[float] | None = None) -> Iterator[None]:
    """The project's own loop.

    Args:
        digits: to train on.
        synchronised: False leaves BatchNorm as it is.
        wait: to it, the share of each epoch's time is added that this process spent waiting for batches.
    """
    processes = dist.get_world_size()
    accelerator = start_accelerator(
        mixed_precision="auto", gradient_accumulation_steps=1, timeout_seconds=300, log_with="none", project_dir=""
    )
    everything, few = torch.arange(len(digits)), torch.arange(processes)
    loaders = make_loaders(
        Splits(Subset(digits, everything), Subset(digits, few), Subset(digits, few)),
        accelerator.device,
        seed=0,
        augment=False,
        batch_size=BATCH_SIZE,
        processes=processes,
        accumulation_steps=1,
    )
    train_loader, val_loader, _ = accelerator.prepare(*loaders)
    state = start_training(
        accelerator,
        network(channels_last=True),
        EarlyStopping("accuracy", 10**6),
        optimizer="adamw",
        lr=LR,
        warmup_steps=0,
        momentum=0.9,
        weight_decay=0.01,
        ema_decay=0.95,
    )
    for layer in state.module.modules() if not synchronised else ():
        if isinstance(layer, batchnorm.SyncBatchNorm):
            layer.__class__ = nn.BatchNorm2d  # type: ignore[assignment]
    for epoch in fit(
        accelerator,
        state,
        train_loader,
        val_loader,
        epochs=10**6,
        num_classes=10,
        label_smoothing=0.0,
        max_grad_norm=0.0,
        target_accuracy=0.0,
        signals=StopSignals(accelerator),
    ):
        if wait is not None:
            wait.append(epoch.data_wait_share)
        yield


def bare(digits: ImageSet) -> Iterator[None]:
    """The limit: our model, precision and batch over tensors in memory, with nothing around it, in one process."""
    processes, threads = dist.get_world_size(), torch.get_num_threads()
    images, labels = digits.images.to(DEVICE), digits.labels.to(DEVICE)
    model = network(channels_last=True).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    size = BATCH_SIZE * processes
    while True:
        if dist.get_rank() == 0:
            torch.set_num_threads(processes * threads)
            for start in range(0, len(digits) // size * size, size):
                with torch.autocast(DEVICE.type, torch.bfloat16, enabled=HALF):
                    logits = model(images[start : start + size])
                F.cross_entropy(logits, labels[start : start + size]).backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.set_num_threads(threads)
        yield


def plain_ddp(digits: ImageSet, *, like_ours: bool = False) -> Iterator[None]:
    """What people write by hand: TensorDataset, DistributedSampler, default DataLoader, DDP.

    Args:
        digits: to train on.
        like_ours: in our precision and memory format, in place of the default ones. The same goes for the next two.
    """
    dataset = _floats(digits)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(network(channels_last=like_ours))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=like_ours and HALF):
                logits = model(images)
            F.cross_entropy(logits, labels).backward()
            optimizer.step()
        epoch += 1
        yield


def plain_accelerate(digits: ImageSet, *, like_ours: bool = False) -> Iterator[None]:
    """The same with a plain Accelerate loop, which gathers its predictions."""
    accelerator = Accelerator(cpu=True)
    accelerator.native_amp = like_ours and HALF  # else that of the first Accelerator of this process: ours
    model = network(channels_last=like_ours)
    loader = DataLoader(_floats(digits), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR), loader)
    while True:
        for images, labels in loader:
            logits = model(images)
            accelerator.backward(F.cross_entropy(logits, labels))
            optimizer.step()
            optimizer.zero_grad()
            accelerator.gather_for_metrics((logits.argmax(1), labels))
        yield


def fabric(digits: ImageSet, *, like_ours: bool = False) -> Iterator[None]:
    """The same with Lightning Fabric."""
    from lightning_fabric import Fabric

    precision = "bf16-mixed" if like_ours and HALF else "32-true"
    run = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", precision=precision)
    run.launch()
    network_ = network(channels_last=like_ours)
    model, optimizer = run.setup(network_, torch.optim.AdamW(network_.parameters(), lr=LR))
    loader = run.setup_dataloaders(DataLoader(_floats(digits), batch_size=BATCH_SIZE, shuffle=True, drop_last=True))
    while True:
        for images, labels in loader:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
        yield


def _floats(digits: ImageSet) -> TensorDataset:
    return TensorDataset(digits.images.float() / 255, digits.labels)


# ---- measuring


def measure(rank: int, port: int, processes: int, rounds: int, epochs: int, output: Path) -> None:
    """All contenders in turn, on this process; rank 0 writes seconds per image to `output`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    dist.init_process_group("gloo")
    digits = read_files("")["train"]
    waits: list[float] = []
    contenders = {"ours": ours(digits, wait=waits), "bare loop, one process": bare(digits)}
    if processes > 1 and DEVICE.type == "cpu":  # the peers are written for CPUs
        contenders |= {
            "ours, plain BatchNorm": ours(digits, synchronised=False),
            "plain DDP": plain_ddp(digits),
            "plain DDP, our precision, format": plain_ddp(digits, like_ours=True),
            "plain Accelerate": plain_accelerate(digits),
            "plain Accelerate, our precision, format": plain_accelerate(digits, like_ours=True),
            "Lightning Fabric": fabric(digits),
            "Lightning Fabric, our precision, format": fabric(digits, like_ours=True),
        }
    images = len(digits) // (BATCH_SIZE * processes) * BATCH_SIZE * processes * epochs
    rates: dict[str, list[float]] = {name: [] for name in contenders}

    def run(name: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(epochs):
            next(contenders[name])
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter() - start

    for round_ in range(rounds + 1):
        for name in contenders:
            seconds = run(name)
            if round_ > 0:  # the first warms up
                rates[name].append(images / seconds)
    # How much of our step the processes wait for each other's messages, and for each other.
    waiting = {"BatchNorm's": 0.0, "the gradients'": 0.0}
    inside: list[str] = []

    def timed(wait: Callable[..., Any], whose: str) -> Callable[..., Any]:
        def timed_wait(*args: Any) -> Any:
            inside.append(whose)
            start = time.perf_counter()
            waited = wait(*args)
            if len(inside) == 1:  # BatchNorm's messages may wait as the gradients do
                waiting[whose] += time.perf_counter() - start
            inside.pop()
            return waited

        return timed_wait

    batchnorm.gather = timed(batchnorm.gather, "BatchNorm's")
    exchange._wait_for = timed(exchange._wait_for, "the gradients'")
    shares: dict[str, list[float]] = {whose: [] for whose in waiting}
    for _ in range(rounds if processes > 1 else 0):
        waiting.update(dict.fromkeys(waiting, 0.0))
        seconds = run("ours")
        for whose, waited in waiting.items():
            shares[whose].append(waited / seconds)
    if rank == 0:
        figures = {
            "images_per_second": rates,
            "collective_shares": {whose: statistics.median(values or [0.0]) for whose, values in shares.items()},
            "data_wait_share": statistics.median(waits),
        }
        output.write_text(json.dumps(figures))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes; default: 1 2")
    parser.add_argument("--json", default="benchmark_training.json", help="where to write the figures")
    args = parser.parse_args()
    rounds, epochs = (1, 1) if args.quick else (9, 2)
    cores = len(os.sched_getaffinity(0))
    everything: dict[str, Any] = {}
    for processes in args.processes:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // processes))
        mp.spawn(measure, (store.port, processes, rounds, epochs, Path(args.json)), nprocs=processes)
        figures = json.loads(Path(args.json).read_text())
        rates = figures["images_per_second"]
        figures["ours_over"] = {
            name: statistics.median(a / b for a, b in zip(rates["ours"], values, strict=True))
            for name, values in rates.items()
        }
        print(f"\n{processes} x {BATCH_SIZE} images a step, medians of {rounds} rounds")
        print(f"{'':40}{'images/s':>10}{'ours / it':>12}")
        for name, values in rates.items():
            print(f"{name:40}{statistics.median(values):10,.0f}{figures['ours_over'][name]:12.2f}")
        print(f"waiting for data: {figures['data_wait_share']:.1%} of our epoch")
        if processes > 1:
            shares = figures["collective_shares"]
            without = figures["ours_over"]["bare loop, one process"] / (1 - sum(shares.values()))
            parts = ", ".join(f"{whose} {share:.1%}" for whose, share in shares.items())
            print(f"in collectives: {parts} of our epoch; without them we would be at {without:.2f} of the bare loop")
        everything[str(processes)] = figures
    Path(args.json).write_text(json.dumps(everything, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
