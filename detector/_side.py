"""Tests beside the one on devices: whole replicas, links, and the host of a rank.

What they find never names a device. It makes ranks inconclusive, or is told beside the verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resihp.contracts import Op, Status, TelemetryBatch

from ._arrays import Bools, Floats, Ints, State
from ._expected import StepResidual
from ._places import Places
from ._watch import Watch
from .robust import group_median
from .settings import DetectorSettings

_STEPS = 3
_QUIET = 3.0


@dataclass(frozen=True, kw_only=True)
class LinkVerdict:
    """What is said of the transfers that `rank` records with `peer`.

    slowdown    transfer time over that of the links between the same two stages
    since_step  first slow step; None while healthy
    """

    rank: int
    peer: int
    status: Status
    slowdown: float = 1.0
    since_step: int | None = None
    evidence: tuple[str, ...] = ()


class LevelTest:
    """Which of several things, each with one number a step, have become slower than their like.

    classes   things of one class are compared with each other
    least     slowdown below which nothing is said
    error     standard error (log) of a number, at least
    """

    def __init__(
        self, classes: Ints, settings: DetectorSettings, *, least: float, error: float
    ) -> None:
        count = classes.size
        ids = np.arange(count, dtype=np.int64)
        ones = np.ones(count)
        places = Places(ids, ids, ids, ids, classes, ones, ones, ones, ones)
        self._error, self._least = error, float(np.log(least))
        self.watch = Watch(places, settings)
        self.slow = np.zeros(count, bool)
        self.factor = np.ones(count)
        self.level = np.zeros(count)
        self.since = np.full(count, -1, np.int64)

    def observe(self, step: int, value: Floats) -> Bools:
        """Takes the logs of one step (NaN where there is none); returns what is slow."""
        count = value.size
        residual = StepResidual(
            value, np.full(count, self._error), np.ones(count, np.int64), self._error
        )
        quiet = ~(self.watch.past_test.evidence() > _QUIET) & ~self.slow
        now = self.watch.observe(step, residual, quiet, np.ones(count, bool))
        recent = np.median(self.watch.window[self.watch.recent(_STEPS)], axis=0)
        level = recent - now.reference
        longer = np.median(self.watch.window[self.watch.recent(2 * _STEPS)], axis=0)
        self.level = np.nan_to_num(np.maximum(level, longer - now.reference))
        rises = (now.evidence >= self.watch.name_at) & (level > self._least)
        stays = self.slow & ~(level < 0.4 * np.log(self.factor))
        back = self.slow & ~stays
        if back.any():
            self.watch.clear(back)
        self.since = np.where((rises | stays) & ~self.slow, step, self.since)
        self.slow = stays | (rises & ~back)
        self.factor = np.where(self.slow, np.exp(np.nan_to_num(level)), 1.0)
        return self.slow

    def state(self) -> State:
        """What `load` needs."""
        return {
            "watch": self.watch.state(),
            "slow": self.slow,
            "factor": self.factor,
            "level": self.level,
            "since": self.since,
        }

    def load(self, state: State) -> None:
        """Takes up what `state` returned."""
        self.watch.load(state["watch"])
        self.level = state["level"]
        self.slow, self.factor, self.since = state["slow"], state["factor"], state["since"]


class Replicas:
    """Whether a whole replica has become slower, where no lengths say that it has more work.

    Nothing can tell that from longer sequences, so it makes its ranks inconclusive, never slow.
    """

    def __init__(self, places: Places, settings: DetectorSettings) -> None:
        self._places = places
        self._count = int(places.dp.max()) + 1
        classes = np.zeros(self._count, np.int64)
        self.test = LevelTest(classes, settings, least=1.08, error=0.02)

    def observe(self, records: TelemetryBatch, index: Ints, step: int) -> Bools:
        """Takes the compute records of a step; returns the ranks whose whole replica is slow."""
        places = self._places
        logs = np.log(np.maximum(records.compute_ms, 1e-6))
        kind = (places.peers[index] << 8) | (records.chunk.astype(np.int64) << 1) | (records.op & 1)
        _, kind = np.unique(kind, return_inverse=True)
        logs = logs - group_median(logs, kind, int(kind.max()) + 1)[kind]
        level = group_median(logs, index, places.size)
        seen = np.isfinite(level)
        lowest = np.full(self._count, np.inf)
        np.minimum.at(lowest, places.dp[seen], level[seen])
        value = np.where(np.isfinite(lowest), lowest, np.nan)
        return self.test.observe(step, value)[places.dp]

    def explains(self, excess: Floats, fixed: Floats) -> Bools:
        """Ranks whose excess (log) may come from a slowdown of their whole replica.

        A factor g on all stages looks like more work to the witnesses, but for the `fixed` share of
        a rank's time that more work would not lengthen: that leaves an excess of
        `fixed * (1 - 1 / g)`. It is believed if the replica's times have grown to suit, and, the
        maps not being exact, whenever they have grown by twice the excess.
        """
        part = np.clip(np.maximum(excess, 0.0) / np.maximum(fixed, 1e-9), 0.0, 0.999)
        level = self.test.level[self._places.dp]
        suits = (level >= -0.5 * np.log1p(-part)) | (level >= 2.0 * excess)
        result: Bools = (level > 0.04) & suits
        return result


class Hosts:
    """Whether a rank's host keeps it waiting: data loading, garbage collection."""

    def __init__(self, places: Places, settings: DetectorSettings) -> None:
        self._places = places
        self.test = LevelTest(np.zeros(places.size, np.int64), settings, least=1.5, error=0.1)

    def observe(self, step: TelemetryBatch, index: Ints, number: int) -> Bools:
        """Takes all records of a step; returns the ranks whose host is slow."""
        data = step.op == Op.DATA
        if not data.any():
            return self.test.slow
        size = self._places.size
        spent = np.bincount(index[data], step.compute_ms[data], size)
        present = np.bincount(index[data], minlength=size) > 0
        # Measured against the work of a step, so that a slow start of nearly nothing is nothing.
        compute = (step.op == Op.FORWARD) | (step.op == Op.BACKWARD)
        busy = np.bincount(index[compute], step.compute_ms[compute], size)
        floor = 0.01 * float(np.median(busy[busy > 0])) if (busy > 0).any() else 0.0
        value = np.log(np.maximum(spent + floor, 1e-9))
        return self.test.observe(number, np.where(present, value, np.nan))


