"""The rows of the table, in the order in which they are checked."""

import json
import os
import platform
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object

import mnist_ddp
from mnist_ddp.check.network import Link, Traffic, all_gather_seconds, largest_difference, measure_link, world_sizes
from mnist_ddp.check.parity import (
    STEPS,
    global_batch_size,
    model_of,
    precision,
    step_difference,
    train_alone,
    train_together,
)
from mnist_ddp.check.speed import measure_speeds, new_state
from mnist_ddp.console import device_name
from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.data.reading import read_files
from mnist_ddp.distributed import check_same, on_main, open_once, together
from mnist_ddp.errors import UserError
from mnist_ddp.settings import Settings
from mnist_ddp.training.checkpoint import Checkpoints
from mnist_ddp.training.run_folder import RunFolder
from mnist_ddp.training.signals import StopSignals
from mnist_ddp.words import counted

_FREE_BYTES = 1 << 30
# In one step, fp32 on the device against float64 on the CPU. TF32, cuDNN's default for convolutions, keeps 10 bits.
_STEP_LOSS, _STEP_GRADIENT = 1e-3, 1e-2
_PARITY = {torch.float64: 1e-9, torch.float32: 1e-3}
_MOST_WAITING = 0.3
# Measured efficiency over the one that the network explains. Processes that share cores wait for each other's turns.
_LEAST_OF_PREDICTED = 1 / 3


@dataclass(frozen=True)
class Row:
    """What was found about one thing.

    Attributes:
        name: in the table.
        passed: on all processes.
        text: what was found; where it failed, on the first process where it did.
        advice: what to do where it failed.
        figures: for --json, in seconds, bytes and fractions.
    """

    name: str
    passed: bool
    text: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


Finding = tuple[bool, str, dict[str, Any]]


def on_all(name: str, advice: str, check: Callable[[], Finding]) -> Row:
    """Runs `check` on all processes, which call this together. A UserError is a failure that brings its own advice.

    Args:
        name, advice: of the row.
        check: returns whether it passed, what was found, and figures.
    """
    try:
        passed, text, figures = check()
    except UserError as error:
        passed, text, figures, advice = False, str(error), {}, ""
    except Exception as error:
        error.add_note(f"while checking: {name}")
        raise
    rank = int(os.environ.get("RANK", "0"))
    everyone = gather_object([(rank, os.uname().nodename, Row(name, passed, text, "" if passed else advice, figures))])
    for failed_rank, host, row in everyone:
        if not row.passed:
            where = f"rank {failed_rank} on {host}: " if failed_rank > 0 else ""
            return Row(name, False, where + row.text, row.advice, row.figures)
    return everyone[0][2]


def rows(accelerator: Accelerator, s: Settings) -> Iterator[Row]:
    """All processes iterate together, and get the same rows but for the figures of their own.

    Args:
        accelerator: of `start_accelerator`, in the settings' precision, without accumulation.
        s: of the run that is planned.
    """
    device, processes = accelerator.device, accelerator.num_processes

    yield on_all("versions", "install the same requirements.txt and the same copy of this code everywhere", _versions)
    agreement = on_all("settings", "give every process the same flags", lambda: _settings(s))
    yield agreement
    yield on_all(
        "launcher",
        "write into the launcher's config what this machine can do, see docs/machines.md",
        lambda: _launcher(accelerator),
    )
    yield on_all(
        "devices",
        "end the other programs that use the memory, or take another device with --gpu",
        lambda: _devices(device),
    )
    folder = on_all("run folder", "choose another --pt_path", lambda: _folder(s))
    yield folder

    sets: list[ImageSet] = []

    def read() -> Finding:
        sets.append(together(lambda: read_files("", cache_dir=s.cache_dir)["train"]))
        check_same({"the embedded digits (as a SHA-256)": sets[0].fingerprint()})
        return True, f"{len(sets[0]):,} digits, the same on all processes", {}

    data = on_all("data", "", read)
    yield data
    if not (sets and data.passed and agreement.passed):
        return  # whatever is computed from here on would differ for that reason
    (images,) = sets

    yield on_all(
        "step on the device",
        "the device computes wrong: update its driver, run its memory test, or leave it out with --gpu",
        lambda: _step(images, device, s),
    )
    yield on_all(
        f"{counted(processes, 'process')} = 1 process",
        "the processes do not train as one: run the tests of this project here, and do not train before they pass",
        lambda: _parity(accelerator, images, s),
    )
    yield from _speed_rows(accelerator, images, s)
    if folder.passed:
        yield on_all("checkpoint", "choose another --pt_path", lambda: _checkpoint(accelerator, images, s))
    yield on_all(
        "stop signal",
        "the processes do not stop together: look for a launcher or a container that keeps signals back",
        lambda: _stop_signal(accelerator),
    )


def _versions() -> Finding:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "mnist_ddp": mnist_ddp.__version__,
    }
    if torch.cuda.is_available():
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    check_same({f"the version of {name}": version for name, version in versions.items()})
    return True, ", ".join(f"{name} {version}" for name, version in versions.items()), versions


