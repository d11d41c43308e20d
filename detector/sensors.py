"""Causes of the slowness of ranks, by their sensors."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from resihp.contracts import Heartbeat

from .arrays import Bools
from .evidence.status import FAIL_SLOW, HEALTHY, SUSPECT, StatusTable
from .persistence import Persistent
from .rank_table import RankTable
from .sensor_causes import SensorCause, causes_of, is_host_made, peers_of, sentences
from .sensor_history import SensorHistory

_Compared = tuple[tuple[int, float], int, float]
"""A rank's newest sample, its onset and its slowdown when it was compared."""


class Sensors(Persistent):
    """Causes of the slowness of ranks, from the samples in their heartbeats.

    Without samples nothing is said. Ranks are compared when a sample of theirs arrives or their
    status changes, so that what healthy ranks cost is the keeping of their samples.
    """

    _saved = ("_history", "_told", "_found")
    _told: dict[int, tuple[str, ...]]
    _found: dict[int, tuple[_Compared, tuple[SensorCause, ...]]]

    def __init__(self, places: RankTable) -> None:
        self._places = places
        self._history = SensorHistory(places.ranks)
        self._told, self._found = {}, {}

    def observe(self, rank: int, heartbeat: Heartbeat, table: StatusTable) -> bool:
        """Take the sample of a heartbeat; return whether it changed what is said of the rank."""
        position, sample = heartbeat.position, heartbeat.sensors
        step = heartbeat.step if position is None else position.step
        if sample is None or step is None or step < 0:
            return False
        at = self._history.position(rank)
        if at < 0:
            return False
        before = self._told.pop(rank, ())
        if table.status[at] not in (SUSPECT, FAIL_SLOW):
            self._history.observe(at, step, sample, None)
            return False
        self._history.observe(at, step, sample, int(table.since[at]))
        told = tuple(sorted(cause.sensor for cause in self._causes(at, table)))
        if told:
            self._told[rank] = told
        return told != before

    def evidence(self, at: int, table: StatusTable) -> tuple[str, ...]:
        """Sentences on the rank at a position."""
        causes = self._causes(at, table)
        return sentences(causes, self._history, at, int(table.since[at])) if causes else ()

    def by_host(self, table: StatusTable, named: Collection[int]) -> set[int]:
        """Ranks, of those at some positions, that are slow because of their hosts."""
        return {
            int(self._places.ranks[at])
            for at in named
            if is_host_made(self._causes(at, table), float(table.factor[at]))
        }

    def forget(self, ranks: Collection[int]) -> None:
        """Drop the samples of ranks whose processes are gone."""
        self._history.forget(ranks)
        for rank in ranks if self._found else ():
            self._found.pop(self._history.position(rank), None)

    def clear(self) -> None:
        """Drop all samples, as the job goes back to an earlier step."""
        self._history.clear()
        self._found.clear()

    def move(self, places: RankTable) -> None:
        """Follow the job to another layout."""
        self._places = places
        self._history.move(places.ranks)
        self._found.clear()

    def _causes(self, at: int, table: StatusTable) -> tuple[SensorCause, ...]:
        history = self._history
        if table.status[at] not in (SUSPECT, FAIL_SLOW) or not history.is_known(at):
            return ()
        onset, slowdown = int(table.since[at]), float(table.factor[at])
        state = (history.version(at), onset, round(slowdown, 2))
        known, causes = self._found.get(at, (None, ()))
        if state != known:
            peers = peers_of(at, self._places.peers, self._usable(table, slowdown))
            causes = causes_of(history, at, onset=onset, slowdown=slowdown, peers=peers)
            self._found[at] = state, causes
        return causes

    def _usable(self, table: StatusTable, slowdown: float) -> Bools:
        """Ranks to compare one of this slowdown with: the healthy ones; where there are none, those
        that are slow as well, but less."""
        usable: Bools = self._history.known & (table.status == HEALTHY)
        if not usable.any():
            slow = np.isin(table.status, (SUSPECT, FAIL_SLOW))
            usable = self._history.known & slow & (table.factor < slowdown)
        return usable
