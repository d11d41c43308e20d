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
    Beat,
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

    def enter(self, rank: int, number: int) -> None:
        """Be process `number` of `rank`, whose beats follow."""

    def beat(self, count: int) -> None:
        """Write beat number `count` of this process."""

    def read(self) -> Mapping[int, Beat]:
        """Latest beat of each process by rank."""

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
        self._beats = 0
        self._host_watcher = HostWatcher(rank)
        self._job_watcher = JobWatcher("")
        self._is_listed, self._hosts = False, list[str]()
        self._next_look_s = 0.0
        self._view = (-inf, LivenessView(LivenessSummary(), ProcessHistory()))  # since when
        self._asked_s, self._waits_since_s = -inf, -inf  # latest question, begin of latest wait

    # Heartbeats.

    def enter(self, store: dist.Store) -> None:
        """Begin to beat as a member, or as one that was invited again."""
        if self._table is None:
            token = store.compare_set(keys.HEARTBEAT_TABLE, "", secrets.token_hex(8)).decode()
            self._table = self._open_table(token)
            self._job_watcher = JobWatcher(self._table.host)
        history = ProcessHistory(store.get(keys.PROCESS_HISTORY))
        self._table.enter(self._rank, history.invitations[self._rank])
        self.beat()

    def beat(self) -> None:
        """Show that this process is alive."""
        if self._table is not None:
            self._beats += 1
            self._table.beat(self._beats)

    def close(self) -> None:
        """Stop to beat."""
        if self._table is not None:
            self._table.close()
            self._table = None

    # The watch of others.

    def due_s(self) -> float:
        """Seconds until `watch` is to be called again."""
        return self._next_look_s - self._clock()

    def watch_host(self) -> LivenessSummary | None:
        """Look at the processes of this host; returns what this rank has to write of them."""
        self._next_look_s = self._clock() + self.interval_s
        return None if self._table is None else self._host_watcher.look(self._table.read())

    def watch(self, store: dist.Store) -> None:
        """Look at the processes of this host, and write what this rank has to write of them."""
        summary = self.watch_host()
        if summary is None or self._table is None:
            return
        store.set(keys.host_liveness(self._table.host), summary.encode())
        if not self._is_listed:
            store.append(keys.HOSTS, f"{self._table.host},")  # type: ignore[attr-defined]
            self._is_listed = True
        try:
            if self._job_watcher.is_active or self._has_taken_over(store):
                self._watch_job(store)
        except dist.DistError:  # what it has written is not known: it is to be succeeded
            self._job_watcher = JobWatcher(self._table.host)
            raise

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

        One that has ended on a host where its peers live counts as such at the next look. A rank
        without any heartbeat is still starting; it is silent after `Timeouts.connect`, of
        which `waited_s` seconds have passed.
        """
        since_s = self._ask(waited_s)
        self.refresh(store, members)
        return self._lost(ranks, since_s, waited_s)

    def known_silent(self, ranks: Collection[int], waited_s: float) -> list[int]:
        """Return what `silent` does as far as it is known, without a request to the store.

        Nothing is known before the first `refresh` since the wait began.
        """
        return self._lost(ranks, self._ask(waited_s), waited_s)

    def ended_on_host(self, ranks: Collection[int]) -> list[int]:
        """Return those of `ranks` on this host whose process has ended: all that is certain
        without a store, which may block the heartbeats of the others."""
        return sorted(self._host_watcher.ended.intersection(ranks))

    def is_refresh_due(self, members: int) -> bool:
        """Return whether a rank that waits needs a newer view of the others.

        It does once in `interval_s`, less often in jobs of many `members`, and for each wait once
        at its beginning.
        """
        viewed_s, _ = self._view
        interval_s = max(self.interval_s, members / REQUESTS_PER_S)
        is_old = viewed_s < min(self._asked_s, self._clock() - interval_s)
        return is_old or viewed_s < self._waits_since_s

    def refresh(self, store: dist.Store, members: int) -> None:
        """Read the state of the others if a rank that waits needs it."""
        if not self.is_refresh_due(members):
            return
        now_s = self._clock()
        raw, history = store.multi_get([keys.JOB_LIVENESS, keys.PROCESS_HISTORY])
        self._view = now_s, LivenessView(LivenessSummary.decode(raw), ProcessHistory(history))

    def _ask(self, waited_s: float) -> float:
        """Note the question of a rank that has waited for `waited_s`; returns since when."""
        self._asked_s = self._clock()
        since_s = self._asked_s - waited_s
        self._waits_since_s = max(self._waits_since_s, since_s)
        return since_s

    def _lost(self, ranks: Collection[int], since_s: float, waited_s: float) -> list[int]:
        viewed_s, view = self._view
        if viewed_s < since_s:
            return []
        lost = view.lost_among(ranks, is_overdue=waited_s > self._connect_s)
        return [rank for rank in lost if rank != self._rank]


def _hosts(listed: bytes) -> list[str]:
    return list(dict.fromkeys(listed.decode().rstrip(",").split(",")))


def prepare(store: dist.Store) -> None:
    """Write the keys that are read by those that wait, if they are not there."""
    store.compare_set(keys.JOB_LIVENESS, "", LivenessSummary().encode())
    store.compare_set(keys.PROCESS_HISTORY, "", ",")
    store.compare_set(keys.HOST_COUNTS, "", "{}")
