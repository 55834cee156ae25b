"""Writing files that appear whole or not at all."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that other programs see complete or not at all, and that survives a power cut once this returns."""
    if not path.name or path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def replace_folder(path: Path, fill: Callable[[Path], Any]) -> None:
    """Puts a folder that `fill` has filled in the place of `path`.

    A folder cannot be renamed over another, so for an instant there is none; the old one is beside it then.
    """
    temporary, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("new", "old"))
    for leftover in (temporary, old):  # of a killed run
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        fill(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    umask = os.umask(0)
    os.umask(umask)
    for file in temporary.iterdir():
        file.chmod(0o666 & ~umask)  # safetensors writes 0600
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    sync_folder(temporary)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
