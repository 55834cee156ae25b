"""What makes N processes one run: how they start, the Accelerator that joins them, and how they fail together."""

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import ipaddress
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    LoggerType,
    TorchDynamoPlugin,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor
from tqdm import tqdm

from mnist_ddp.errors import UserError, exit_with_one_line, stop_signals_received, tell, wait_for_first_speaker
from mnist_ddp.rendezvous import INIT_METHOD
from mnist_ddp.settings import Settings
from mnist_ddp.words import counted

T = TypeVar("T")

# How long a process that lost its peers waits before it speaks: the launcher ends it within a second of the peer's own
# exit, so that only the process at fault is heard.
_PEER_GRACE_SECONDS = 6.0
# For how long each of the parent's three steps lets the other processes end. Shorter than `wait_for_first_speaker`.
_CHILD_GRACE_SECONDS = 0.5
# How long it waits for the answer of a store whose machine may be gone.
_STORE_SECONDS = 4.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


# ---- starting processes


def launch(train: Callable[[Settings], int], settings: Settings) -> int:
    """Runs `train(settings)` as one of the launcher's processes, or in processes started here.

    Under torchrun or accelerate launch this process is already one of WORLD_SIZE. Without a launcher it is the only
    one, or the parent of `settings.num_processes` others.

    Returns:
        The exit status: that of `train`, or that of the process at fault.

    Raises:
        UserError: the number of processes or `--gpu` does not fit the launcher or the machine, or the port is taken.
    """
    if settings.gpu:
        # Both must precede the first use of CUDA, which would count the fastest GPU as the first.
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.gpu
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    launched = os.environ.get("WORLD_SIZE")
    if launched is not None:
        _check_launcher(launched)
    if launched is not None and settings.num_processes not in (1, int(launched)):
        raise UserError(
            f"--num_processes {settings.num_processes}: the launcher started {launched}; leave --num_processes out"
        )
    if launched is None and settings.num_processes > 1:
        _check_devices(settings.gpu, settings.num_processes)
        return _start_processes(train, settings)
    _check_devices(settings.gpu, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return _run(train, settings)


def _check_launcher(world_size: str) -> None:
    """Raises UserError where WORLD_SIZE stands alone: left over from another program, not set by a launcher."""
    if not world_size.isdecimal() or int(world_size) < 1:
        raise UserError(f"WORLD_SIZE is {world_size!r} in the environment, and no number of processes; unset it")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if int(world_size) > 1 and missing:
        raise UserError(
            f"WORLD_SIZE is {world_size} in the environment, but {' and '.join(missing)} is not set; unset WORLD_SIZE, "
            "or start with torchrun or accelerate launch"
        )


def _start_processes(train: Callable[[Settings], int], settings: Settings) -> int:
    """Starts `settings.num_processes` processes, which meet at a store that this process keeps."""
    # As torchrun's agent does, the parent binds the port and keeps the store: with port 0 the kernel picks a free one,
    # and no other program can take it between the choice and the use.
    listener = _listen(settings.master_addr, settings.port)
    os.environ.update(
        MASTER_ADDR=listener.getsockname()[0],  # resolved once: a name may have several addresses
        MASTER_PORT=str(listener.getsockname()[1]),
        WORLD_SIZE=str(settings.num_processes),
        LOCAL_WORLD_SIZE=str(settings.num_processes),
        TORCHELASTIC_USE_AGENT_STORE="True",  # env:// rendezvous then connects, and does not try to bind
        OMP_NUM_THREADS=str(_threads_per_process(settings.num_processes)),
    )
    method = start_method(sys.platform, gpu=torch.accelerator.is_available())
    if method == "fork":
        from torch import _dynamo  # noqa: F401  # as every optimizer and DDP do; takes nearly as long as torch itself
    gc.freeze()  # what is imported is not looked through at exit, which takes a second, and stays shared with the forks
    # Before the store, whose threads a fork would lack.
    context = mp.start_processes(
        _run_self_started,
        args=(os.getpid(), train, settings),
        nprocs=settings.num_processes,
        join=False,
        start_method=method,
    )
    store = dist.TCPStore(  # noqa: F841  # serves as long as it is referred to
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    assert context is not None
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for pid in context.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in _STOP_SIGNALS:
        signal.signal(number, pass_on)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(
        logging.ERROR
    )  # it would report each process that it ends
    try:
        # When one has failed, the others may end by themselves, then get SIGTERM, then SIGKILL.
        while not context.join(grace_period=_CHILD_GRACE_SECONDS):
            pass
    except mp.ProcessExitedException as error:
        if received and error.exit_code < 0:  # before training, where there was nothing to save
            return 128 + received[0]
        if error.exit_code < 0:
            print(
                f"error: process {error.error_index} was ended by {error.signal_name}; the run has stopped",
                file=sys.stderr,
            )
        return error.exit_code if error.exit_code > 0 else 1
    return 0


def start_method(system: str, gpu: bool) -> str:
    """fork where it can be: forks need not import torch again, which takes longer than all else before the first step.

    A process that has used a GPU's driver must not be forked; nor one on macOS, whose libraries have threads.

    Args:
        system: sys.platform.
        gpu: whether this machine has one.
    """
    return "fork" if system == "linux" and not gpu else "spawn"


def _listen(address: str, port: int) -> socket.socket:
    """A socket that listens on `port` of `address`; on a free one where that is 0.

    Raises:
        UserError: the port is taken, or the address is not this machine's.
    """
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:  # the latter of a name that cannot be one
        raise UserError(
            f"--port {port} on {address} cannot be used: it is taken or the address is not this machine's; choose "
            "another, or leave --port out for a free one"
        ) from error


def _run_self_started(rank: int, parent: int, train: Callable[[Settings], int], settings: Settings) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in the parent: torch would take Ctrl-C for success
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    _end_with(parent)
    with exit_with_one_line():
        sys.exit(_run(train, settings))


def _run(train: Callable[[Settings], int], settings: Settings) -> int:
    """`train(settings)`, with each failure told once by the process at fault."""
    # By default a semaphore that processes share, which one that is ended leaks, with a warning. Only one draws a bar.
    tqdm.set_lock(threading.RLock())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with(os.getppid())
    try:
        status = train(settings)
        # Now that the model is gone: the reducer of a DDP that outlives its group waits for Gloo's thread, and holds
        # the interpreter's lock, which that thread may need to let go of the last tensors. One run in 70 hung so.
        if dist.is_initialized():
            dist.destroy_process_group()
        return status
    except Exception as error:
        faulthandler.cancel_dump_traceback_later()
        for number in _STOP_SIGNALS:  # the launcher may end this process now
            signal.signal(number, signal.SIG_DFL)
        if isinstance(error, UserError) and not dist.is_initialized():
            raise
        if isinstance(error, UserError):
            tell(error)
            _leave(2)
        if not _lost_peer(error):
            wait_for_first_speaker(1.5)
            traceback.print_exc()
            _leave(1)
        rank = os.environ.get("RANK", "0")
        if "timed out" in str(error).lower() and dist.is_initialized():
            silent = _silent_ranks(rank)
            first_here = int(rank) - int(os.environ.get("LOCAL_RANK", "0"))
            if set(range(first_here, int(rank))) <= set(silent):  # once for each machine
                for other in silent:
                    print(
                        f"error: rank {other} is stuck or out of reach: it kept the others waiting until the timeout",
                        file=sys.stderr,
                    )
            if silent:
                time.sleep(_PEER_GRACE_SECONDS)
                _leave(1)
        elif stop_signals_received:  # the launcher is ending this process, and the peer at fault has spoken
            _leave(1)
        time.sleep(_PEER_GRACE_SECONDS)
        print(
            f"error: rank {rank} lost contact with another process, whose own message says why; without one it was "
            f"killed or its machine is gone ({str(error).splitlines()[0]})",
            file=sys.stderr,
        )
        _leave(1)


def _leave(status: int) -> NoReturn:
    """Ends this process at once: torn down while its peers leave too, a process group may wait for them, or abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with(parent: int) -> None:
    """Has the kernel stop this process, as SIGTERM does, when its launcher is killed."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # 1 = PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was killed before this line
            os.kill(os.getpid(), signal.SIGTERM)


def _silent_ranks(rank: str) -> list[int]:
    """The ranks that did not notice the timeout, and so were not waiting; none where this cannot be found out.

    Asks the store of the process group, which never answers if it is the way to its machine that is broken.
    """
    silent: list[int] = []

    def ask() -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"timed_out/{rank}", "")
        time.sleep(1)  # the others notice at about the same time
        others = range(dist.get_world_size())
        silent.extend([other for other in others if not store.check([f"timed_out/{other}"])])

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_STORE_SECONDS)
    return silent


