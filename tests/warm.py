"""Python commands without the seconds that importing torch takes: each is forked from a process that has done so.

A folder of programs named `python`, `torchrun` and `accelerate` goes to the front of PATH. Such a program is a small
process of its own, which has the command's environment, passes on signals, and ends as the command does; what it does
is done by a fork of a server, with the program's arguments, environment, folder, open files, namespaces and cores. A
fork ends when its program is killed. What depends on a fresh interpreter or on parents is tested without: see
`launching.run`.

    python -IS tests/warm.py SOCKET python train_accel.py ...
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

# Not the project's own modules, which some tests change.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.run",
    "torch.multiprocessing",
    "accelerate.commands.accelerate_cli",
    "accelerate.commands.launch",
    "pandas",
    "pyarrow.ipc",
    "safetensors.torch",
    "yaml",
    "tyro",
    "tqdm",
    "huggingface_hub.repocard",
    "PIL.Image",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
)
_NAMESPACES = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}  # CLONE_NEW* of linux/sched.h
_FIRST_OWN_FD = 3


def client(address: str, words: list[str]) -> int:
    """Has the server run `words`; returns the status, or ends by the signal that the command ended by."""
    with socket.socket(socket.AF_UNIX) as server:
        fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd != server.fileno() and _is_open(fd)]
        server.connect(address)
        request = {
            "words": words,
            "python": os.path.join(os.path.dirname(address), "python"),
            "pid": os.getpid(),
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "fds": fds,
        }
        text = json.dumps(request).encode()
        socket.send_fds(server, [len(text).to_bytes(8, "big")], fds)
        server.sendall(text)
        answers = server.makefile()
        pid = int(answers.readline())
        # The name of this process tells it, to those who want to stop the fork: SIGSTOP cannot be passed on.
        with open("/proc/self/comm", "w") as name:
            name.write(str(pid))

        def pass_on(number: int, frame: object) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its status is on the way
                os.kill(pid, number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, pass_on)
        status = int(answers.readline())
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def serve(address: str) -> None:
    """Answers clients until standard input ends."""
    import gc
    import importlib
    import select

    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    assert os.listdir("/proc/self/task") == [str(os.getpid())]  # a fork has this thread alone, others may hold locks
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no keeper is waited for
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        print("ready", flush=True)
        while server in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _keep(connection)
            connection.close()


def _keep(connection: socket.socket) -> None:
    """Starts the command, tells of its start and end, and kills it when its client is gone."""
    import select

    size, fds, _, _ = socket.recv_fds(connection, 8, 200)
    request = json.loads(connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    pid = os.fork()
    if pid == 0:
        os._exit(_run(request, fds))
    for fd in fds:
        os.close(fd)
    connection.sendall(b"%d\n" % pid)

    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([connection, ended], [], [])  # nothing comes on the connection but its end
    if ended not in ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _run(request: dict, received: list[int]) -> int:
    """Becomes the command; its exit status."""
    import atexit
    import ctypes
    import multiprocessing
    import runpy
    import threading
    import traceback

    # The numbers that files have in the client may be taken here.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1000) for fd in received]
    os.closerange(_FIRST_OWN_FD, 1000)
    for fd, number in zip(high, request["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    for name, flag in _NAMESPACES.items():
        theirs, own = f"/proc/{request['pid']}/ns/{name}", f"/proc/self/ns/{name}"
        if os.readlink(theirs) != os.readlink(own):
            fd = os.open(theirs, os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(fd, flag):
                raise OSError(ctypes.get_errno(), "setns", theirs)
            os.close(fd)
    os.sched_setaffinity(0, os.sched_getaffinity(request["pid"]))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])

    program, *words = request["words"]
    if program != "python":
        words = [os.path.join(os.path.dirname(sys.executable), program), *words]
    sys.executable = request["python"]  # of processes that the command starts
    multiprocessing.set_executable(sys.executable)
    flags = []
    while words[0][:1] == "-" and words[0] not in ("-c", "-m"):
        flags.append(words.pop(0))
    unbuffered = "-u" in flags  # the others change nothing here
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (
        os.fdopen(fd, "w", encoding="utf-8", errors=errors, closefd=False)
        for fd, errors in ((1, "strict"), (2, "backslashreplace"))
    )
    sys.stdout.reconfigure(write_through=unbuffered, line_buffering=os.isatty(1))
    sys.stderr.reconfigure(write_through=unbuffered, line_buffering=True)
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in os.environ else []
    status: object = 0
    try:
        if words[0] in ("-c", "-m"):
            sys.path.insert(0, os.getcwd())
            sys.argv = [words[0], *words[2:]]
            if words[0] == "-m":
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                exec(words[1], sys.modules["__main__"].__dict__)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        status = left.code
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(status, str):
        print(status, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    return status if isinstance(status, int) else int(status is not None)


def _is_open(fd: int) -> bool:
    """Not the one that listing them took."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def start(folder: str) -> "subprocess.Popen[str]":
    """Starts a server, and writes the programs that use it to `folder`. It ends with its standard input."""
    import subprocess

    address = os.path.join(folder, "socket")
    for program in ("python", "torchrun", "accelerate"):
        path = os.path.join(folder, program)
        with open(path, "w") as file:
            words = f'"{sys.executable}" -IS "{os.path.abspath(__file__)}" "{address}" {program} "$@"'
            file.write(f"#!/bin/sh\nexec {words}\n")
        os.chmod(path, 0o755)
    # Without a thread of pyarrow's allocator, and without those of OpenMP and OpenBLAS.
    alone = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, __file__, address],
        env=os.environ | alone,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return server


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        sys.exit(client(sys.argv[1], sys.argv[2:]))
