"""Slow links, slow groups of collectives and slow hosts; they name no device.

A collective ends on all ranks at once, so that a slow device shows in the waiting of the others and
a slow link in the transfer itself. Only collective records that separate the two are used.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from resihp.contracts import LinkVerdict, Op, Status, TelemetryBatch
from resihp.formatting import numbers

from .arrays import Bools, Ints, group_median
from .evidence.level_tests import LevelTest
from .evidence.status import SUSPECT_AT, beliefs
from .persistence import Persistent, State
from .rank_table import RankTable
from .settings import DetectorSettings

_NEGLIGIBLE = 0.01
"""Time as a share of a pass that is added to that of all transfers and collectives, so that a
change of less is none."""


def _usual_pass_ms(step: TelemetryBatch) -> float:
    passes = step.compute_ms[(step.op == Op.FORWARD) | (step.op == Op.BACKWARD)]
    return float(np.median(passes)) if passes.size else 0.0


class LinkTest(Persistent):
    """Finds pairs of ranks whose transfers take longer than others between the same stages.

    The links are those with point-to-point records so far; one that appears later joins them.
    """

    _saved = ("_keys", "_test")

    def __init__(self, places: RankTable, settings: DetectorSettings) -> None:
        self._places, self._settings = places, settings
        self._keys = np.empty(0, np.int64)
        self._test: LevelTest | None = None

    def observe(self, step: TelemetryBatch, index: Ints, number: int) -> None:
        """Takes all records of a step."""
        rows = (step.op == Op.P2P) & (step.peer >= 0) & (step.compute_ms > 0)
        peer = self._places.index(step.peer[rows])
        known = peer >= 0
        if not known.any():
            return
        own, peer, times = index[rows][known], peer[known], step.compute_ms[rows][known]
        times = times + _NEGLIGIBLE * _usual_pass_ms(step)
        keys = (own << 32) | peer
        found = np.unique(keys)
        test = self._test
        if test is None or not np.isin(found, self._keys).all():
            test = self._grown(np.union1d(self._keys, found))
        at = np.searchsorted(self._keys, keys)
        value = group_median(np.log(times), at, self._keys.size)
        test.compare(number, value)

    def _grown(self, keys: Ints) -> LevelTest:
        """The test with further links."""
        older, before = self._test, self._keys
        test = self._begin(keys)
        if older is not None:
            test.continue_from(older, np.searchsorted(keys, before))
        return test

    def _begin(self, keys: Ints) -> LevelTest:
        self._keys = keys
        places = self._places
        own, peer = keys >> 32, keys & 0xFFFF_FFFF
        kind = np.stack([places.peers[own], places.peers[peer]], axis=1)
        _, classes = np.unique(kind, axis=0, return_inverse=True)
        classes = classes.reshape(-1).astype(np.int64)
        self._test = LevelTest(classes, self._settings, least=1.15, error=0.02)
        return self._test

    def verdicts(self) -> list[LinkVerdict]:
        """The verdicts on slow and suspected links, in the order of their ranks."""
        test = self._test
        if test is None or not (unhealthy := _unhealthy(test)).any():
            return []
        own, peers = self._ends()
        return [
            _verdict(test, at, f"transfers with rank {peers[at]}", int(own[at]), int(peers[at]))
            for at in np.flatnonzero(unhealthy).tolist()
        ]

    def counts(self) -> Counter[Status]:
        """Number of links that are compared, by status."""
        return Counter() if self._test is None else _counts(self._test)

    def _ends(self) -> tuple[Ints, Ints]:
        """Ranks at the two ends of each link."""
        ranks = self._places.ranks
        return ranks[self._keys >> 32], ranks[self._keys & 0xFFFF_FFFF]

    def load(self, state: State) -> None:
        """Restores what `state` returned."""
        if state["_keys"].size:
            self._begin(state["_keys"])
        super().load(state)


class CollectiveTest(Persistent):
    """Test of the collectives of tensor-parallel groups, those within microbatches, or of
    data-parallel ones (the ranks of all replicas that hold the same shard), those of the step."""

    _saved = ("test",)

    def __init__(
        self, places: RankTable, settings: DetectorSettings, *, within_microbatches: bool
    ) -> None:
        self._places, self._inner = places, within_microbatches
        # Groups are comparable that hold the same layers, or data-parallel ones as many of them;
        # the network between replicas is shared with others.
        shard = places.group if within_microbatches else np.stack([places.pp, places.slot])
        alike = places.layers + 1e6 * (places.first + 2 * places.last)
        _, group, sizes = np.unique(shard, axis=-1, return_inverse=True, return_counts=True)
        group = group.reshape(-1)
        kind = np.zeros(sizes.size)
        kind[group] = places.peers if within_microbatches else alike
        self._group = np.where(sizes[group] > 1, group, -1)
        self.test = LevelTest(
            np.unique(kind, return_inverse=True)[1],
            settings,
            least=1.15 if within_microbatches else 1.5,
            error=0.02,
        )

    def observe(self, step: TelemetryBatch, index: Ints, number: int) -> None:
        """Takes all records of a step; of the collectives those that separate the waiting."""
        rows = (step.op == Op.COLLECTIVE) & np.isfinite(step.wait_ms) & (step.compute_ms > 0)
        rows &= ((step.microbatch >= 0) == self._inner) & (self._group[index] >= 0)
        if rows.any():
            group = self._group[index[rows]]
            times = step.compute_ms[rows] + _NEGLIGIBLE * _usual_pass_ms(step)
            self.test.compare(number, group_median(np.log(times), group, self.test.slow.size))

    def verdicts(self) -> list[LinkVerdict]:
        """The verdicts on slow and suspected groups."""
        found = []
        for at in np.flatnonzero(_unhealthy(self.test)).tolist():
            ranks = tuple(self._places.ranks[self._group == at].tolist())
            words = f"collectives within ranks {numbers(ranks, most=8)}"
            found.append(_verdict(self.test, at, words, ranks[0], -1, ranks))
        return found

    def counts(self) -> Counter[Status]:
        """Number of groups that are compared, by status."""
        return _counts(self.test)


def _suspected(test: LevelTest) -> Bools:
    suspected: Bools = ~test.slow & (test.evidence >= SUSPECT_AT) & test.is_high
    return suspected


def _unhealthy(test: LevelTest) -> Bools:
    unhealthy: Bools = test.slow | _suspected(test)
    return unhealthy


def _counts(test: LevelTest) -> Counter[Status]:
    suspected = _suspected(test)
    healthy = np.isfinite(test.level) & ~test.slow & ~suspected
    masks = {Status.HEALTHY: healthy, Status.SUSPECT: suspected, Status.FAIL_SLOW: test.slow}
    return +Counter({status: int(np.count_nonzero(mask)) for status, mask in masks.items()})


def _verdict(
    test: LevelTest, at: int, words: str, rank: int, peer: int, group: tuple[int, ...] = ()
) -> LinkVerdict:
    is_slow = bool(test.slow[at])
    factor = float(test.factor[at] if is_slow else np.exp(test.level[at]))
    return LinkVerdict(
        rank=rank,
        peer=peer,
        group=group,
        status=Status.FAIL_SLOW if is_slow else Status.SUSPECT,
        slowdown=factor,
        since_step=int(test.since[at]) if is_slow else None,
        confidence=float(beliefs(test.evidence[at])),
        evidence=(f"{words} take {factor:.2f} times as long as their like",),
    )


_LEAST_DATA_MS = 1.0


class HostTest(Persistent):
    """Finds ranks whose hosts spend longer on data loading than those of their peers: of the same
    layers and the same position in their group, for some of either load more than others."""

    _saved = ("test",)

    def __init__(self, places: RankTable, settings: DetectorSettings) -> None:
        self._places = places
        alike = np.stack([places.peers, places.slot])
        classes = np.unique(alike, axis=1, return_inverse=True)[1].reshape(-1)
        self.test = LevelTest(classes, settings, least=1.5, error=0.1)

    def observe(self, step: TelemetryBatch, index: Ints, number: int) -> Bools:
        """Takes all records of a step; returns the ranks whose host is slow."""
        data = step.op == Op.DATA
        if not data.any():
            return self.test.slow
        size = self._places.size
        spent = np.bincount(index[data], step.compute_ms[data], size)
        present = np.bincount(index[data], minlength=size) > 0
        # A share of the compute time is added, so that a change of next to no time is none: loaders
        # that prefetch take some hundred microseconds, with a large spread.
        compute = (step.op == Op.FORWARD) | (step.op == Op.BACKWARD)
        busy = np.bincount(index[compute], step.compute_ms[compute], size)
        floor = 0.01 * float(np.median(busy[busy > 0])) if (busy > 0).any() else 0.0
        value = np.log(spent + max(floor, _LEAST_DATA_MS))
        return self.test.compare(number, np.where(present, value, np.nan))
