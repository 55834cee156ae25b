"""What several test files share. Its place also puts tests/ on the import path, for launching.py and ranks.py."""

import gzip
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: some tests fork, and a forked child would wait for ever for the threads of OpenMP's pool.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from launching import ROOT


@pytest.fixture(scope="session")
def small_csv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 400 of the embedded digits, in the plain MNIST layout without a header: 320 / 40 / 40 when split."""
    with gzip.open(ROOT / "data" / "mnist_test.csv.gz", "rt") as digits:
        rows = [next(digits) for _ in range(400)]
    path = tmp_path_factory.mktemp("data") / "small.csv"
    path.write_text("".join(rows))
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 64 kB of room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, timeout=20, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("no permission to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=20)
