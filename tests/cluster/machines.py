"""Two machines out of one: network namespaces joined by a cable, each with its own host name and files."""

import contextlib
import os
import shlex
import subprocess
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from launching import ROOT, Ended, run

PORT = 29871  # in a network namespace no other program can have it


class Machine(NamedTuple):
    """One of the machines.

    Attributes:
        index: 0 or 1.
        name: its host name.
        address: of its interface.
        interface: its name.
        namespace: of the network.
        hosts: its /etc/hosts.
        disk: a folder of its own.
    """

    index: int
    name: str
    address: str
    interface: str
    namespace: str
    hosts: Path
    disk: Path

    def command(self, words: str, mounts: dict[Path, Path]) -> str:
        """`words` as a command on this machine, which has one core.

        Args:
            words: of the command.
            mounts: files or folders, each with what stands in its place on this machine.
        """
        lines = [f"hostname {self.name}", f"mount --bind {self.hosts} /etc/hosts"]
        lines += [f"mount --bind {own} {place}" for place, own in mounts.items()]
        cores = sorted(os.sched_getaffinity(0))
        core = cores[self.index % len(cores)]
        lines += [f"cd {ROOT}", f"exec taskset -c {core} nsenter --net=/run/netns/{self.namespace} {words}"]
        return f"unshare --mount --uts sh -c {shlex.quote(' && '.join(lines))}"

    def processes(self) -> list[psutil.Process]:
        """All that run on this machine, launchers first."""
        pids = subprocess.run(["ip", "netns", "pids", self.namespace], check=True, capture_output=True, text=True)
        found = []
        for pid in pids.stdout.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return sorted(found, key=lambda process: process.pid)

    def power_off(self) -> None:
        """SIGKILL to everything on it."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def link(self, state: str) -> None:
        """Plugs the cable in, "up", or pulls it, "down"."""
        ip(f"-n {self.namespace} link set {self.interface} {state}")


class Cluster(NamedTuple):
    """Two machines, and threads to start commands on them."""

    machines: tuple[Machine, Machine]
    threads: ThreadPoolExecutor

    def start(
        self, machine: int, words: str, *, mounts: dict[Path, Path] | None = None, **options: Any
    ) -> "Future[Ended]":
        """Starts a command on machine 0 or 1.

        Args:
            machine: 0 or 1.
            words: of the command.
            mounts: see `Machine.command`.
            options: of `run`.
        """
        return self.threads.submit(run, self.machines[machine].command(words, mounts or {}), **options)


def ip(words: str) -> None:
    """Raises CalledProcessError, with what ip said in its output."""
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


def why_not() -> str:
    """Why there can be no such machines here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"mnist-{uuid.uuid4().hex[:8]}"
    try:
        ip(f"netns add {name}")
        ip(f"netns del {name}")
        subprocess.run(["unshare", "--mount", "--uts", "true"], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"no {error.filename} here"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    return ""


@contextmanager
def two_machines(scratch: Path) -> Iterator[Cluster]:
    """Two machines, m0 at 10.99.0.1 and m1 at 10.99.0.2, whose names stand for those addresses on both."""
    own = uuid.uuid4().hex[:6]
    machines = []
    for index in range(2):
        disk = scratch / f"disk{index}"
        disk.mkdir()
        hosts = scratch / f"hosts{index}"
        hosts.write_text("127.0.0.1 localhost\n10.99.0.1 m0\n10.99.0.2 m1\n")
        machines.append(
            Machine(index, f"m{index}", f"10.99.0.{index + 1}", f"v{own}{index}", f"mnist-{own}-{index}", hosts, disk)
        )
    try:
        for machine in machines:
            ip(f"netns add {machine.namespace}")
            ip(f"-n {machine.namespace} link set lo up")
        ip(f"link add {machines[0].interface} type veth peer name {machines[1].interface}")
        for machine in machines:
            ip(f"link set {machine.interface} netns {machine.namespace}")
            ip(f"-n {machine.namespace} addr add {machine.address}/24 dev {machine.interface}")
            machine.link("up")
        with ThreadPoolExecutor(4) as threads:
            try:
                yield Cluster((machines[0], machines[1]), threads)
            finally:
                for machine in machines:  # else the threads would wait for their commands' time to be over
                    machine.power_off()
    finally:
        for machine in machines:
            subprocess.run(["ip", "netns", "del", machine.namespace], check=False, capture_output=True)