class Links:
    """Whether the transfers between two ranks take longer than those of the same stages.

    The links are those of the first two steps with point-to-point records; a link that shows up
    later makes the comparison start again with it.
    """

    def __init__(self, places: Places, settings: DetectorSettings) -> None:
        self._places, self._settings = places, settings
        self._keys = np.empty(0, np.int64)
        self._test: LevelTest | None = None

    def observe(self, step: TelemetryBatch, index: Ints, number: int) -> None:
        """Takes all records of a step."""
        rows = (step.op == Op.P2P) & (step.peer >= 0) & (step.compute_ms > 0)
        if not rows.any():
            return
        peer = self._places.index(step.peer[rows].astype(np.int64))
        known = peer >= 0
        own, peer, times = index[rows][known], peer[known], step.compute_ms[rows][known]
        keys = (own << 32) | peer
        found = np.unique(keys)
        test = self._test
        if test is None or not np.isin(found, self._keys).all():
            test = self._begin(np.union1d(self._keys, found))
        at = np.searchsorted(self._keys, keys)
        value = group_median(np.log(times), at, self._keys.size)
        test.observe(number, value)

    def _begin(self, keys: Ints) -> LevelTest:
        self._keys = keys
        places = self._places
        own, peer = keys >> 32, keys & 0xFFFF_FFFF
        kind = np.stack([places.peers[own], places.peers[peer]], axis=1)
        _, classes = np.unique(kind, axis=0, return_inverse=True)
        classes = classes.reshape(-1).astype(np.int64)
        self._test = LevelTest(classes, self._settings, least=1.25, error=0.02)
        return self._test

    @property
    def any_slow(self) -> bool:
        """Whether any link is slow."""
        return self._test is not None and bool(self._test.slow.any())

    def verdicts(self) -> list[LinkVerdict]:
        """The slow links, in the order of their ranks."""
        test = self._test
        if test is None:
            return []
        found = []
        for at in np.flatnonzero(test.slow).tolist():
            rank = int(self._places.ranks[int(self._keys[at]) >> 32])
            peer = int(self._places.ranks[int(self._keys[at]) & 0xFFFF_FFFF])
            factor = float(test.factor[at])
            words = f"transfers with rank {peer} take {factor:.2f} times as long as their like"
            found.append(
                LinkVerdict(
                    rank=rank,
                    peer=peer,
                    status=Status.FAIL_SLOW,
                    slowdown=factor,
                    since_step=int(test.since[at]),
                    evidence=(words,),
                )
            )
        return found

    def state(self) -> State:
        """What `load` needs."""
        return {"keys": self._keys, "test": None if self._test is None else self._test.state()}

    def load(self, state: State) -> None:
        """Takes up what `state` returned."""
        if state["test"] is not None:
            self._begin(state["keys"]).load(state["test"])
