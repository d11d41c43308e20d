"""Store barrier before process groups are created.

A group's constructor blocks in the store until all peers have published their addresses, and cannot
be cancelled; so no rank calls it before all ranks have arrived here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

import torch.distributed as dist

from resihp.contracts import PeerLostError

from . import keys

_LONGEST_PAUSE_S = 0.02
_REQUESTS_PER_S = 10_000  # of all ranks together to one store


def barrier(
    store: dist.Store,
    name: str,
    ranks: Collection[int],
    *,
    broken: Callable[[], str | None],
    absent: Callable[[float], Sequence[int]],
    timeout: timedelta,
) -> None:
    """Return when all `ranks`, this one included, have called this with the same `name`.

    Each rank calls it once for a name. `broken()` is a reason to give up, or None;
    `absent(waited_s)` lists ranks that will not arrive. Raises `PeerLostError` for either, and
    after `timeout`.
    """
    start, pause_s = time.monotonic(), 0.001
    longest_s = max(_LONGEST_PAUSE_S, len(ranks) / _REQUESTS_PER_S)
    key = keys.arrivals(name)
    arrived = store.add(key, 1)
    while arrived < len(ranks):
        waited_s = time.monotonic() - start
        if (reason := broken()) is not None:
            raise PeerLostError(reason)
        if lost := absent(waited_s):
            raise PeerLostError(f"ranks {list(lost)} are dead or do not answer")
        if waited_s > timeout.total_seconds():
            raise PeerLostError(f"{arrived} of {len(ranks)} ranks arrived within {timeout}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
        arrived = store.add(key, 0)
