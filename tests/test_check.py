"""The check passes where all is well, and names the row where something is broken.

python -m pytest tests/test_check.py
"""

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from launching import Ended, run
from ranks import accelerator_of, run_ranks

from mnist_ddp.check import network, parity, rows, speed
from mnist_ddp.check.command import parse
from mnist_ddp.check.network import Link, Traffic, mean_of_slowest
from mnist_ddp.check.rows import Row
from mnist_ddp.errors import UserError
from mnist_ddp.model.convnet import ConvNet
from mnist_ddp.settings import Settings
from mnist_ddp.training import state

NAMES = [
    *("versions", "settings", "launcher", "devices", "run folder", "data", "step on the device", "parity"),
    *("network", "speed", "waiting for data", "prediction", "checkpoint", "stop signal"),
]
pytestmark = pytest.mark.timeout(240)


def named(found: Sequence[Row]) -> list[str]:
    """The names of the rows, that of parity without the number of processes."""
    return ["parity" if row.name.endswith("= 1 process") else row.name for row in found]


def failed(found: Sequence[Row]) -> list[str]:
    return [name for name, row in zip(named(found), found, strict=True) if not row.passed]


# ---- on ranks that are kept, with short measurements


def check(flags: dict[str, Any], breaking: Callable[[pytest.MonkeyPatch, int], None]) -> list[Row]:
    """The rows, on one rank.

    Args:
        flags: settings.
        breaking: patches what is to be broken on the rank that it is given.
    """
    accelerator = accelerator_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "_SECONDS_EACH", 0.3)
        patch.setattr(network, "_SECONDS_EACH", 0.05)
        breaking(patch, accelerator.process_index)
        # The default network and batch: with a smaller one, exchanging takes nearly as long as computing, and where
        # processes share cores the row of the network fails now and then.
        s = Settings(cache_dir="")
        other = {"seed": 7} if flags.get("other_seed") and accelerator.process_index == 1 else {}
        s = dataclasses.replace(s, **{k: v for k, v in flags.items() if k != "other_seed"} | other)
        return list(rows.rows(accelerator, s))


def check_on(processes: int, tmp_path: Path, breaking: Callable[..., None] | None = None, **flags: Any) -> list[Row]:
    """The rows, which are the same on all ranks."""
    everyone = run_ranks(check, processes, {"pt_path": str(tmp_path / "pt")} | flags, breaking or nothing)
    texts = {tuple((row.name, row.passed, row.text) for row in found) for found in everyone}
    assert len(texts) == 1
    return everyone[0]


def nothing(patch: pytest.MonkeyPatch, rank: int) -> None:
    pass


def plain_batchnorm(patch: pytest.MonkeyPatch, rank: int) -> None:
    patch.setattr(state, "convert_sync_batchnorm", lambda model, device: model)


def other_file(patch: pytest.MonkeyPatch, rank: int) -> None:
    sound = rows.read_files

    def read(*args: Any, **kwargs: Any) -> Any:
        digits = sound(*args, **kwargs)["train"]
        return {"train": dataclasses.replace(digits, images=digits.images.flip(1))}

    if rank == 1:
        patch.setattr(rows, "read_files", read)


def other_images(patch: pytest.MonkeyPatch, rank: int) -> None:
    """After they have been compared: in memory that lies."""
    sound = parity.enough
    if rank == 1:
        wrong = lambda images, needed: sound(dataclasses.replace(images, labels=9 - images.labels), needed)  # noqa: E731
        patch.setattr(parity, "enough", wrong)


def other_order(patch: pytest.MonkeyPatch, rank: int) -> None:
    sound = parity.make_loaders
    if rank == 1:
        patch.setattr(parity, "make_loaders", lambda *args, seed, **kwargs: sound(*args, seed=seed + 1, **kwargs))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3, 4])
def test_all_rows_pass(processes: int, tmp_path: Path) -> None:
    """With two, see the test of the command."""
    found = check_on(processes, tmp_path)
    expected = [name for name in NAMES if processes > 1 or name not in ("network", "prediction")]
    assert named(found) == expected
    assert not failed(found), found
    by_name = dict(zip(named(found), found, strict=True))
    assert by_name["launcher"].figures["world_size"] == processes
    assert max(by_name["parity"].figures.values()) < 1e-9
    assert len(by_name["parity"].figures) == 3
    assert not (tmp_path / "pt").exists()  # nothing is left behind


@pytest.mark.parametrize(
    ("breaking", "row", "words"),
    [
        (plain_batchnorm, "parity", "20 steps of 240 digits"),
        (other_file, "data", "rank 1"),
        (other_images, "parity", "losses"),
        (other_order, "parity", "losses"),
    ],
)
def test_the_broken_row_is_named(breaking: Callable[..., None], row: str, words: str, tmp_path: Path) -> None:
    found = check_on(2, tmp_path, breaking)
    assert failed(found) == [row]
    (broken,) = (one for one in found if not one.passed)
    assert words in broken.text
    assert broken.advice or "all must have the same" in broken.text


def test_another_seed_on_a_rank_is_named(tmp_path: Path) -> None:
    found = check_on(2, tmp_path, other_seed=True)
    assert failed(found) == ["settings"]
    assert re.search(r"--seed: 1206 on rank 0 .*, 7 on rank 1", found[1].text)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = check_on(2, tmp_path, pt_path=str(tmp_path / "file" / "pt"))
    assert failed(found) == ["run folder"]
    (broken,) = (row for row in found if not row.passed)
    assert "--pt_path" in broken.text
    assert "choose another folder" in broken.text


