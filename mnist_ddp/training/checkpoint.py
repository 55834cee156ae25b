"""Checkpoints: the whole state of a run in a folder that is complete or absent, and is verified before it is believed.

    checkpoints/epoch-00003-sample-00005120/
        state.safetensors   weights, their average, the best of them, the optimizer's tensors
        state.json          everything else
        SHA256SUMS          of the two; `sha256sum -c SHA256SUMS` checks them

Nothing in them is pickled, so a tampered file cannot run code. There is no RNG state either: order and augmentation
follow from (seed, epoch, position).
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from mnist_ddp.errors import UserError
from mnist_ddp.files import sync_folder

_DAMAGE = (OSError, ValueError, SafetensorError)  # what reading a checkpoint may raise that is not whole
_NAME = re.compile(r"epoch-\d{5,}-sample-\d{8,}")  # other folders are not the run's
TENSORS, VALUES, SUMS = "state.safetensors", "state.json", "SHA256SUMS"


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one step: `TrainingState.snapshot` makes it, `restore` takes it.

    Attributes:
        tensors: on the CPU, by name.
        values: JSON values; "epoch" and "samples_done" are the position in the run.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]

    @property
    def position(self) -> tuple[int, int]:
        """How far the run has come: complete epochs, and samples of the next."""
        return self.values["epoch"], self.values["samples_done"]


class Checkpoints:
    """The checkpoints of a run, newest few kept. One process writes them.

    Args:
        folder: is created with the first checkpoint, in a folder that must exist.
        keep: how many to keep, 1 or more.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        for leftover in folder.glob(".*"):  # of a run that was killed while it wrote
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, snapshot: Snapshot) -> None:
        """Writes one checkpoint, then removes the oldest beyond `keep`.

        Raises:
            UserError: it could not be written; the older ones are untouched.
        """
        contents = {
            TENSORS: safetensors.torch.save(snapshot.tensors),
            VALUES: json.dumps(snapshot.values).encode(),
        }
        contents[SUMS] = _sums(contents)
        # Named by its position, which a run passes once: nothing that is whole is ever replaced.
        final = self.folder / "epoch-{epoch:05d}-sample-{samples_done:08d}".format(**snapshot.values)
        if final.exists():
            with contextlib.suppress(*_DAMAGE):
                _read(final)
                return  # after a stop right after a resume
            shutil.rmtree(final, ignore_errors=True)  # damaged, and its run has come here again from an older one
        temporary = self.folder / f".{final.name}.{os.getpid()}"
        with writing(final, self.folder.parent):
            try:
                self.folder.mkdir(exist_ok=True)
                temporary.mkdir()
                for name, content in contents.items():
                    with open(temporary / name, "wb") as file:
                        file.write(content)
                        file.flush()
                        os.fsync(file.fileno())
                sync_folder(temporary)
                temporary.rename(final)
                sync_folder(self.folder)
            except OSError:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        # One that is newer is damaged: the run went on from an older one.
        newer = [path for path in self._newest_first() if path.name > final.name]
        older = [path for path in self._newest_first() if path.name <= final.name]
        for path in (*newer, *older[self.keep :]):
            shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> tuple[Snapshot | None, list[str]]:
        """The newest checkpoint that is whole, and a line about each damaged one that was passed over.

        Raises:
            UserError: there are checkpoints, but none is whole.
        """
        damaged: list[str] = []
        for path in self._newest_first():
            try:
                return _read(path), damaged
            except _DAMAGE as error:
                damaged.append(f"checkpoint {path} is damaged ({error}) and was passed over")
        if damaged:
            raise UserError(
                f"{self.folder}: all {len(damaged)} checkpoints are damaged ({damaged[0]}); restore one from a backup, "
                "or start over with --resume never"
            )
        return None, damaged

    def _newest_first(self) -> list[Path]:
        return sorted((path for path in self.folder.glob("epoch-*") if _NAME.fullmatch(path.name)), reverse=True)


@contextlib.contextmanager
def writing(path: Path, run_folder: Path) -> Iterator[None]:
    """Turns what may go wrong while `path` is written, in the folder of a run, into a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        if not run_folder.exists():
            raise gone(run_folder) from error
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot write {path}: {reason}; earlier checkpoints are intact, the next start resumes from the newest"
        ) from error


def gone(run_folder: Path) -> UserError:
    return UserError(f"the run folder {run_folder} is gone: moved or removed during the run")


def _sums(contents: Mapping[str, bytes]) -> bytes:
    return "".join(f"{hashlib.sha256(contents[name]).hexdigest()}  {name}\n" for name in (TENSORS, VALUES)).encode()


def _read(path: Path) -> Snapshot:
    """Raises OSError, ValueError or SafetensorError where the checkpoint is not exactly what was written."""
    contents = {name: (path / name).read_bytes() for name in (TENSORS, VALUES)}
    if (path / SUMS).read_bytes() != _sums(contents):
        raise ValueError(f"its files do not match {SUMS}")
    return Snapshot(safetensors.torch.load(contents[TENSORS]), json.loads(contents[VALUES]))
