"""A file of text, packed or not -> blocks of whole lines."""

import bz2
import gzip
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, BinaryIO

from mnist_ddp.errors import UserError

BLOCK_BYTES = 4 << 20  # about 2,000 rows of 28x28; a few of them at most are in memory as text

_UTF_16 = "is UTF-16 text; save it as UTF-8"
_NOT_CSV = {
    b"\xff\xfe": _UTF_16,
    b"\xfe\xff": _UTF_16,
    b"PAR1": "is a Parquet file; give its folder to --dataset",
    b"ARROW1": "is an Arrow file; give the folder that save_to_disk wrote to --dataset",
    b"\x00\x00\x08": "is an MNIST idx file; convert it to CSV",
    b"\x93NUMPY": "is a NumPy file; convert it to CSV",
    b"<": "is an HTML or XML page, not a CSV file; download the file itself",
    b"{": "is JSON, not CSV",
}


def read_blocks(path: str) -> Iterator[tuple[bytes, float]]:
    """Yields (lines, share): the text in blocks of whole lines, and the share of the file read so far, 0 to 1.

    .gz, .xz, .zst, .bz2 and .zip are recognised by their content, not their name. A byte order mark is left out.
    Every block but the last ends with a newline.

    Raises:
        UserError: the file cannot be read, is damaged or cut short, or is no text.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            text = _unpack(file, path)
            lines, rest = text.read(BLOCK_BYTES), b""
            _check_text(lines[:4096], path)
            lines = lines.removeprefix(b"\xef\xbb\xbf")
            while lines:
                lines = rest + lines
                end = lines.rfind(b"\n") + 1
                if end:
                    yield lines[:end], min(1.0, file.tell() / size)
                elif len(lines) > 2 * BLOCK_BYTES:
                    raise UserError(f"{path}: a row is longer than {BLOCK_BYTES >> 20} MiB; rows end in a newline")
                rest = lines[end:]
                lines = text.read(BLOCK_BYTES)
            if rest:
                yield rest, 1.0
    except UserError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise UserError(f"{path}: {error.strerror}") from error
        raise UserError(f"{path}: {_damage(error)}") from error
    except (EOFError, ValueError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: {_damage(error)}") from error


def _unpack(file: BinaryIO, path: str) -> Any:  # something with read()
    magic = file.read(6)
    file.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)
    if magic.startswith(b"\xfd7zXZ\x00"):
        return lzma.LZMAFile(file)
    if re.match(rb"BZh[1-9]", magic):
        return bz2.BZ2File(file)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow  # the only zstd decoder among the dependencies

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    if magic.startswith(b"PK\x03\x04"):
        return _open_zip(file, path)
    return file


def _open_zip(file: BinaryIO, path: str) -> IO[bytes]:
    archive = zipfile.ZipFile(file)
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
    tables = [name for name in names if name.lower().endswith((".csv", ".txt", ".tsv", ".data"))]
    if "xl/workbook.xml" in names:
        raise UserError(f"{path}: is an Excel workbook; save it as CSV")
    if len(tables) != 1:
        found = ", ".join(tables or names) or "nothing"
        raise UserError(f"{path}: holds {found}, where one CSV file is expected; unpack it and name the file")
    return archive.open(tables[0])


def _check_text(head: bytes, path: str) -> None:
    if not head:
        raise UserError(f"{path}: is empty")
    for magic, what in _NOT_CSV.items():
        if head.lstrip(b" \t\r\n").startswith(magic):
            raise UserError(f"{path}: {what}")
    if head.count(b"\0") * 3 > len(head) and head.count(b"\n\0") + head.count(b"\0\n"):
        raise UserError(f"{path}: {_UTF_16}")
    # A stray NUL is a fault of its row; many control bytes are another kind of file.
    if len(re.findall(rb"[\x00-\x08\x0e-\x1f\x7f]", head)) * 20 > len(head):
        raise UserError(f"{path}: is a binary file, not CSV")
    if b"\n" not in head and b"\r" in head:
        raise UserError(f"{path}: rows end in a carriage return alone; save it with newlines")


def _damage(error: Exception) -> str:
    if isinstance(error, EOFError) or "runcated" in str(error):
        return "the packed data is cut short; get the file again"
    if "encrypted" in str(error):
        return "is encrypted; unpack it first"
    return "the packed data is damaged; get the file again"
