"""Heartbeats of a rank, its part in the watch of the others, and its view of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import Protocol

import torch.distributed as dist

from . import keys
from .host_table import HostTable
from .liveness import (
    LOOKS,
    HostWatcher,
    JobWatcher,
    LivenessSummary,
    LivenessView,
    ProcessHistory,
)
from .store import Timeouts

REQUESTS_PER_S = 10_000
"""Requests to one store by all ranks of a job together that a rank keeps to."""


class BeatTable(Protocol):
    """Beats of the processes of a host, e.g. `HostTable`."""

    host: str

    def beat(self, rank: int, number: int, beat: int) -> None:
        """Write beat number `beat` of process `number` of `rank`."""

    def read(self) -> Mapping[int, tuple[int, int]]:
        """(number, beat) of each process by rank."""

    def close(self) -> None:
        """Close the table."""


class Heartbeats:
    """Heartbeats of one rank, and what it knows of those of the others (see `liveness`).

    A look of a rank that waits is one request to the store, one of a host's watcher two, one of the
    job's watcher four; other ranks make none.

    interval_s  time between two looks
    clock       in seconds
    """

    def __init__(
        self,
        rank: int,
        timeouts: Timeouts,
        *,
        open_table: Callable[[str], BeatTable] = HostTable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval_s = timeouts.heartbeat.total_seconds() / LOOKS
        self._rank, self._connect_s = rank, timeouts.connect.total_seconds()
        self._open_table, self._clock = open_table, clock
        self._table: BeatTable | None = None
        self._number, self._beats = 0, 0
        self._host_watcher = HostWatcher(rank)
        self._job_watcher = JobWatcher("")
        self._is_listed, self._hosts = False, list[str]()
        self._next_look_s = 0.0
        self._view, self._viewed_s = LivenessView(LivenessSummary(), ProcessHistory()), -inf

    # Heartbeats.

    def enter(self, store: dist.Store) -> None:
        """Begin to beat as a member, or as one that was invited again."""
        if self._table is None:
            token = store.compare_set(keys.HEARTBEAT_TABLE, "", secrets.token_hex(8)).decode()
            self._table = self._open_table(token)
            self._job_watcher = JobWatcher(self._table.host)
        history = ProcessHistory(store.get(keys.PROCESS_HISTORY))
        self._number = history.invitations[self._rank]
        self.beat()

    def beat(self) -> None:
        """Show that this process is alive."""
        if self._table is not None:
            self._beats += 1
            self._table.beat(self._rank, self._number, self._beats)

    def close(self) -> None:
        """Stop to beat."""
        if self._table is not None:
            self._table.close()
            self._table = None

    # The watch of others.

    def due_s(self) -> float:
        """Seconds until `watch` is to be called again."""
        return self._next_look_s - self._clock()

    def watch(self, store: dist.Store) -> None:
        """Look at the processes of this host, and write what this rank has to write of them."""
        self._next_look_s = self._clock() + self.interval_s
        if self._table is None:
            return
        summary = self._host_watcher.look(self._table.read())
        if summary is None:
            return
        store.set(keys.host_liveness(self._table.host), summary.encode())
        if not self._is_listed:
            store.append(keys.HOSTS, f"{self._table.host},")  # type: ignore[attr-defined]
            self._is_listed = True
        if self._job_watcher.is_active or self._has_taken_over(store):
            self._watch_job(store)

    def _has_taken_over(self, store: dist.Store) -> bool:
        """Take the place of the job's watcher if that is lost; False while it is there."""
        found = store.get(keys.JOB_LIVENESS)
        claim = self._job_watcher.claim(found)
        if claim is None:
            return False
        self._job_watcher.written(
            claim, store.compare_set(keys.JOB_LIVENESS, found.decode(), claim.encode())
        )
        if self._job_watcher.is_active:
            counts, listed = store.multi_get([keys.HOST_COUNTS, keys.HOSTS])
            self._job_watcher.take_over(counts)
            self._hosts = _hosts(listed)
        return self._job_watcher.is_active

    def _watch_job(self, store: dist.Store) -> None:
        listed, *raw = store.multi_get([keys.HOSTS, *map(keys.host_liveness, self._hosts)])
        summary = self._job_watcher.look(dict(zip(self._hosts, raw, strict=True)))
        self._hosts = _hosts(listed)
        store.set(keys.HOST_COUNTS, self._job_watcher.counts())
        before = self._job_watcher.current
        found = store.compare_set(keys.JOB_LIVENESS, before.decode(), summary.encode())
        self._job_watcher.written(summary, found)

    # A rank that waits.

    def silent(
        self, store: dist.Store, ranks: Collection[int], waited_s: float, members: int
    ) -> list[int]:
        """Return those of `ranks` that are dead or have not beaten for the time-out.

        A rank without any heartbeat is still starting; it is silent after `Timeouts.connect`, of
        which `waited_s` seconds have passed. The store is asked once in `interval_s`, less often by
        each rank in jobs of many `members`, and for each wait once at its beginning.
        """
        now = self._clock()
        interval_s = max(self.interval_s, members / REQUESTS_PER_S)
        if self._viewed_s < max(now - interval_s, now - waited_s):
            self._viewed_s = now
            raw, history = store.multi_get([keys.JOB_LIVENESS, keys.PROCESS_HISTORY])
            self._view = LivenessView(LivenessSummary.decode(raw), ProcessHistory(history))
        lost = self._view.lost_among(ranks, is_overdue=waited_s > self._connect_s)
        return [rank for rank in lost if rank != self._rank]


def _hosts(listed: bytes) -> list[str]:
    return list(dict.fromkeys(listed.decode().rstrip(",").split(",")))


def prepare(store: dist.Store) -> None:
    """Write the keys that are read by those that wait, if they are not there."""
    store.compare_set(keys.JOB_LIVENESS, "", LivenessSummary().encode())
    store.compare_set(keys.PROCESS_HISTORY, "", ",")
    store.compare_set(keys.HOST_COUNTS, "", "{}")
