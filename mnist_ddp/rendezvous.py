"""How the processes of one start find each other, and not those of an earlier one."""

import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

_SCHEME = "one-start"
INIT_METHOD = f"{_SCHEME}://"
_PAUSE_SECONDS = 0.01


def one_start(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of `store` that belongs to the processes of this start alone.

    torchrun restarts its workers with the store of those that died, where the addresses of the dead are found as well
    as those of the living. So every process asks under a name that no other ever had, and rank 0, of which there is one
    at a time, answers with that of the start. It may answer the dead too, but goes on until each rank has heard it.

    Raises:
        dist.DistStoreError: a process did not come within `timeout`.
    """
    if rank > 0:
        own = uuid.uuid4().hex
        store.set(f"asks/{rank}", own)
        store.wait([f"answer/{own}"], timeout)
        start = store.get(f"answer/{own}").decode()
        store.set(f"{start}/heard/{rank}", "")
        return dist.PrefixStore(start, store)
    start = uuid.uuid4().hex
    missing = list(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", start)
        missing = [other for other in missing if not store.check([f"{start}/heard/{other}"])]
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(f"timed out waiting for rank {', '.join(map(str, missing))} to join")
        time.sleep(_PAUSE_SECONDS if missing else 0)
    return dist.PrefixStore(start, store)


def _handler(url: str, timeout: timedelta, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """env://, with the store of `one_start`."""
    for store, rank, world_size in rendezvous(url.replace(_SCHEME, "env", 1), timeout=timeout, **options):
        yield one_start(store, rank, world_size, timeout), rank, world_size


register_rendezvous_handler(_SCHEME, _handler)
