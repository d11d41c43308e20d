"""Ranks that become slower together: a tensor-parallel group, a whole stage, or a whole replica.

A rank that becomes slower alone is slow. Where all ranks of the same work become slower alike, the
times alone do not identify the slow one: inside a tensor-parallel group every timer lasts as long
as the slowest member's, and the slow member is then the one that waits least.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from resihp.contracts import TelemetryBatch

from ..arrays import Floats, Ints, appended
from ..persistence import Persistent
from ..rank_table import RankTable
from .rank_tests import TURNS, RankTests, StepEvidence
from .status import SUSPECT_AT

_STEPS = 3
_ALIKE = 0.6
"""Members rise alike when each rises by this share of the one that rises most."""


class CorrelatedRanks(Persistent):
    """Keeps the waiting of the last steps, and finds the slow member of a group that rises
    together."""

    _saved = ("waits",)

    def __init__(self, places: RankTable) -> None:
        self._places = places
        self.waits = np.empty((0, places.size))
        sizes = places.class_sizes
        self._groups = [members for members in _members(places.group) if members.size > 1] + [
            members
            for members in _members(places.peers)
            if members.size == 2 and sizes[places.peers[members[0]]] == 2
        ]
        self._without_peers = [
            members
            for members in _members(places.group)
            if members.size > 2 and sizes[places.peers[members[0]]] == members.size
        ]
        self._at: list[list[int]] = [[] for _ in range(places.size)]
        for number, members in enumerate(self._groups):
            for member in members.tolist():
                self._at[member].append(number)

    def observe(self, records: TelemetryBatch, index: Ints) -> None:
        """Records how long every rank waited in a step, as a share of its compute time."""
        size = self._places.size
        known = np.isfinite(records.wait_ms)
        wait = np.bincount(index[known], records.wait_ms[known], size)
        busy = np.bincount(index[known], records.compute_ms[known], size)
        share = np.where(busy > 0, wait / np.maximum(busy, 1e-9), np.nan)
        self.waits = appended(self.waits, share, TURNS)

    @property
    def lags(self) -> Floats | None:
        """By how much of its compute time the member that waited least in the last step waited less
        than any other; for groups whose members have no other peers, NaN elsewhere. None if there
        are no such groups."""
        if not self._without_peers:
            return None
        lags = np.full(self._places.size, np.nan)
        for members in self._without_peers:
            least, second = np.sort(self.waits[-1, members])[:2]
            lags[members] = second - least
        return lags

    def attribute(self, tests: RankTests, now: StepEvidence) -> tuple[StepEvidence, Ints]:
        """Separates slow ranks from those that wait for them.

        Returns `now`, with the evidence on ranks that only wait lowered and ranks that cannot be
        separated not `able`; and for every rank the position of the one that it waits for, -1
        for none.
        """
        waits_for = np.full(self._places.size, -1, np.int64)
        rising = np.flatnonzero(now.seen & (now.evidence >= SUSPECT_AT)).tolist()
        if not rising:
            return now, waits_for
        able, evidence = now.able.copy(), now.evidence.copy()
        whole, found = dict[int, float](), dict[int, float]()  # rise by group, and by slowest rank
        for number in sorted({number for rank in rising for number in self._at[rank]}):
            members = self._groups[number]
            # Ages of the group's last steps or, where members are intermittently slow, of the slow
            # ones of the member with the strongest evidence.
            age = np.arange(min(_STEPS, len(tests.window)))
            turning = members[now.intermittent[members]]
            if turning.size:
                age = np.flatnonzero(now.turns[::-1, turning[np.argmax(now.evidence[turning])]])
            recent = tests.window[np.ix_(-1 - age, members)]
            level = np.median(np.nan_to_num(recent), axis=0) - now.reference[members]
            if level.min() < _ALIKE * level.max() or level.max() <= 0:
                continue
            slowest = self._waits_least(members, float(level.max()), age)
            if slowest is None:
                whole[number] = float(level.max())
                continue
            if slowest < 0:
                able[members] = False
                continue
            others = members[members != slowest]
            waits_for[others], found[slowest] = slowest, float(level.max())
            # Below suspicion, but not clean enough to update baselines.
            evidence[others] = np.minimum(evidence[others], SUSPECT_AT - 2.5)
        for number, level_of_group in whole.items():
            members = self._groups[number]
            if any(self._mirrors(members, at, level_of_group / found[at]) for at in found):
                able[members] = False
        return replace(now, able=able, evidence=evidence), waits_for

    def _mirrors(self, members: Ints, slowest: int, ratio: float) -> bool:
        """Returns whether a group rises because of a slow rank in the other replica and another
        stage.

        Two replicas of two stages are compared with each other only: a slow rank in one corner
        raises the opposite corner by as much, as a whole and without waiting in it.
        """
        places, one = self._places, members[0]
        if places.dp.max() != 1 or places.pp.max() != 1 or not _ALIKE < ratio < 1.0 / _ALIKE:
            return False
        return bool(places.dp[one] != places.dp[slowest] and places.pp[one] != places.pp[slowest])

    def _waits_least(self, members: Ints, level: float, age: Ints) -> int | None:
        """The slowest member; -1 where it is unknown; None where all are slow by their own
        time."""
        waits = self.waits[np.ix_(-1 - age, members)]
        if not np.isfinite(waits).any(axis=0).all():
            return -1
        waited = np.nanmean(waits, axis=0)
        order = np.argsort(waited)
        gap = waited[order[1]] - waited[order[0]]
        if gap > 0.5 * (1.0 - np.exp(-level)):
            return int(members[order[0]])
        same_group = np.unique(self._places.group[members]).size == 1
        return None if same_group else -1


def _members(ids: Ints) -> list[Ints]:
    """Positions of the members of each id."""
    order = np.argsort(ids, kind="stable")
    edges = np.flatnonzero(np.diff(ids[order])) + 1
    return [part.astype(np.int64) for part in np.split(order, edges)]