def _settings(s: Settings) -> Finding:
    own = {name: getattr(s, name) for name in ("seed", "width", "batch_size", "optimizer", "lr", "mixed_precision")}
    check_same({f"--{name}": value for name, value in own.items()})
    return True, f"seed {s.seed}, width {s.width}, {s.batch_size} images per process and step", own


def _launcher(accelerator: Accelerator) -> Finding:
    asked_size = os.environ.get("WORLD_SIZE", "1")
    asked_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    names = {"no": "fp32"}
    precision = accelerator.mixed_precision
    backend = dist.get_backend() if dist.is_initialized() else "none"
    threads = torch.get_num_threads()
    text = (
        f"asked for {asked_size}, {names.get(asked_precision, asked_precision)}; runs {accelerator.num_processes} "
        f"(this is rank {accelerator.process_index}, local {accelerator.local_process_index}), backend {backend}, "
        f"{names.get(precision, precision)}, {counted(threads, 'thread')} each"
    )
    figures = {
        "world_size": accelerator.num_processes,
        "backend": backend,
        "mixed_precision": precision,
        "threads": threads,
    }
    passed = int(asked_size) == accelerator.num_processes and asked_precision in ("no", precision)
    return passed, text, figures


def _devices(device: torch.device) -> Finding:
    pages = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
    total, free = (count * os.sysconf("SC_PAGE_SIZE") for count in pages)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{device_name(device)} ({device}), {free / 1e9:.1f} of {total / 1e9:.1f} GB free, {cores} CPU cores"
    hosts = gather_object([(os.uname().nodename, text)])
    machines = len({host for host, _ in hosts})
    return (
        free >= _FREE_BYTES,
        text + (f"; {machines} machines" if machines > 1 else ""),
        {"free_bytes": free, "devices": hosts},
    )


def _folder(s: Settings) -> Finding:
    existed = Path(s.pt_path).exists()
    folder, hosts = open_once(s.pt_path, lambda: RunFolder(s.pt_path, "auto", s.keep_checkpoints))
    if folder is None:
        return True, "", {}
    text = f"{s.pt_path} can be written"
    if len(hosts) > 1:
        text += f" on {len(hosts)} machines, which do not share it"
    free = shutil.disk_usage(s.pt_path).free
    if not existed:
        shutil.rmtree(s.pt_path)
    return True, f"{text}, {free / 1e9:,.1f} GB free", {"free_bytes": free, "hosts": hosts}


def _step(images: ImageSet, device: torch.device, s: Settings) -> Finding:
    loss, gradient = step_difference(images, device, width=s.width, seed=s.seed)
    text = (
        f"fp32 on {device.type} against float64 on the CPU: loss {loss:.1e}, gradients {gradient:.1e} (relative) apart"
    )
    figures = {"loss_difference": loss, "gradient_difference": gradient}
    return loss <= _STEP_LOSS and gradient <= _STEP_GRADIENT, text, figures


def _parity(accelerator: Accelerator, images: ImageSet, s: Settings) -> Finding:
    dtype = precision(accelerator.device)
    batch = global_batch_size(accelerator.num_processes)
    expected = on_main(lambda: train_alone(images, batch, accelerator.device, width=s.width, seed=s.seed))
    got = train_together(accelerator, images, width=s.width, seed=s.seed)
    differences = {"losses": largest_difference(got.losses, expected.losses)}
    for name, value in expected.weights.items():
        part = "BatchNorm statistics" if "running_" in name else "weights"
        differences[part] = max(differences.get(part, 0.0), largest_difference(got.weights[name], value))
    worst = max(differences, key=differences.__getitem__)
    text = (
        f"{STEPS} steps of {batch} digits in {str(dtype).removeprefix('torch.')}: "
        + ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
        + f" apart (worst: {worst})"
    )
    figures = {name.replace(" ", "_") + "_difference": value for name, value in differences.items()}
    return differences[worst] <= _PARITY[dtype], text, figures


