"""Failure detection by heartbeats in the store."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch.distributed as dist

from . import keys
from .store import Timeouts

# Reads of a peer's heartbeat within the time-out after which the peer counts as lost.
_READS = 10


class HeartbeatReader:
    """Reads the heartbeats of peers.

    The time-out is counted in reads instead of seconds: while this process was suspended, its peers
    may have been suspended too.
    """

    def __init__(self, store: dist.Store, rank: int, timeouts: Timeouts) -> None:
        self.interval_s = timeouts.heartbeat.total_seconds() / _READS
        self._store, self._rank = store, rank
        self._connect_s = timeouts.connect.total_seconds()
        self._seen: dict[int, tuple[int, int]] = {}
        self._next_read = 0.0

    def silent_if_due(self, ranks: Collection[int], waited_s: float) -> list[int]:
        """`silent(ranks, waited_s)` once every `interval_s`; an empty list in between."""
        now = time.monotonic()
        if now <= self._next_read:
            return []
        self._next_read = now + self.interval_s
        return self.silent(ranks, waited_s)

    def silent(self, ranks: Collection[int], waited_s: float) -> list[int]:
        """Return those of `ranks` that are dead or have not beaten for the time-out.

        To be called every `interval_s`. A rank without any heartbeat is still starting; it is
        silent after `Timeouts.connect`, of which `waited_s` seconds have passed.
        """
        is_overdue = waited_s > self._connect_s
        silent = []
        for rank in sorted(set(ranks) - {self._rank}):
            beat = self._beat(rank)
            last, reads = self._seen.get(rank, (-1, 0))
            reads = reads + 1 if beat == last else 0
            self._seen[rank] = (beat, reads)
            is_late = reads >= _READS if beat else is_overdue
            if is_late or self._store.check([keys.dead(rank)]):
                silent.append(rank)
        return silent

    def _beat(self, rank: int) -> int:
        key = keys.heartbeat(rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0
