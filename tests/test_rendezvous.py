"""The processes of a restart meet each other, whatever those before them left in the store.

python -m pytest tests/test_rendezvous.py
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from mnist_ddp.rendezvous import one_start

WITHIN = timedelta(seconds=20)


def start_all(port: int, order: Sequence[int], pause_seconds: float = 0.0) -> list[str]:
    """What each rank reads, in rank order, where every rank reads what it may and then writes, as Gloo's do."""

    def join(rank: int) -> str:
        store = one_start(dist.TCPStore("localhost", port, timeout=WITHIN), rank, len(order), WITHIN)
        said = store.get("said").decode() if store.check(["said"]) else ""
        store.set("said", f"by {rank}")
        return said

    with ThreadPoolExecutor(len(order)) as pool:
        futures = {}
        for rank in order:
            futures[rank] = pool.submit(join, rank)
            time.sleep(pause_seconds)
        return [futures[rank].result(WITHIN.total_seconds()) for rank in range(len(order))]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_nothing_of_an_earlier_start_is_seen(order: tuple[int, ...]) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    start_all(server.port, range(4))
    assert "" in start_all(server.port, order, pause_seconds=0.1)  # the first to look finds nothing


def test_all_of_a_start_see_the_same() -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def count(rank: int) -> int:
        store = one_start(dist.TCPStore("localhost", server.port), rank, 3, WITHIN)
        return store.add("counted", 1)

    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            assert sorted(pool.map(count, range(3))) == [1, 2, 3]


def test_a_process_that_does_not_come_is_named() -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    start_all(server.port, range(3))
    with pytest.raises(dist.DistStoreError, match="timed out waiting for rank 1, 2 to join"):
        one_start(dist.TCPStore("localhost", server.port), 0, 3, timedelta(seconds=0.3))
