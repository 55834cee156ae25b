"""Images parsed once per machine: an Arrow file that all processes map, so that they share one copy in memory."""

import fcntl
import hashlib
import io
import json
import mmap
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from mnist_ddp.data.parsing import Contents
from mnist_ddp.errors import UserError

_FORMAT = 1  # part of each key: counts up with every change of what the files hold or how sources are read
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Stored:
    """Images as a reader found them.

    Attributes:
        images: (N, H, W) uint8. From the cache, a map of the file: read only.
        labels: (N,) int64 indices into `class_names`, or None. From the cache, read only too.
        class_names: in label order.
        notes: what to tell the user, a line each.
    """

    images: Tensor
    labels: Tensor | None
    class_names: tuple[str, ...]
    notes: tuple[str, ...]


def load_or_parse(parse: Callable[[IO[bytes]], Contents], key: dict[str, Any], name: str, cache_dir: str) -> Stored:
    """What `parse` yields: from the cache where it is there, else parsed, by one process while the others wait.

    Args:
        parse: writes N x H x W pixel bytes to the empty file that it is given. Called once, or a second time where the
            cache folder turns out to be full.
        key: all that the result depends on, as JSON values.
        name: start of the file's name, for people.
        cache_dir: the folder, made where it is missing. Empty: no cache, every process parses for itself.

    Raises:
        UserError: from `parse`. A cache that cannot be used is a note and no error.
    """
    notes: tuple[str, ...] = ()
    if cache_dir:
        text = json.dumps({**key, "format": _FORMAT}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        try:
            # expanduser raises RuntimeError where the user has no home, as in some containers.
            return _through_cache(parse, text, Path(cache_dir).expanduser() / f"{name}-{digest}.arrow")
        except (OSError, RuntimeError) as error:  # those of the source are UserErrors, so this one is about the cache
            notes = (f"--cache_dir {cache_dir}: {getattr(error, 'strerror', None) or error}; read without a cache",)
    pixels = io.BytesIO()
    found = parse(pixels)
    images = torch.frombuffer(pixels.getbuffer(), dtype=torch.uint8).view(-1, found.height, found.width)
    labels = None if found.labels is None else torch.from_numpy(found.labels)
    return Stored(images, labels, found.class_names, found.notes + notes)


def _through_cache(parse: Callable[[IO[bytes]], Contents], key: str, path: Path) -> Stored:
    stored = _load(path, key)
    if stored is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The kernel frees the lock when its holder ends, however it ends.
        with path.with_suffix(".lock").open("a+") as lock:
            waited = not _lock_at_once(lock)
            stored = _load(path, key)  # another process may have written it in the meantime
            lock.seek(0)
            if stored is None and waited and (fault := lock.read()):
                raise UserError(fault)  # of the process that was waited for: it need not be searched again
            lock.truncate(0)
            if stored is None:
                try:
                    _write(parse, path, key)
                except UserError as error:
                    lock.write(str(error))
                    raise
                stored = _load(path, key)
                assert stored is not None, f"{path} was written but does not load"
    return stored


def _lock_at_once(lock: IO[Any]) -> bool:
    """Takes the lock; False where another process had it, and was waited for."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return False
    return True


def _write(parse: Callable[[IO[bytes]], Contents], path: Path, key: str) -> None:
    """Parses into a file beside `path`, then writes the Arrow file, which appears complete or not at all.

    Only the holder of the lock is here, so that what a killed one has left is overwritten.
    """
    import pyarrow as pa

    raw_path, partial_path = path.with_suffix(".raw"), path.with_suffix(".partial")
    try:
        with raw_path.open("w+b") as raw, partial_path.open("wb") as partial:
            found = parse(raw)
            raw.flush()
            # A tensor needs the images in one piece, hence one record batch. They are mapped but not read here:
            # `_Splice` copies them from file to file, in constant memory.
            mapped = pa.py_buffer(mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ))
            num_pixels = found.height * found.width
            num_images = len(mapped) // num_pixels
            images = pa.FixedSizeBinaryArray.from_buffers(pa.binary(num_pixels), num_images, [None, mapped])
            labels = pa.array(np.zeros(num_images, np.int64) if found.labels is None else found.labels)
            about = json.dumps([key, found.labels is not None, *found._replace(labels=None)])
            metadata = {"about": about, "checksum": _checksum(about, _pieces(raw, 0, len(mapped)), labels.buffers()[1])}
            batch = pa.record_batch([images, labels], names=["image", "label"]).replace_schema_metadata(metadata)
            sink = pa.PythonFile(_Splice(partial, raw, mapped.address), mode="w")
            with pa.ipc.new_file(sink, batch.schema) as writer:
                writer.write_batch(batch)
        partial_path.replace(path)
    finally:
        raw_path.unlink(missing_ok=True)
        partial_path.unlink(missing_ok=True)


def _load(path: Path, key: str) -> Stored | None:
    """The file's content without a copy; None where it is missing, damaged, or of another key."""
    import pyarrow as pa

    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    try:
        with file:
            mapped = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            reader = pa.ipc.open_file(mapped)
            metadata, batch = reader.schema.metadata, reader.get_batch(0)
            about = metadata[b"about"].decode()
            (_, pixels), (_, labels) = (column.buffers() for column in batch.columns)
            # Read, not looked at through the map, whose pages would all count as memory of this process.
            pieces = _pieces(file, pixels.address - mapped.address, pixels.size)
            if metadata[b"checksum"].decode() != _checksum(about, pieces, labels):
                return None
        found_key, labelled, height, width, _, class_names, notes = json.loads(about)
        images = np.frombuffer(pixels, np.uint8, len(batch) * height * width).reshape(-1, height, width)
        indices = np.frombuffer(labels, np.int64, len(batch))
    except (OSError, ValueError, KeyError, pa.ArrowException):  # what damage looks like; an empty file is a ValueError
        return None
    if found_key != key:
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensors = torch.from_numpy(images), torch.from_numpy(indices) if labelled else None
    return Stored(*tensors, tuple(class_names), tuple(notes))


def _checksum(about: str, pixels: Iterable[Any], labels: Any) -> str:
    """CRC-32 of all that a file holds. It is no signature: it notices accidents."""
    checksum = zlib.crc32(about.encode())
    for piece in pixels:
        checksum = zlib.crc32(piece, checksum)
    return str(zlib.crc32(labels, checksum))


def _pieces(file: IO[bytes], start: int, size: int) -> Iterator[bytes]:
    file.seek(start)
    while size > 0 and (piece := file.read(min(_PIECE_BYTES, size))):
        size -= len(piece)
        yield piece


class _Splice:
    """A file for pyarrow to write to. The buffer at `address` is copied from the file that it is a map of."""

    closed = False

    def __init__(self, out: IO[bytes], source: IO[bytes], address: int) -> None:
        self.out = out
        self.source = source
        self.address = address
        self.tell = out.tell
        self.flush = out.flush

    def write(self, data: Any) -> int:
        if getattr(data, "address", None) != self.address:
            return self.out.write(data)
        self.source.seek(0)
        shutil.copyfileobj(self.source, self.out, _PIECE_BYTES)
        return len(data)
