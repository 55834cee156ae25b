"""Training on two machines: what they compute, and what becomes of it when one of them or the cable goes.

python -m pytest tests/cluster/test_two_machines.py
"""

import json
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from launching import ROOT, Ended, run
from machines import PORT, Cluster, two_machines, why_not
from safetensors.torch import load_file

# With the store that torchrun 2.13 shares between restarts, a launcher that comes later never learns its address.
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
REASON = why_not()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.timeout(240), pytest.mark.slow]

TRAIN = "train_accel.py --width 4 --log_with none --patience 1000 --cache_dir="
STATIC = f"torchrun --nnodes 2 --node_rank {{machine}} --master_addr 10.99.0.1 --master_port {PORT}"
C10D = f"torchrun --nnodes {{nodes}} --rdzv_backend c10d --rdzv_endpoint 10.99.0.1:{PORT} --rdzv_id test"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with two_machines(tmp_path) as machines:
        yield machines


@pytest.fixture(scope="module")
def one_machine(small_csv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two processes on this machine, two epochs with a global batch of 40."""
    folder = tmp_path_factory.mktemp("one") / "run"
    flags = f"--mnist_file_path {small_csv} --epochs 2 --batch_size 20 --mixed_precision no --num_processes 2"
    ended = run(f"python {TRAIN} {flags}", folder)
    assert ended.status == 0, ended
    return folder


def both(cluster: Cluster, command: str, **options: dict[Path, Path]) -> list[Ended]:
    """Runs a command with {machine} in it on both machines."""
    started = [cluster.start(machine, command.format(machine=machine), **options) for machine in (0, 1)]
    return [future.result() for future in started]


def losses(folder: Path) -> list[float]:
    return [line["train_loss"] for line in lines(folder)]


def lines(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def result(folder: Path) -> dict[str, object]:
    return json.loads((folder / "result.json").read_text())


def result_status(folder: Path) -> object:
    return result(folder)["status"] if (folder / "result.json").exists() else None


def wait_for(condition: Callable[[], bool], *running: "Future[Ended]", seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        for future in running:
            assert not future.done(), str(future.result())
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def test_static_rendezvous_with_a_shared_disk_gives_the_numbers_of_one_machine(
    cluster: Cluster, small_csv: Path, one_machine: Path, tmp_path: Path
) -> None:
    """With the TrainJob's own command, and the variables that its runtime sets."""
    folder = tmp_path / "shared"
    job = yaml.safe_load((ROOT / "launch" / "trainjob.yaml").read_text())
    command = shlex.join(job["spec"]["trainer"]["command"]).replace("train_accel.py", TRAIN)
    command = command.replace("/runs/mnist", str(folder))
    flags = f"--mnist_file_path {small_csv} --epochs 2 --batch_size 20 --mixed_precision no"
    rendezvous = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "m0", "PET_MASTER_PORT": str(PORT)}
    started = [cluster.start(i, f"{command} {flags}", **rendezvous, PET_NODE_RANK=str(i)) for i in (0, 1)]
    ended = [future.result() for future in started]
    assert [end.status for end in ended] == [0, 0], "\n".join(map(str, ended))
    assert "2 processes on CPU, 1 thread each; global batch 40" in ended[0].stdout
    assert "machines" not in ended[0].stdout
    assert ended[1].stdout == ""
    assert losses(folder) == losses(one_machine)
    ours, theirs = (load_file(path / "cnn" / "model.safetensors") for path in (folder, one_machine))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not list(folder.glob(".shared-*"))


