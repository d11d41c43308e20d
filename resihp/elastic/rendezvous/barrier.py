"""Waits until all who build a world have come, so that none blocks in a group for one that won't.

A group's constructor waits in the store for its peers' addresses, and nothing can call it off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

import torch.distributed as dist

from resihp.contracts import PeerLostError

_LONGEST_PAUSE_S = 0.02
_QUESTIONS_PER_S = 10_000  # that the ranks together put to one store


def meet(
    store: dist.Store,
    name: str,
    ranks: Collection[int],
    *,
    broken: Callable[[], str | None],
    absent: Callable[[float], Sequence[int]],
    timeout: timedelta,
) -> None:
    """Return when all `ranks`, this one among them, have called this with the same `name`.

    Each of them calls it once. `broken` is a reason to give up, or None; `absent` names those who
    will not come, after so many seconds. Raises `PeerLostError` for either, and after `timeout`.
    """
    start, pause_s = time.monotonic(), 0.001
    longest_s = max(_LONGEST_PAUSE_S, len(ranks) / _QUESTIONS_PER_S)
    key = f"met/{name}"
    met = store.add(key, 1)
    while met < len(ranks):
        waited_s = time.monotonic() - start
        if (reason := broken()) is not None:
            raise PeerLostError(reason)
        if gone := absent(waited_s):
            raise PeerLostError(f"ranks {list(gone)} are dead or do not answer")
        if waited_s > timeout.total_seconds():
            raise PeerLostError(f"{met} of {len(ranks)} ranks came in {timeout}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
        met = store.add(key, 0)