def _speed_rows(accelerator: Accelerator, images: ImageSet, s: Settings) -> Iterator[Row]:
    """Speed, waiting for data, network and prediction, which build on each other."""
    N, device = accelerator.num_processes, accelerator.device
    speeds = measure_speeds(accelerator, images, s)
    durations: list[float] = gather_object(speeds.beside.steps)
    compute = sum(durations) / len(durations)
    step = max(gather_object([speeds.together.step_seconds]))
    traffic = Traffic.of(model_of(images, width=s.width, seed=s.seed))
    link: Link | None = None
    if N > 1:
        link, seconds = measure_link(traffic, device)
        exchange = link.seconds_per_step(traffic, N)

        def network() -> Finding:
            assert link is not None
            gather = all_gather_seconds(max(traffic.gathered), device)
            text = (
                f"all-reduce of 4 bytes {seconds[4] * 1e3:.2f} ms, of the gradients ({traffic.reduced / 1e3:.0f} kB) "
                f"{seconds[traffic.reduced] * 1e3:.2f} ms; all-gather of {max(traffic.gathered)} bytes "
                f"{gather * 1e3:.2f} ms; latency {link.alpha * 1e6:.0f} us, bandwidth {link.beta / 1e6:,.0f} MB/s; "
                f"exchanging takes {exchange * 1e3:.1f} ms of a step, computing {compute * 1e3:.1f} ms"
            )
            figures = {
                "all_reduce_seconds": seconds,
                "all_gather_seconds": {max(traffic.gathered): gather},
                "alpha_seconds": link.alpha,
                "beta_bytes_per_second": link.beta,
                "exchange_seconds_per_step": exchange,
            }
            return exchange <= compute, text, figures

        yield on_all(
            "network",
            "exchanging takes longer than computing: choose the fastest interface with GLOO_SOCKET_IFNAME or "
            "NCCL_SOCKET_IFNAME, raise --batch_size, or use fewer machines",
            network,
        )

    def speed() -> Finding:
        rate_one, rate_all = s.batch_size / speeds.alone.step_seconds, N * s.batch_size / step
        efficiency, of_machine = compute / step, rate_all / (N * rate_one)
        text = f"{rate_one:,.0f} images/s with 1 process"
        figures = {
            "images_per_second_one": rate_one,
            "images_per_second_all": rate_all,
            "alone_step_seconds": speeds.alone.step_seconds,
            "compute_step_seconds": compute,
            "compute_steps_seconds": durations,
            "step_seconds": step,
            "efficiency": efficiency,
            "efficiency_of_one_alone": of_machine,
        }
        if link is None:
            return True, text, figures
        expected = link.efficiency(traffic, N, durations)
        text += (
            f", {rate_all:,.0f} with {N}: {of_machine:.0%} of {N} times one alone, {efficiency:.0%} of what the {N} "
            f"reach without exchanging (predicted {expected:.0%})"
        )
        return efficiency >= _LEAST_OF_PREDICTED * expected, text, figures | {"predicted_efficiency": expected}

    yield on_all(
        "speed",
        "the processes wait for each other more than the network explains: start fewer processes than cores, end other "
        "programs, look for a slower machine among them",
        speed,
    )
    yield on_all(
        "waiting for data",
        "the data are too slow: keep --cache_dir on a local disk, and give the processes more memory or cores",
        lambda: (
            speeds.together.wait_share <= _MOST_WAITING,
            f"{speeds.together.wait_share:.1%} of a step",
            {"wait_share": speeds.together.wait_share},
        ),
    )
    if link is not None:
        predicted = {n: link.efficiency(traffic, n, durations) for n in world_sizes()}
        yield on_all(
            "prediction",
            "",
            lambda: (
                True,
                "efficiency with more processes on this network, each with a core or GPU of its own: "
                + ", ".join(f"{n}: {value:.0%}" for n, value in predicted.items()),
                {"efficiency": predicted, "traffic": {"gathered": traffic.gathered, "reduced": traffic.reduced}},
            ),
        )


def _checkpoint(accelerator: Accelerator, images: ImageSet, s: Settings) -> Finding:
    state = new_state(accelerator, images, s)
    snapshot = state.snapshot(accelerator, {})
    if not accelerator.is_main_process:
        return True, "", {}
    existed = Path(s.pt_path).exists()
    scratch = Path(s.pt_path) / ".check"
    started = time.perf_counter()
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        checkpoints = Checkpoints(scratch, 1)
        checkpoints.save(snapshot)
        wrote = time.perf_counter()
        back, _ = checkpoints.newest()
        read = time.perf_counter()
        assert back is not None
        same = back.values == json.loads(json.dumps(snapshot.values)) and all(
            torch.equal(back.tensors[name], tensor) for name, tensor in snapshot.tensors.items()
        )
        size = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
    finally:
        shutil.rmtree(scratch if existed else s.pt_path, ignore_errors=True)
    text = f"{size / 1e3:,.0f} kB written in {wrote - started:.3f} s, read back in {read - wrote:.3f} s"
    if not same:
        text += ", and not the same"
    return same, text, {"bytes": size, "write_seconds": wrote - started, "read_seconds": read - wrote}


def _stop_signal(accelerator: Accelerator) -> Finding:
    """SIGUSR1 to the last rank, by itself; all must agree on it at the same step."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        signals = StopSignals(accelerator)
        if accelerator.is_last_process:
            os.kill(os.getpid(), signal.SIGUSR1)
        steps = 1
        while not signals.step() and steps < 100:
            steps += 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    agreed = gather_object([(steps, signals.agreed)])
    passed = len(set(agreed)) == 1 and signals.agreed == signal.SIGUSR1
    return passed, f"one to rank {len(agreed) - 1} stops all after step {steps}" if passed else f"{agreed}", {}