def test_c10d_rendezvous_without_a_shared_disk_gives_the_numbers_of_one_machine(
    cluster: Cluster, small_csv: Path, one_machine: Path, tmp_path: Path
) -> None:
    """Two processes on each, and every machine has its own images and its own run folder under the same names."""
    digits, folder = tmp_path / "digits.csv", tmp_path / "pt"
    digits.touch()
    folder.mkdir()
    started = []
    for machine in cluster.machines:
        mounts = {digits: machine.disk / "digits.csv", folder: machine.disk / "pt"}
        shutil.copy(small_csv, mounts[digits])
        mounts[folder].mkdir()
        flags = f"--mnist_file_path {digits} --epochs 2 --batch_size 10 --mixed_precision no --pt_path {folder}"
        command = f"{C10D.format(nodes=2)} --nproc_per_node 2 {TRAIN} {flags}"
        started.append(cluster.start(machine.index, command, mounts=mounts))
    ended = [future.result() for future in started]
    assert [end.status for end in ended] == [0, 0], "\n".join(map(str, ended))
    (speaker,) = [end.stdout for end in ended if end.stdout]
    assert "4 processes on CPU" in speaker
    assert f"note: 2 machines (m0, m1) share no {folder}: " in speaker or "(m1, m0)" in speaker
    for machine in cluster.machines:
        own = machine.disk / "pt"
        assert losses(own) == pytest.approx(losses(one_machine), rel=0, abs=1e-4)
        assert result(own)["world_size"] == 4
        assert (own / "cnn" / "model.safetensors").exists()
        assert list((own / "checkpoints").glob("epoch-00002-*"))
    assert list(folder.iterdir()) == []


def test_a_host_name_that_is_only_known_here_is_noticed_at_the_start(
    cluster: Cluster, small_csv: Path, tmp_path: Path
) -> None:
    for machine in cluster.machines:
        machine.hosts.write_text(f"127.0.0.1 localhost {machine.name}\n")
    started = time.monotonic()
    flags = f"--mnist_file_path {small_csv} --epochs 2 --pt_path {tmp_path / 'pt'}"
    ended = both(cluster, f"{STATIC} --nproc_per_node 1 {TRAIN} {flags}")
    assert time.monotonic() - started < 60
    for machine, end in zip(cluster.machines, ended, strict=True):
        assert end.status == 1
        assert end.stderr.count("error: ") == 1, end
        assert re.search(
            rf"^error: .*{machine.name}.* set GLOO_SOCKET_IFNAME={machine.interface},", end.stderr, re.M
        ), end


def test_another_version_of_the_code_is_refused(cluster: Cluster, small_csv: Path, tmp_path: Path) -> None:
    """Started with the config for several machines."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "pt"))
    package = copy / "mnist_ddp" / "__init__.py"
    package.write_text(re.sub(r'__version__ = ".*"', '__version__ = "0.0.1"', package.read_text()))
    config = "--config_file launch/accelerate/multi_node.yaml --num_processes 2 --main_process_ip 10.99.0.1"
    flags = f"--mnist_file_path {small_csv} --epochs 2 --batch_size 20 --pt_path {tmp_path / 'pt'}"
    command = f"accelerate launch {config} --machine_rank {{machine}} {TRAIN} {flags}"
    started = [
        cluster.start(m.index, command.format(machine=m.index), mounts={ROOT: copy} if m.index else {})
        for m in cluster.machines
    ]
    ended = [future.result() for future in started]
    assert [end.status for end in ended] == [1, 1], "\n".join(map(str, ended))
    complaint = r"error: the processes do not agree on versions: .*rank 0 \(m0\).*0\.0\.1.*rank 1 \(m1\)"
    assert re.search(complaint, ended[0].stderr), ended[0]
    assert not list((tmp_path / "pt").glob("checkpoints/*"))


# ---- two that mostly wait, in clusters of their own, while the other tests run


def pull_the_cable(small_csv: Path, tmp_path: Path) -> None:
    """Both sides end; machine 0 is replaced by a new one, and a restart goes on from machine 1's checkpoints."""
    with two_machines(tmp_path) as cluster:
        folder = tmp_path / "pt"
        folder.mkdir()
        flags = f"--mnist_file_path {small_csv} --batch_size 20 --pt_path {folder} --timeout_seconds 12"
        command = f"{STATIC} --nproc_per_node 1 {TRAIN} {flags}"

        def start(epochs: int) -> "list[Future[Ended]]":
            return [
                cluster.start(m.index, f"{command.format(machine=m.index)} --epochs {epochs}", mounts={folder: m.disk})
                for m in cluster.machines
            ]

        running = start(100_000)
        disks = [machine.disk for machine in cluster.machines]
        wait_for(lambda: all(len(lines(disk)) >= 2 for disk in disks), *running)
        cluster.machines[1].link("down")
        pulled = time.time()
        for future in running:
            ended = future.result()
            assert ended.status == 1, ended
            assert re.search(r"error: rank \d (lost contact with another process|is stuck)", ended.stderr), ended
            assert ended.end_time - pulled < 12 + 30, ended

        cluster.machines[1].link("up")
        done = len(lines(disks[1]))
        for path in disks[0].iterdir():  # machine 0 has been replaced
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        ended = [future.result() for future in start(done + 1)]
        assert [end.status for end in ended] == [0, 0], "\n".join(map(str, ended))
        assert re.search(r"resumed after \d+ epochs", ended[0].stdout), ended[0]
        for disk in disks:
            assert [line["epoch"] for line in lines(disk)] == list(range(1, done + 2))
            assert (disk / "cnn" / "model.safetensors").exists()