def _lost_peer(error: BaseException) -> bool:
    """Whether `error` only says that another process of the group has gone.

    NCCL and the store raise subclasses of DistError. Gloo raises a plain RuntimeError, told by its text.
    """
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text.lower() or "Connection closed by peer" in text)


# ---- the Accelerator


def start_accelerator(
    *,
    mixed_precision: str,
    gradient_accumulation_steps: int,
    timeout_seconds: float,
    log_with: str,
    project_dir: str,
    compile: bool = False,
) -> Accelerator:
    """The Accelerator of this process, on a GPU where there is one and else on the CPU.

    Raises:
        UserError: the launcher's WORLD_SIZE and the number of joined processes differ, the other machines could not
            reach this one, or the tracker's package, or a compiler for `compile`, is missing.
    """
    if log_with != "none" and LoggerType(log_with) not in get_available_trackers():  # Accelerate would go on without it
        raise UserError(f"--log_with {log_with}: needs the package {log_with}: pip install {log_with}")
    use_cpu = not torch.accelerator.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as TorchInductor looks for it
    if compile and use_cpu and shutil.which(compiler) is None:
        raise UserError(f"--compile true: needs a C++ compiler, and there is no {compiler}: apt-get install g++")
    if use_cpu:
        threads = _threads_per_process(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # Accelerate warns where it has to choose
        _keep_freed_memory()
        _check_interface()
    accelerator = Accelerator(
        # Without cpu=True the launchers' processes would not join on a machine without GPUs: N separate trainings.
        cpu=use_cpu,
        mixed_precision=resolve_precision(
            mixed_precision, "cpu" if use_cpu else torch.accelerator.current_accelerator()
        ),
        gradient_accumulation_steps=gradient_accumulation_steps,
        dynamo_plugin=TorchDynamoPlugin(backend="inductor") if compile else None,
        log_with=None if log_with == "none" else log_with,
        project_dir=project_dir,
        step_scheduler_with_optimizer=False,
        # Uneven: padding would count samples of an evaluation twice.
        dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=True),
        kwargs_handlers=[
            InitProcessGroupKwargs(
                init_method=INIT_METHOD, timeout=timedelta(seconds=collective_seconds(timeout_seconds))
            ),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise UserError(
            f"the launcher started {counted(launched, 'process')} but {accelerator.num_processes} joined the run; "
            "start it with: accelerate launch --multi_gpu --num_processes N train_accel.py"
        )
    return accelerator


@contextlib.contextmanager
def hidden(package: str) -> Iterator[None]:
    """Makes `package` look as if it were not installed, for the block; one that is imported already stays."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # which Python documents for this
    try:
        yield
    finally:
        del sys.modules[package]


def collective_seconds(timeout_seconds: float) -> float:
    """When a collective gives up: so long before the timeout that its process can say who is missing, and leave."""
    return timeout_seconds - min(10.0, timeout_seconds / 5)


def _keep_freed_memory() -> None:
    """Has the C library keep the memory of one step for the next.

    By default it returns large blocks to the kernel, which maps and zeroes them anew in each step.
    """
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(option, 32 << 20)  # bytes; the most that glibc takes for the second


def _check_interface() -> None:
    """Raises UserError where Gloo would tell the other machines an address that only this one can reach.

    Gloo takes the address of the host name, and 127.0.0.1 where that is not known. The others would then try to connect
    to themselves, until the timeout.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    one_machine = world_size == os.environ.get("LOCAL_WORLD_SIZE", world_size)
    master = os.environ.get("MASTER_ADDR", "localhost")
    if one_machine or "GLOO_SOCKET_IFNAME" in os.environ or _is_loopback(master, unknown=False):
        return
    name = os.uname().nodename
    if _is_loopback(name, unknown=True):
        interface = _interface_towards(master) or f"the one that `ip route get {master}` shows"
        raise UserError(
            f"the name of this machine, {name}, stands for an address that other machines cannot reach; "
            f"set GLOO_SOCKET_IFNAME={interface}, on each machine to its own interface, or mend /etc/hosts"
        )


def _is_loopback(name: str, unknown: bool) -> bool:
    """Whether `name` resolves to this machine's own 127.0.0.1 or the like; `unknown` where it does not resolve."""
    try:
        first = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return unknown
    return ipaddress.ip_address(first).is_loopback


def _interface_towards(name: str) -> str | None:
    """The network interface from which packets to `name` leave; None where IPv4 does not tell."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((name, 9))  # UDP: sends nothing
        own_address = socket.inet_aton(probe.getsockname()[0])
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                request = interface.encode().ljust(256, b"\0")
                if fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24] == own_address:  # SIOCGIFADDR
                    return interface
    return None


def resolve_precision(requested: str, device: torch.device | str | None) -> str:
    """The precision to train in: `requested`, or what suits the device where that is "auto" or cannot work there.

    Returns:
        "no", "bf16" or "fp16", as Accelerate names them.
    """
    on_cpu = torch.device(device or "cpu").type == "cpu"
    if on_cpu:
        # False where bf16 is emulated, and slower than fp32.
        native_bf16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    else:
        native_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    best = "bf16" if native_bf16 else "no"
    if requested == "auto":
        asked_of_launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        requested = asked_of_launcher if asked_of_launcher in ("bf16", "fp16") else best
    if requested == "fp16" and on_cpu:
        if os.environ.get("RANK", "0") == "0":
            name = "bf16" if best == "bf16" else "fp32"
            print(f"warning: fp16 needs a GPU; training in {name}", file=sys.stderr)
        return best
    return requested


def _threads_per_process(local_processes: int) -> int:
    """CPU threads of each process: its share of the cores, unless the user said otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // local_processes)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    # torchrun sets 1 where it starts several processes, and accelerate launch on CPUs always.
    by_launcher = asked == "1" and not {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"}.isdisjoint(os.environ)
    return int(asked) if asked.isdigit() and int(asked) > 0 and not by_launcher else share


def _check_devices(gpu: str, local_processes: int) -> None:
    """Raises UserError where `--gpu` names a GPU that is not there, or processes outnumber the GPUs."""
    gpus = torch.cuda.device_count()
    if gpu and gpus < len(gpu.split(",")):
        # The driver's list ends at the first index that does not exist.
        missing = gpu.split(",")[gpus]
        raise UserError(f"--gpu {gpu}: there is no GPU {missing} on this machine; nvidia-smi -L lists those that are")
    if local_processes > gpus > 0 and os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true":
        raise UserError(
            f"{counted(local_processes, 'process')} but {counted(gpus, 'GPU')} on this machine; this fits: "
            f"accelerate launch {'--multi_gpu ' if gpus > 1 else ''}--num_processes {gpus} train_accel.py"
        )


# ---- deciding together


def together(prepare: Callable[[], T]) -> T:
    """`prepare()` on every process; a UserError on any of them is raised on all.

    All processes must call it: it gathers.

    Raises:
        UserError: that of the lowest rank that had one.
    """
    value: T | None = None
    message: str | None = None
    try:
        value = prepare()
    except UserError as error:
        message = str(error)
    messages = gather_object([message])
    first = next((said for said in messages if said is not None), None)
    if first is not None:
        raise UserError(first)
    return value  # type: ignore[return-value]


def on_main(produce: Callable[[], T]) -> T:
    """`produce()` on the main process alone; its value, or its UserError, goes to all.

    All processes must call it: it broadcasts. The value is pickled.
    """
    value = together(lambda: produce() if PartialState().is_main_process else None)
    return broadcast_object_list([value])[0]


def from_furthest(produce: Callable[[], T], progress: Callable[[T], tuple[int, ...]]) -> T:
    """`produce()` on every process; the value that is furthest, by `progress`, goes to all.

    All processes must call it: it gathers and broadcasts. The value is pickled. Of equal ones, it is the lowest rank's.

    Raises:
        UserError: that of the lowest rank that had one.
    """
    value = together(produce)
    everyone = gather_object([progress(value)])
    return broadcast_object_list([value], from_process=everyone.index(max(everyone)))[0]


def open_once(path: str, open_folder: Callable[[], T]) -> tuple[T | None, list[str]]:
    """Opens a folder on one process for each folder that `path` stands for.

    Machines that share a file system have one, which rank 0 opens. Where they do not, each has its own, opened by its
    first process. All processes must call it: it gathers.

    Args:
        path: of the folder, which exists once `open_folder` returns.
        open_folder: returns the opened folder, or raises UserError.

    Returns:
        What this process opened, None where another one does; and the names of the machines that have the folder.

    Raises:
        UserError: that of the lowest rank that had one.
    """
    state = PartialState()

    def leave_mark() -> Path:
        # A new name each time: a network file system may remember for a while that another was missing.
        mark = Path(path) / f".shared-{uuid.uuid4().hex}"
        mark.touch()
        return mark

    folder = together(lambda: open_folder() if state.is_main_process else None)
    mark = on_main(leave_mark)
    own = state.is_local_main_process and not mark.exists()
    try:
        folder = together(lambda: open_folder() if own else folder)  # all have looked for the mark once it returns
    finally:
        if state.is_main_process:
            mark.unlink(missing_ok=True)
    return folder, gather_object([os.uname().nodename] if folder is not None else [])


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of all processes, in rank order, on the CPU; each process may have another number of them, or none.

    All processes must call it: it gathers.
    """
    return torch.cat(gather_object([rows.cpu()]))


def check_same(description: Mapping[str, Any]) -> None:
    """Compares what must be the same on all processes.

    All processes must call it: it gathers.

    Raises:
        UserError: an entry differs; names it, and a process on either side.
    """
    everyone = gather_object([(os.uname().nodename, dict(description))])
    first_host, first = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        for name, value in first.items():
            if other.get(name) != value:
                raise UserError(
                    f"the processes do not agree on {name}: {value} on rank 0 ({first_host}), "
                    f"{other.get(name)} on rank {rank} ({host}); all must have the same"
                )


@contextlib.contextmanager
def leaving(accelerator: Accelerator) -> Iterator[Accelerator]:
    """Waits for all processes when the block ends without a failure.

    The process group stays, see `_run`. After a failure it is left to the exit of the process: closing it would wait
    for peers that are still in a collective.
    """
    yield accelerator
    accelerator.wait_for_everyone()  # a launcher ends the others when one leaves with a status other than 0
