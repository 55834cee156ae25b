"""Images parsed once per machine: an Arrow file that all processes map, so that they share one copy in memory."""

import contextlib
import fcntl
import hashlib
import io
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mnist_ddp.data.parsing import Contents

if TYPE_CHECKING:
    import pyarrow

_FORMAT = 1  # part of each key; counts up with every change of what the files hold or how sources are read


@dataclass(frozen=True)
class Stored:
    """Images as a reader found them.

    Attributes:
        images: (N, H, W) uint8; of a file that is mapped read-only where they come from the cache.
        labels: (N,) int64 indices into `class_names`, or None.
        class_names: in label order.
        notes: what to tell the user.
    """

    images: Tensor
    labels: Tensor | None
    class_names: tuple[str, ...]
    notes: tuple[str, ...]


def load_or_parse(
    parse: Callable[[IO[bytes]], Contents], key: dict[str, Any], name: str, cache_dir: str
) -> Stored:
    """What `parse` yields: from the cache where it holds it, else parsed, by one process while the others wait.

    Args:
        parse: writes N x H x W pixel bytes to the file that it is given. Called once, or twice where the cache folder
            turns out to be full.
        key: all that the result depends on, as JSON values.
        name: start of the file's name, for people.
        cache_dir: the folder; it is made. Empty: no cache, every process parses for itself.

    Raises:
        UserError: from `parse`. A cache that cannot be used is a note, no error.
    """
    note = ()
    if cache_dir:
        text = json.dumps({**key, "format": _FORMAT}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = Path(cache_dir).expanduser() / f"{name}-{digest}.arrow"
        try:
            return _through_cache(parse, path, text)
        except OSError as error:  # parse reports its own as UserError, so this is about the cache
            note = (f"--cache_dir {cache_dir}: {error.strerror or error}; read without a cache",)
    pixels = io.BytesIO()
    found = parse(pixels)
    images = torch.frombuffer(pixels.getbuffer(), dtype=torch.uint8).view(-1, found.height, found.width)
    labels = None if found.labels is None else torch.from_numpy(found.labels)
    return Stored(images, labels, found.class_names, found.notes + note)


def _through_cache(parse: Callable[[IO[bytes]], Contents], path: Path, key: str) -> Stored:
    stored = _load(path, key)
    if stored is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            stored = _load(path, key)  # another process may have written it in the meantime
            if stored is None:
                _write(parse, path, key)
                stored = _load(path, key)
                assert stored is not None, f"{path} was written but does not load"
    return stored


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process of the machine at a time. The kernel frees it when its holder ends, however it ends."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(parse: Callable[[IO[bytes]], Contents], path: Path, key: str) -> None:
    """Parses into a file beside `path`, then writes the Arrow file, which appears complete or not at all."""
    import pyarrow as pa

    raw_path, partial_path = path.with_suffix(".raw"), path.with_suffix(".partial")
    try:
        with raw_path.open("w+b") as raw:
            found = parse(raw)
            raw.flush()
            # Mapped, but not read: `_Splice` copies the pixels from file to file. A single record batch keeps them in
            # one piece, which a tensor needs.
            with mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                buffer = pa.py_buffer(mapped)
                num_pixels = found.height * found.width
                num_images = len(mapped) // num_pixels
                images = pa.FixedSizeBinaryArray.from_buffers(pa.binary(num_pixels), num_images, [None, buffer])
                labels = pa.array(np.zeros(num_images, np.int64) if found.labels is None else found.labels)
                meta = {
                    "key": key,
                    "height": found.height,
                    "width": found.width,
                    "labelled": found.labels is not None,
                    "class_names": found.class_names,
                    "notes": found.notes,
                    "checksum": _checksum(raw, labels.buffers()[1]),
                }
                schema = pa.schema(
                    [("image", images.type), ("label", labels.type)], metadata={"mnist_ddp": json.dumps(meta)}
                )
                with partial_path.open("wb") as out:
                    sink = pa.PythonFile(_Splice(out, raw, buffer), mode="w")
                    with pa.ipc.new_file(sink, schema) as writer:
                        writer.write_batch(pa.record_batch([images, labels], schema=schema))
                del images, buffer  # before the map is closed
        partial_path.replace(path)
    finally:
        for leftover in (raw_path, partial_path):
            leftover.unlink(missing_ok=True)