def leave_and_come_back(small_csv: Path, tmp_path: Path) -> None:
    """Machine 1 loses power; machine 0 goes on alone, and with machine 1 once it is there again."""
    with two_machines(tmp_path) as cluster:
        folder = tmp_path / "pt"
        conf = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=4"
        flags = f"--mnist_file_path {small_csv} --batch_size 20 --pt_path {folder} --epochs 100000 --timeout_seconds 20"

        def start(machine: int) -> "Future[Ended]":
            rendezvous = f"{C10D.format(nodes='1:2')} --max_restarts 3 --rdzv_conf is_host={1 - machine},{conf}"
            return cluster.start(
                machine, f"{rendezvous} --nproc_per_node 1 {TRAIN} {flags}", timeout_seconds=150, **ELASTIC
            )

        def epochs() -> int:
            return len(lines(folder))

        stays, leaves = start(0), start(1)
        wait_for(lambda: epochs() >= 2, stays, leaves)
        cluster.machines[1].power_off()
        assert leaves.result().status == -signal.SIGKILL
        reached = epochs()
        wait_for(lambda: epochs() >= reached + 3, stays)
        back = start(1)
        # The launcher of machine 0 stops its process, which saves, and starts it anew together with that of machine 1.
        wait_for(
            lambda: len([p for p in cluster.machines[1].processes() if "train_accel.py" in p.cmdline()]) >= 2,
            stays,
            back,
        )
        wait_for(lambda: result_status(folder) == "preempted", stays, back)
        (folder / "result.json").unlink()
        reached = epochs()
        wait_for(lambda: epochs() >= reached + 3, stays, back)
        cluster.machines[0].processes()[0].send_signal(signal.SIGTERM)
        ended = stays.result()
        back.result()
        worlds = re.findall(r"^(\d) process", ended.stdout, re.M)
        resumed = [int(epoch) for epoch in re.findall(r"^resumed after (\d+) epochs", ended.stdout, re.M)]
        assert worlds[:2] == ["2", "1"], ended
        assert worlds[-1] == "2", ended
        assert resumed == sorted(resumed), ended
        assert len(resumed) == len(worlds) - 1, ended
        assert resumed[0] >= 2, ended
        assert [line["epoch"] for line in lines(folder)] == list(range(1, epochs() + 1))


@pytest.fixture(scope="module", autouse=True)
def scenarios(small_csv: Path, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[dict[str, Future[None]]]":
    with ThreadPoolExecutor(2) as threads:
        yield {
            scenario.__name__: threads.submit(scenario, small_csv, tmp_path_factory.mktemp("machines"))
            for scenario in (pull_the_cable, leave_and_come_back)
        }


def test_a_pulled_cable_ends_both_sides_and_a_restart_goes_on_even_with_a_new_machine_0(
    scenarios: "dict[str, Future[None]]",
) -> None:
    scenarios["pull_the_cable"].result()


def test_a_machine_that_leaves_and_comes_back_does_not_end_the_run(scenarios: "dict[str, Future[None]]") -> None:
    scenarios["leave_and_come_back"].result()
