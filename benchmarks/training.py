"""Training throughput, side by side with the bare loop and with what people write by hand.

    python -m benchmarks.training            # a few minutes on two cores
    python -m benchmarks.training --quick    # a smoke test

All contenders train the same network with the same rule on the same digits, without augmentation, in turn. The bare
loop runs in one of our processes, with the threads of all. The peers run in processes of their own, whose C library
allocates memory as it does for everybody: ours have it keep what a step frees. Prints images per second and our ratio
to each contender, as the median of the rounds' ratios, and writes the figures to a JSON file.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
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
from mnist_ddp.settings import Settings
from mnist_ddp.training.early_stopping import EarlyStopping
from mnist_ddp.training.loop import fit
from mnist_ddp.training.signals import StopSignals
from mnist_ddp.training.state import start_training

BATCH_SIZE = 256
LR = 1e-3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = resolve_precision("auto", DEVICE) == "bf16"


def network(channels_last: bool) -> ConvNet:
    model = build_model(tuple("0123456789"), (28, 28), width=Settings.width, mean=0.1307, std=0.3081, seed=0)
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

OURS, BARE, PLAIN = "ours", "bare loop, one process", "ours, plain BatchNorm"


def contend(rank: int, port: int, processes: int, epochs: int, side: str, few: int, orders: Connection) -> None:
    """One process of a side: trains as the contender that `orders` names, and answers with what it measured.

    Args:
        rank, processes: of each contender.
        port: of the store in which they find each other.
        epochs: for each order.
        side: "ours", with the bare loop, or "theirs".
        few: how many of the digits to train on; 0 for all.
        orders: gives names, and an empty one for the end. Gets the contenders' names first, then, for each order,
            images per second, the shares of the time spent in collectives, and that of our epoch spent waiting for
            batches.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    dist.init_process_group("gloo")
    digits = read_files("")["train"]
    if few:
        digits = replace(digits, images=digits.images[:few], labels=digits.labels[:few])
    waits = [0.0]
    contenders: dict[str, Iterator[None]]
    if side == "ours":
        contenders = {OURS: ours(digits, wait=waits), BARE: bare(digits), PLAIN: ours(digits, synchronised=False)}
    else:
        contenders = {
            "plain DDP": plain_ddp(digits),
            "plain DDP, our precision, format": plain_ddp(digits, like_ours=True),
            "plain Accelerate": plain_accelerate(digits),
            "plain Accelerate, our precision, format": plain_accelerate(digits, like_ours=True),
            "Lightning Fabric": fabric(digits),
            "Lightning Fabric, our precision, format": fabric(digits, like_ours=True),
        }
    waiting = _time_waiting()
    images = len(digits) // (BATCH_SIZE * processes) * BATCH_SIZE * processes * epochs
    orders.send(list(contenders))
    while name := orders.recv():
        waiting.update(dict.fromkeys(waiting, 0.0))
        dist.barrier()
        start = time.perf_counter()
        for _ in range(epochs):
            next(contenders[name])
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        seconds = time.perf_counter() - start
        shares = {whose: waited / seconds for whose, waited in waiting.items()}
        orders.send({"images_per_second": images / seconds, "collectives": shares, "data_wait": waits[-1]})
    dist.destroy_process_group()


def _time_waiting() -> dict[str, float]:
    """Seconds, counted from here on, for which our steps wait for the other processes and their messages."""
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
    return waiting


def measure(processes: int, rounds: int, epochs: int, few: int) -> dict[str, Any]:
    """All contenders in turn.

    Args:
        processes: of each contender, but for the bare loop's one.
        rounds: that count; one more warms up.
        epochs: of each contender in each round.
        few: how many of the digits to train on; 0 for all.
    """
    context = mp.get_context("spawn")
    sides: list[list[Connection]] = []  # for each its processes'
    stores: list[dist.TCPStore] = []
    workers: list[Any] = []
    # The peers are written for CPUs, and for several processes.
    for whose in ("ours", "theirs") if processes > 1 and DEVICE.type == "cpu" else ("ours",):
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        pipes = [context.Pipe() for _ in range(processes)]
        started = [
            context.Process(target=contend, args=(rank, store.port, processes, epochs, whose, few, end), daemon=True)
            for rank, (_, end) in enumerate(pipes)
        ]
        for worker in started:
            worker.start()
        for _, end in pipes:
            end.close()  # so that a worker's death ends the wait for its answer
        sides.append([here for here, _ in pipes])
        stores.append(store)
        workers += started
    names: list[tuple[str, list[Connection]]] = []
    for side in sides:
        contenders, *_ = [connection.recv() for connection in side]
        names += [(name, side) for name in contenders]
    rates: dict[str, list[float]] = {name: [] for name, _ in names}
    own: list[dict[str, Any]] = []
    for round_ in range(rounds + 1):
        for name, side in names:
            for connection in side:
                connection.send(name)
            first, *_ = [connection.recv() for connection in side]
            if round_ > 0:  # the first warms up
                rates[name].append(first["images_per_second"])
                own += [first] if name == OURS else []
    for connection in itertools.chain(*sides):
        connection.send("")
    for worker in workers:  # the stores live until the processes have left their groups
        worker.join(60)
    return {
        "images_per_second": rates,
        "ours_over": {
            name: statistics.median(a / b for a, b in zip(rates[OURS], values, strict=True))
            for name, values in rates.items()
        },
        "collective_shares": {
            whose: statistics.median(one["collectives"][whose] for one in own) for whose in own[0]["collectives"]
        },
        "data_wait_share": statistics.median(one["data_wait"] for one in own),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, a smoke test")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes; default: 1 2")
    parser.add_argument("--json", default="benchmark_training.json", help="where to write the figures")
    args = parser.parse_args()
    rounds, epochs = (1, 1) if args.quick else (9, 2)
    cores = len(os.sched_getaffinity(0))
    everything: dict[str, Any] = {}
    for processes in args.processes:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // processes))
        figures = measure(processes, rounds, epochs, 2 * BATCH_SIZE * processes if args.quick else 0)
        rates = figures["images_per_second"]
        print(f"\n{processes} x {BATCH_SIZE} images a step, medians of {rounds} rounds")
        print(f"{'':40}{'images/s':>10}{'ours / it':>12}")
        for name, values in rates.items():
            print(f"{name:40}{statistics.median(values):10,.0f}{figures['ours_over'][name]:12.2f}")
        print(f"waiting for data: {figures['data_wait_share']:.1%} of our epoch")
        if processes > 1:
            shares = figures["collective_shares"]
            without = figures["ours_over"][BARE] / (1 - sum(shares.values()))
            parts = ", ".join(f"{whose} {share:.1%}" for whose, share in shares.items())
            print(f"in collectives: {parts} of our epoch; without them we would be at {without:.2f} of the bare loop")
        everything[str(processes)] = figures
    Path(args.json).write_text(json.dumps(everything, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
