"""Checkpoints, and the folder that they are in: whole or refused, never the last good one removed.

python -m pytest tests/training/test_checkpoint.py
"""

import json
import os
import pickle
import random
import signal
import stat
import subprocess
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mnist_ddp.errors import UserError
from mnist_ddp.model.convnet import ConvNet
from mnist_ddp.settings import Settings
from mnist_ddp.training.checkpoint import SUMS, TENSORS, VALUES, Checkpoints, Snapshot
from mnist_ddp.training.run_folder import RunFolder


def snapshot(epoch: int, samples_done: int = 0) -> Snapshot:
    """A snapshot that can be told from others by its numbers."""
    weights = torch.full((50, 20), float(epoch)) + samples_done / 1000
    return Snapshot({"model.weight": weights}, {"epoch": epoch, "samples_done": samples_done, "history": [0.1] * 20})


def same(left: Snapshot | None, right: Snapshot) -> bool:
    return (
        left is not None
        and left.values == right.values
        and left.tensors.keys() == right.tensors.keys()
        and all(torch.equal(left.tensors[name], right.tensors[name]) for name in right.tensors)
    )


def test_newest_is_what_was_saved_last(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.newest() == (None, [])
    for position in ((0, 40), (0, 80), (1, 0), (10, 0)):
        checkpoints.save(snapshot(*position))
        assert same(checkpoints.newest()[0], snapshot(*position))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "epoch-00001-sample-00000000",
        "epoch-00010-sample-00000000",
    ]


def test_sums_are_those_of_sha256sum(tmp_path: Path) -> None:
    Checkpoints(tmp_path, keep=1).save(snapshot(1))
    (folder,) = tmp_path.iterdir()
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, check=True, capture_output=True, timeout=20)


def test_200_flips_and_truncations_are_all_noticed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(snapshot(1))
    checkpoints.save(snapshot(2))
    newest = tmp_path / "epoch-00002-sample-00000000"
    choose = random.Random(0)
    for trial in range(200):
        path = newest / choose.choice([TENSORS, VALUES, SUMS])
        whole = path.read_bytes()
        if trial % 4 == 0:
            path.write_bytes(whole[: choose.randrange(len(whole))])
        else:
            damaged = bytearray(whole)
            damaged[choose.randrange(len(whole))] ^= 1 << choose.randrange(8)
            path.write_bytes(damaged)
        found, notes = checkpoints.newest()
        assert same(found, snapshot(1)), f"trial {trial}: damage to {path.name} went unnoticed"
        assert len(notes) == 1
        assert str(newest) in notes[0]
        path.write_bytes(whole)
    assert same(checkpoints.newest()[0], snapshot(2))


def test_a_damaged_checkpoint_is_replaced_when_its_run_gets_there_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for epoch in (1, 2):
        checkpoints.save(snapshot(epoch))
    (tmp_path / "epoch-00002-sample-00000000" / VALUES).write_text("")
    assert same(checkpoints.newest()[0], snapshot(1))
    checkpoints.save(snapshot(2))
    assert same(checkpoints.newest()[0], snapshot(2))