# ---- the command


def test_the_command_prints_the_table_and_writes_it(tmp_path: Path) -> None:
    """In a folder that is in use, which it leaves as it is."""
    kept = tmp_path / "pt" / "metrics.jsonl"
    kept.parent.mkdir()
    kept.write_text("{}\n")
    report = tmp_path / "report.json"
    command = f"accelerate launch --multi_gpu --num_processes 2 -m mnist_ddp.check --json {report}"
    ended = run(command, tmp_path / "pt")
    assert ended.status == 0, ended
    table = ended.stdout.splitlines()
    assert re.fullmatch(r"passed \(14 rows, \d+ s\)", table[-1]), ended
    written = json.loads(report.read_text())
    assert written["passed"] is True
    assert written["seconds"] < 60
    assert [row["name"] for row in written["rows"]] == [
        "2 processes = 1 process" if name == "parity" else name for name in NAMES
    ]
    for row in written["rows"]:
        assert f"pass  {row['name']} " in ended.stdout, ended
        if row["name"].endswith("= 1 process"):
            assert max(row["figures"].values()) < 1e-9
    assert {path.name for path in kept.parent.iterdir()} == {"metrics.jsonl", ".lock"}


@pytest.mark.slow
def test_a_slow_link_is_named(tmp_path: Path) -> None:
    """A network of its own for the command, whose loopback interface is slow."""
    delay = "tc qdisc add dev lo root netem delay 20ms"
    rate = "tc qdisc add dev lo root tbf rate 50mbit burst 160kb latency 1000ms"  # where the kernel has no netem
    setup = f"ip link set lo up && ({delay} || {rate})"
    tried = (
        subprocess.run(["unshare", "--net", "sh", "-c", setup], capture_output=True, text=True, check=False)
        if all(map(shutil.which, ("unshare", "ip", "tc")))
        else None
    )
    if tried is None or tried.returncode:
        pytest.skip(f"no slow link can be made here: {tried.stderr if tried else 'no unshare, ip or tc'}")
    flags = f"--num_processes 2 --width 16 --batch_size 32 --pt_path {tmp_path / 'pt'} --cache_dir="
    ended = run(f"unshare --net sh -c '({setup}) 2>/dev/null; exec python -m mnist_ddp.check {flags}'")
    assert ended.status == 1, ended
    assert last_line(ended).startswith("failed: network (14 rows"), ended
    advice = ended.stdout.partition("FAIL  network")[2].partition("pass ")[0]
    assert "GLOO_SOCKET_IFNAME" in advice, ended


def last_line(ended: Ended) -> str:
    return (ended.stdout.splitlines() or [""])[-1]


@pytest.mark.parametrize(
    ("flags", "words"), [("--epochs 3", "--epochs says nothing"), ("--batchsize 3", "unknown flag --batchsize")]
)
def test_flags_that_mean_nothing_here_are_refused(flags: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(flags.split())


def test_its_own_flags_are_taken() -> None:
    settings, json_path = parse(["--json", "a.json", "--num_processes", "3", "--pt_path", "runs/x"])
    assert (settings.num_processes, settings.pt_path, json_path) == (3, "runs/x", "a.json")


def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "a.json"):
        with pytest.raises(UserError, match=rf"^--json {path}: "):
            parse(["--json", str(path)])


# ---- the model of the network


def test_the_traffic_is_that_of_the_network() -> None:
    traffic = Traffic.of(ConvNet("0123456789", (28, 28), width=4, mean=0.13, std=0.31))
    # Layers of 4, 8, 16 and 16 channels: two float64 numbers a channel and a count, and as many back.
    assert traffic.gathered == (72, 72, 136, 136, 264, 264, 264, 264)
    assert traffic.reduced == 4 * sum(
        p.numel() for p in ConvNet("0123456789", (28, 28), width=4, mean=0.13, std=0.31).parameters()
    )


def test_the_prediction_is_that_of_a_ring() -> None:
    link = Link(alpha=1e-3, beta=1e6)
    traffic = Traffic(gathered=(1000, 3000), reduced=8000)
    # Two processes: two messages of 4,000 bytes, and one of 1,000 and one of 3,000.
    assert link.seconds_per_step(traffic, 2) == pytest.approx(2 * (1e-3 + 4e-3) + (1e-3 + 1e-3) + (1e-3 + 3e-3))
    # Four: six messages of 2,000, and three each of 1,000 and 3,000.
    assert link.seconds_per_step(traffic, 4) == pytest.approx(6 * (1e-3 + 2e-3) + 3 * (1e-3 + 1e-3) + 3 * (1e-3 + 3e-3))
    assert link.seconds_per_step(traffic, 1) == 0
    assert link.efficiency(traffic, 2, compute_seconds=[0.048]) == pytest.approx(0.75)


def test_the_slowest_of_more_processes_is_slower() -> None:
    # Two draws from 1 and 3: 1 in a quarter of the cases, else 3.
    assert mean_of_slowest([3.0, 1.0], 2) == pytest.approx(2.5)
    assert mean_of_slowest([3.0, 1.0], 1) == pytest.approx(2.0)
    assert mean_of_slowest([3.0, 1.0], 1024) == pytest.approx(3.0)
    free = Link(alpha=0.0, beta=1e30)
    assert free.efficiency(Traffic((), 1), 2, compute_seconds=[3.0, 1.0]) == pytest.approx(2.0 / 2.5)
