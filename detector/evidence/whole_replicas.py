"""Whole replicas that become slower, where the work is unknown for want of lengths.

More work looks the same, so that this makes ranks inconclusive, never slow.
"""

from __future__ import annotations

import numpy as np

from resihp.contracts import TelemetryBatch

from ..arrays import Bools, Floats, Ints, appended, group_median
from ..persistence import Persistent
from ..rank_table import RankTable
from ..residuals import FixedShare
from ..settings import DetectorSettings
from .level_tests import LevelTest
from .rank_tests import TURNS, StepEvidence

_CHUNKS = 128
_STEPS = 8
"""Steps over which the level of a replica is averaged, at most."""
_FADE = 0.01
"""Rate at which a replica's past follows its level."""
_OFFSET = 0.02
"""Spread (log) of permanent differences between healthy replicas."""
_CURVATURE = 0.04
"""Error of maps that are not quite affine, as a share of the replica's rise."""
_ODDS = 3.5
"""Log-likelihood ratio from which the rank alone is slow, not its whole replica."""
_NO_SHARE = 0.05
"""Fixed share below which it counts as none."""
_MOST_ODDS = 4.5
"""Largest contribution of the level, or of the pattern over the microbatches: work has long
tails."""


class ReplicaTest(Persistent):
    """Levels of the replicas, and how the residuals of their ranks vary with the fixed share."""

    _saved = ("test", "_reference", "_fixed", "_unsure", "_pattern", "_noise", "_raw", "_past")

    def __init__(self, places: RankTable, settings: DetectorSettings) -> None:
        self._places = places
        self._count = int(places.dp.max()) + 1
        self._two_stages = int(places.pp.max()) == 1
        classes = np.zeros(self._count, np.int64)
        self.test = LevelTest(classes, settings, least=1.08, error=0.02)
        self._reference = np.full((int(places.peers.max()) + 1) * _CHUNKS * 2, np.nan)
        self._fixed, self._unsure = np.zeros(places.size), np.zeros(places.size)
        self._pattern = np.empty((0, 2, places.size))
        self._raw = np.empty((0, self._count))
        self._past = np.full(self._count, np.nan)
        self._noise = 0.0

    def observe(self, records: TelemetryBatch, index: Ints, step: int, fixed: FixedShare) -> Bools:
        """Takes the compute records of a step; returns the ranks whose whole replica is slow."""
        self._fixed, self._unsure, self._noise = fixed.mean, fixed.unsure, fixed.noise
        self._pattern = appended(self._pattern, (fixed.both, fixed.square), _STEPS)
        level = self._levels(records, index)
        self._raw = appended(self._raw, level, TURNS)
        fade = max(_FADE, 1.0 / (1 + self.test.tests.count))
        known, first = np.isfinite(level), np.isnan(self._past)
        self._past = np.where(first, level, self._past)
        self._past[known] += fade * (level - self._past)[known]
        slow = self.test.observe(step, level)[self._places.dp]
        # One replica has no other to compare with. Of two, the usual difference of their work has
        # to be learned first.
        return slow & (self._count > 1) & (self.test.tests.count > _STEPS)

    def _levels(self, records: TelemetryBatch, index: Ints) -> Floats:
        """Time of each replica's records (log) against the first step: that of the rank that rose
        least."""
        places = self._places
        logs = np.log(np.maximum(records.compute_ms, 1e-6))
        chunk = np.minimum(records.chunk.astype(np.int64), _CHUNKS - 1)
        kind = (places.peers[index] * _CHUNKS + chunk) * 2 + (records.op & 1)
        usual = group_median(logs, kind, self._reference.size)
        self._reference = np.where(np.isfinite(self._reference), self._reference, usual)
        usual = self._reference
        level = group_median(logs - usual[kind], index, places.size)
        seen = np.isfinite(level)
        lowest = np.full(self._count, np.inf)
        np.minimum.at(lowest, places.dp[seen], level[seen])
        value = np.where(np.isfinite(lowest), lowest, np.nan)
        # A rise of both of two replicas is not specific to either.
        return value - value[::-1] if self._count == 2 else value

    def explains(self, now: StepEvidence, excess: Floats, run: Ints) -> Bools:
        """Mask of the ranks whose `excess` (log) may come from their whole replica, or from a
        faster neighbour where a replica has two stages. `run` is the number of slow steps so
        far.

        A factor g on all stages looks like more work to the reference ranks, except for the fixed
        share f of a record's time, which does not grow with work. That leaves an excess of
        `log(1 + f * (g - 1))`, the larger the shorter the microbatch. The error of the maps is
        added to the share. The rank alone is slow if the replica's level and the pattern over the
        microbatches are clear evidence for that.
        """
        excess = np.maximum(excess, 0.0)
        share = np.maximum(self._fixed, 0.0) + _CURVATURE + 2.0 * self._unsure
        gain = np.expm1(excess) / share
        level, error = self._level(run, now)
        odds = _odds(level, error, np.log1p(gain))
        joint = self._rose_with_peers(excess)
        if joint.any():
            risen = self._risen(run, now)[joint]
            own = _odds(risen, error[joint], np.log1p(gain)[joint])
            odds[joint] = np.minimum(odds[joint], own)
        by_pattern = _odds(*self._slope(run, now.turns), gain * np.exp(-excess))
        odds += np.where(self._fixed > _NO_SHARE, by_pattern, 0.0)
        result: Bools = odds < _ODDS
        if self._two_stages:
            result |= _odds(-level, error, excess) < -_ODDS
        return result

    def _level(self, run: Ints, now: StepEvidence) -> tuple[Floats, Floats]:
        """Rise of each rank's replica over the rank's last `run` steps (over the slow ones of an
        intermittently slow rank), against its past or its peers, and its standard error."""
        tests, places = self.test.tests, self._places
        level, error = np.zeros(places.size), np.ones(places.size)
        steps = np.clip(run, 2, _STEPS)
        for count in np.unique(steps).tolist():
            ranks = np.flatnonzero(steps == count)
            rows = tests.window[-count:]
            level[ranks], error[ranks] = np.median(rows, axis=0)[places.dp[ranks]], 1.5 / count
        for rank in np.flatnonzero(now.intermittent).tolist():
            slow = now.slow(tests.window, rank)[:, places.dp[rank]]
            level[rank], error[rank] = np.median(slow), 1.5 / slow.size
        usual = np.where(now.by_past, tests.mean[places.dp], 0.0)
        past = np.maximum(tests.past[places.dp], 1.0)
        noise = self.test.scale[places.dp] * np.sqrt(error + 1.0 / past)
        unsure = np.hypot(noise, np.where(now.by_past, 0.0, _OFFSET))
        return np.nan_to_num(level - usual), np.maximum(unsure, 1e-3)

    def _rose_with_peers(self, excess: Floats) -> Bools:
        """Mask of the ranks most of whose peers rose with them: their replicas cannot be compared
        with the other replicas, most of which may have more work."""
        peers = self._places.peers
        usual = group_median(excess, peers, int(peers.max()) + 1)[peers]
        return (excess > 2.0 * self._noise) & (usual > 0.5 * excess)

    def _risen(self, run: Ints, now: StepEvidence) -> Floats:
        """Rise of each rank's replica against its own past, over the same steps."""
        places, result = self._places, np.zeros(self._places.size)
        for rank in np.flatnonzero(np.isfinite(self._past)[places.dp]).tolist():
            slow = now.slow(self._raw, rank)
            if not len(slow):
                slow = self._raw[-int(np.clip(run[rank], 2, _STEPS)) :]
            at = places.dp[rank]
            result[rank] = np.nan_to_num(np.median(slow[:, at]) - self._past[at])
        return result

    def _slope(self, run: Ints, turns: Bools) -> tuple[Floats, Floats]:
        """Slope of residuals against the fixed share over the same steps, and its error."""
        age = np.arange(len(self._pattern))[::-1]
        by_run = age[:, None] < np.clip(run, 1, age.size)
        slow = turns[-1 - age]
        use = np.where(turns.any(axis=0), slow, by_run)
        both, square = np.where(use[:, None], self._pattern, 0.0).sum(axis=0)
        square = np.maximum(square, 1e-12)
        return both / square, 1.5 * max(self._noise, 1e-4) / np.sqrt(square)


def _odds(seen: Floats, error: Floats, needed: Floats) -> Floats:
    """Log-likelihood ratio of 0 against `needed` (0 or more), one-sided: values beyond either add
    no further evidence."""
    inside = np.clip(seen, 0.0, needed)
    ratio = 0.5 * ((needed - inside) ** 2 - inside**2) / error**2
    return np.clip(ratio, -_MOST_ODDS, _MOST_ODDS)