def test_a_damaged_checkpoint_does_not_crowd_out_a_whole_one(tmp_path: Path) -> None:
    """Nor does another folder."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(snapshot(4))
    (tmp_path / "epoch-00005-sample-00000000").mkdir()
    (tmp_path / "epoch-99999-backup").mkdir()
    assert same(checkpoints.newest()[0], snapshot(4))
    checkpoints.save(snapshot(4, 20))
    assert same(checkpoints.newest()[0], snapshot(4, 20))
    assert {path.name for path in tmp_path.iterdir()} == {"epoch-00004-sample-00000020", "epoch-99999-backup"}


@pytest.mark.parametrize("name", [TENSORS, VALUES, SUMS])
def test_a_malicious_pickle_is_refused_and_never_runs(tmp_path: Path, name: str) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "executed"),))

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(snapshot(1))
    (folder,) = (tmp_path / "checkpoints").iterdir()
    (folder / name).write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(UserError, match="all 1 checkpoints are damaged"):
        checkpoints.newest()
    # Also where the attacker has made the sums fit.
    if name != SUMS:
        lines = subprocess.run(["sha256sum", TENSORS, VALUES], cwd=folder, check=True, capture_output=True, timeout=20)
        (folder / SUMS).write_bytes(lines.stdout)
        with pytest.raises(UserError, match="all 1 checkpoints are damaged"):
            checkpoints.newest()
    assert not (tmp_path / "executed").exists()


def test_files_get_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        Checkpoints(tmp_path, keep=1).save(snapshot(1))
    finally:
        os.umask(before)
    (folder,) = tmp_path.iterdir()
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}


def test_50_kills_while_writing_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    """A forked process saves one checkpoint after the other until SIGKILL ends it at a random moment."""
    choose = random.Random(0)
    interrupted = 0
    for trial in range(50):
        folder = tmp_path / str(trial)
        Checkpoints(folder, keep=1).save(snapshot(0))
        child = os.fork()
        if child == 0:
            checkpoints = Checkpoints(folder, keep=1)
            for epoch in range(1, 100000):
                checkpoints.save(snapshot(epoch))
        time.sleep(choose.uniform(0.0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        interrupted += any(path.name.startswith(".") for path in folder.iterdir())
        found, notes = Checkpoints(folder, keep=1).newest()
        assert found is not None
        assert not notes
        assert same(found, snapshot(found.values["epoch"]))
        assert not [path for path in folder.iterdir() if path.name.startswith(".")], "leftovers are swept"
    assert interrupted > 5, "the kills missed the writing: this test shows nothing"


def test_a_full_disk_leaves_the_last_good_checkpoint(small_disk: Path) -> None:
    checkpoints = Checkpoints(small_disk / "checkpoints", keep=5)

    def fill() -> None:
        for epoch in range(1, 100):
            checkpoints.save(snapshot(epoch))

    with pytest.raises(UserError, match="No space left on device") as error:
        fill()
    assert "\n" not in str(error.value)
    found, notes = checkpoints.newest()
    assert found is not None
    assert same(found, snapshot(found.values["epoch"]))
    assert not notes


def test_everything_that_a_full_disk_refuses_is_named(small_disk: Path) -> None:
    folder = RunFolder(small_disk / "run", "auto", 2)
    (small_disk / "large").write_bytes(bytes(60_000))
    cause = r"No space left on device.*; earlier checkpoints are intact"
    with pytest.raises(UserError, match=rf"cannot write .*/run/cnn: .*{cause}"):
        folder.save_model(ConvNet("0123456789", (28, 28), width=32, mean=0.13, std=0.31))
    with pytest.raises(UserError, match=rf"cannot write .*/run/result\.json: {cause}"):
        folder.write_result({"x": "." * 10_000})
    with pytest.raises(UserError, match=rf"cannot write .*/run/metrics\.jsonl: {cause}"):
        folder.append_metrics({"x": "." * 10_000})
    assert not (folder.path / "cnn").exists()


def test_a_run_that_does_not_fit_is_refused_but_one_that_goes_on_in_its_own_room_is_not(small_disk: Path) -> None:
    folder, state = RunFolder(small_disk / "run", "auto", 2), Namespace(module=nn.Linear(2, 2), history=[])
    with pytest.raises(UserError, match=r"--pt_path .*/run: the run needs 1\.0 MB, and there is room for 0\.1 MB"):
        folder.begin(Settings(), state)  # type: ignore[arg-type]
    assert not (folder.path / "settings.yaml").exists()
    earlier = folder.path / "checkpoints" / "epoch-00001-sample-00000000" / "tensors"
    earlier.parent.mkdir(parents=True)
    with open(earlier, "wb") as file:
        file.truncate(1 << 21)  # takes no room, but says so
    folder.begin(Settings(), state)  # type: ignore[arg-type]
    assert (folder.path / "settings.yaml").exists()


def test_a_folder_that_is_gone_is_told_and_not_made_anew(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    checkpoints.save(snapshot(1))
    run.rename(moved)
    with pytest.raises(UserError, match=rf"^the run folder {run} is gone"):
        checkpoints.save(snapshot(2))
    assert not run.exists()
    assert same(Checkpoints(moved / "checkpoints", keep=2).newest()[0], snapshot(1))


def test_a_folder_that_is_moved_while_the_model_is_written_is_not_made_anew(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    folder = RunFolder(run, "auto", 2)

    class Model(ConvNet):
        def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
            run.rename(moved)
            super().save_pretrained(*args, **kwargs)

    with pytest.raises(UserError, match=rf"^the run folder {run} is gone"):
        folder.save_model(Model("0123456789", (28, 28), width=4, mean=0.13, std=0.31))
    assert not run.exists()
    for write in (folder.write_result, folder.append_metrics):
        with pytest.raises(UserError, match=rf"^the run folder {run} is gone"):
            write({"epoch": 1})
    assert not run.exists()


def test_a_run_of_another_version_is_not_resumed(tmp_path: Path) -> None:
    """Its network may be another, or its order of images."""
    run = {"settings": {"lr": 0.1}, "images": ["x"], "global_batch": 8, "versions": {"mnist_ddp": "0.1.0"}}
    saved = snapshot(1)
    saved.values["run"] = run
    Checkpoints(tmp_path / "checkpoints", keep=1).save(saved)
    folder = RunFolder(tmp_path, "auto", 1)
    assert same(folder.resume(run)[0], saved)
    with pytest.raises(UserError, match=r"holds a run with other settings \(mnist_ddp 0\.1\.0 -> 0\.2\.0\); choose"):
        folder.resume(run | {"versions": {"mnist_ddp": "0.2.0"}})


def test_values_survive_json(tmp_path: Path) -> None:
    values = {"epoch": 1, "samples_done": 0, "loss": 0.1 + 0.2, "best": float("-inf")}
    Checkpoints(tmp_path, keep=1).save(Snapshot({"x": torch.zeros(1)}, values))
    found, _ = Checkpoints(tmp_path, keep=1).newest()
    assert found is not None
    assert found.values == values
    assert json.loads(json.dumps(found.values)) == values
