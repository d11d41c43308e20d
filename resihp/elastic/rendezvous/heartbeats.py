"""Who still beats, as seen by one rank that waits for others."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch.distributed as dist

from .store import Timeouts

# Looks at a peer's heartbeat within the time-out after which it is given up.
_LOOKS = 10


class Heartbeats:
    """Looks at the others' heartbeats in the store.

    The time-out is counted in looks, not on a clock: when this process itself was held up, the
    others have had no more chance to beat than it had to look.
    """

    def __init__(self, store: dist.Store, rank: int, timeouts: Timeouts) -> None:
        self.look_s = timeouts.heartbeat.total_seconds() / _LOOKS
        self._store, self._rank = store, rank
        self._connect_s = timeouts.connect.total_seconds()
        self._seen: dict[int, tuple[int, int]] = {}
        self._next_look = 0.0

    def look(self, ranks: Collection[int], waited_s: float) -> list[int]:
        """What `silent` says, if it is time to ask again; else nobody."""
        now = time.monotonic()
        if now <= self._next_look:
            return []
        self._next_look = now + self.look_s
        return self.silent(ranks, waited_s)

    def silent(self, ranks: Collection[int], waited_s: float) -> list[int]:
        """Those of `ranks` that are dead or have not beaten for the time-out; ask every `look_s`.

        A rank that has never beaten is still starting; it gets the time that it takes to connect.
        """
        is_overdue = waited_s > self._connect_s
        silent = []
        for rank in sorted(set(ranks) - {self._rank}):
            beat = self._beat(rank)
            last, looks = self._seen.get(rank, (-1, 0))
            looks = looks + 1 if beat == last else 0
            self._seen[rank] = (beat, looks)
            is_late = looks >= _LOOKS if beat else is_overdue
            if is_late or self._store.check([f"dead/{rank}"]):
                silent.append(rank)
        return silent

    def _beat(self, rank: int) -> int:
        key = f"beat/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0
