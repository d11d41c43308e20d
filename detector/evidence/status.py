"""From evidence to status: suspicion, names and their withdrawal, with hysteresis."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Status

from ..arrays import Bools, Floats
from ..persistence import Persistent
from ..settings import DetectorSettings
from .intermittent import EDGE, first_slow_step
from .rank_tests import RankTests, StepEvidence
from .sequential import log_ratio

CODES: tuple[Status, ...] = tuple(Status)
HEALTHY, SUSPECT, FAIL_SLOW, FAIL_STOP, INCONCLUSIVE = range(len(CODES))
SUSPECT_AT = float(np.log(2_000.0))
"""Evidence (log) from which a rank is suspect: one false suspicion per device in 2,000 steps."""
_CARRY_STEPS = 3
"""Steps on a new layout before a device named on the old one is measured again."""
_LEAST_PAST = 3
_IN_DOUBT = 0.25
"""Share of the evidence of a suspicion from which a rank no longer updates any baseline."""
_MOST_ERROR = 2.0
"""Largest uncertainty of a factor (log), where the records contradict each other."""
_FACTOR_STEPS = 12
"""Steps over which the factor of a named device is measured."""
_AGREE, _AGREE_SHARE = 6.0, 0.1
"""Largest distance between steps of a slow device that agree: standard deviations plus a share of
the slowness (log)."""
_RECOVERED_AT = float(np.log(100.0))
"""Evidence (log) from which a rank is healthy again: a few quick steps may be noise."""
_SPELLS = 16
"""Steps after a recovery within which a new slow spell continues the one before."""
_CHANCE = 1e-3
"""Chance of a healthy run of an intermittently slow device that counts as recovery."""
_PAUSES = 3
"""Number of its longest pauses for which such a device must be healthy."""
_MOST_HEALTHY_STEPS = 32
"""Most healthy steps required for a recovery."""


def beliefs(evidence: Floats) -> Floats:
    """Evidence (log) as probabilities of slowness: one half where suspicion begins."""
    result: Floats = 1.0 / (1.0 + np.exp(-np.clip(evidence - SUSPECT_AT, -50.0, 50.0)))
    return result


class StatusTable(Persistent):
    """Status of every rank, driven by the evidence of each step; arrays over ranks.

    status     index into `CODES`
    since      step of the onset; -1 where it is before the first step
    factor     slowdown; `low` and `high` bound it
    evidence   log e-value that the rank is slow
    slow_run, well_run   consecutive steps with slow, with healthy residuals
    carried    whether the name comes from an older layout and is not confirmed on this one yet
    by_past    whether the evidence comes from the rank's own past, not from its peers
    turns      whether the rank is intermittently slow
    slow_steps slow ones of the steps since its onset, shape (ranks, 2): how many, of how many
    began      step of its first slow spell, where several lie close together; -1 from the start
    fresh      step from which it was healthy again; -1 if it never was slow
    """

    _saved = (
        "status", "since", "factor", "low", "high", "evidence", "slow_run", "well_run", "carried",
        "by_past", "turns", "slow_steps", "began", "fresh",
    )  # fmt: skip

    def __init__(self, size: int, settings: DetectorSettings) -> None:
        self._settings = settings
        self._least = float(np.log(settings.min_slowdown))
        self.status = np.full(size, HEALTHY, np.int64)
        self.since, self.began, self.fresh = (np.full(size, -1, np.int64) for _ in range(3))
        self.factor, self.low, self.high = np.ones((3, size))
        self.evidence = np.full(size, -np.inf)
        self.slow_run, self.well_run = np.zeros((2, size), np.int64)
        self.carried, self.by_past, self.turns = np.zeros((3, size), bool)
        self.slow_steps = np.zeros((size, 2), np.int64)

    def trusted(self) -> Bools:
        """Ranks that may update baselines."""
        doubtful = self.evidence > _IN_DOUBT * SUSPECT_AT
        result: Bools = (self.status == HEALTHY) & ~doubtful
        return result

    def update(self, tests: RankTests, now: StepEvidence, excused: Bools) -> None:
        """Updates the statuses by the evidence of a step. `excused` ranks are inconclusive for a
        reason of their own, which low evidence does not end."""
        self._fix_early_baseline(tests, now)
        self.evidence, self.by_past = now.evidence, now.by_past
        intermittent = now.intermittent
        self._count_runs(now)
        live = now.seen & (self.status != FAIL_STOP)
        named = self.status == FAIL_SLOW
        doubted = (self.status == SUSPECT) | (self.status == INCONCLUSIVE)
        rising = live & ~named & (now.evidence >= SUSPECT_AT)
        falling = live & doubted & ~excused & (now.evidence < SUSPECT_AT - 2.0)
        measured = rising | (live & named & ~self._confirm_carried(tests))
        for rank in np.flatnonzero(measured).tolist():
            self._measure(tests, now, rank)
        strong = rising & (now.evidence >= tests.name_at)
        strong &= self._confirmed(tests, now) | intermittent
        strong &= self.low > 1.0
        strong &= self.factor >= self._settings.min_slowdown
        self.status[rising & (self.status == HEALTHY)] = SUSPECT
        self._name(tests, strong & now.able, intermittent)
        self.status[strong & ~now.able] = INCONCLUSIVE
        self._mark_healthy(tests, falling)
        self._recover(tests, now, live & named)

    def _confirmed(self, tests: RankTests, now: StepEvidence) -> Bools:
        """Ranks slow for enough consecutive steps that agree in size, or for one more step if they
        do not: two hiccups are seldom of one size."""
        steps = self._settings.confirm_steps
        last = tests.window[-steps:] - now.reference
        most = last.max(axis=0)
        agree = most - last.min(axis=0) <= _AGREE * now.scale + _AGREE_SHARE * most
        return self.slow_run >= np.where(agree, steps, steps + 1)

    def _name(self, tests: RankTests, ranks: Bools, intermittent: Bools) -> None:
        """Names ranks slow: continuously, intermittently, or again soon after a recovery."""
        self.status[ranks] = FAIL_SLOW
        soon = tests.steps[-_SPELLS:][0] <= self.fresh
        again = ranks & (self.fresh >= 0) & soon
        first = ranks & ~again
        self.began[first], self.turns[first] = self.since[first], False
        self.turns |= again | ((self.status == FAIL_SLOW) & intermittent)

    def _confirm_carried(self, tests: RankTests) -> Bools:
        """Confirms names from an older layout; returns the ranks that carried one before.

        In the first steps of a layout the expected times are too uncertain to measure anew. If
        such a rank is clearly not healthy in them, its baseline is set so that it is as slow as
        it was, and it is measured against that from then on.
        """
        before = self.carried.copy()
        for rank in np.flatnonzero(self.carried & (self.status == FAIL_SLOW)).tolist():
            seen = tests.window[-_CARRY_STEPS:, rank]
            known = np.log(self.factor[rank])
            if np.count_nonzero(np.isfinite(seen)) < _CARRY_STEPS:
                continue
            level = float(np.nanmedian(seen))
            if level > 0.4 * known:
                tests.anchor(rank, level - known)
            self.carried[rank] = False
        return before

    def _fix_early_baseline(self, tests: RankTests, now: StepEvidence) -> None:
        """Sets the baseline of a rank without peers that slows before it has one: to the level of
        the steps before the onset, if there are enough and they are within the healthy spread."""
        early = now.seen & tests.unsettled() & (now.evidence >= SUSPECT_AT)
        for rank in np.flatnonzero(early).tolist():
            series = tests.window[:, rank]
            series = series[np.isfinite(series)]
            first = onset(series, float(now.scale[rank]))
            level = float(np.median(series[:first])) if first >= _LEAST_PAST else np.inf
            if tests.alike(level):
                tests.anchor(rank, level, float(first))

    def _count_runs(self, now: StepEvidence) -> None:
        expected = np.where(self.status == FAIL_SLOW, np.log(self.factor), 2.0 * self._least)
        edge = np.maximum(0.5 * self._least, EDGE * expected)
        slow = now.seen & (now.excess > edge)
        self.slow_run = np.where(slow, self.slow_run + 1, np.where(now.seen, 0, self.slow_run))
        well = now.seen & ~slow
        self.well_run = np.where(well, self.well_run + 1, np.where(now.seen, 0, self.well_run))

    def _measure(self, tests: RankTests, now: StepEvidence, rank: int) -> None:
        """Measures onset and factor of one rank from the window of residuals."""
        rows = np.flatnonzero(np.isfinite(tests.window[:, rank]))
        excess = tests.window[rows, rank] - now.reference[rank]
        scale = float(now.scale[rank])
        named, intermittent = self.status[rank] == FAIL_SLOW, bool(now.turns[:, rank].any())
        slow = np.ones(rows.size, bool)
        if intermittent:
            slow = excess > EDGE * float(
                np.median(now.slow(tests.window, rank)[:, rank]) - now.reference[rank]
            )
        elif named and self.turns[rank]:
            slow = excess > EDGE * float(np.log(self.factor[rank]))
        if not named:
            first = first_slow_step(slow) if intermittent else onset(excess, scale)
            whole = first == 0 and tests.count == len(tests.window)
            self.since[rank] = -1 if whole else int(tests.steps[rows[first]])
        else:
            first = int(np.searchsorted(tests.steps[rows], self.since[rank]))
        recent = excess[min(first, excess.size - 1) :]
        recent = recent[slow[-recent.size :]][-_FACTOR_STEPS:]
        self.slow_steps[rank] = np.count_nonzero(slow[first:]), rows.size - first
        if not recent.size:
            return
        middle = float(np.median(recent))
        error = float(np.hypot(1.25 * scale / np.sqrt(recent.size), now.doubt[rank]))
        error = min(error, _MOST_ERROR)
        self.factor[rank] = np.exp(max(middle, 0.0))
        self.low[rank] = np.exp(middle - 1.96 * error)
        self.high[rank] = np.exp(middle + 1.96 * error)

    def _mark_healthy(self, tests: RankTests, ranks: Bools) -> None:
        if not ranks.any():
            return
        self.status[ranks] = HEALTHY
        self.factor[ranks] = self.low[ranks] = self.high[ranks] = 1.0
        self.carried[ranks] = False
        self.since[ranks] = tests.steps[-1]

    def _recover(self, tests: RankTests, now: StepEvidence, named: Bools) -> None:
        back = named & (self.well_run >= self._settings.recover_steps)
        for rank in np.flatnonzero(back).tolist():
            if self.turns[rank]:
                back[rank] = self.well_run[rank] >= self._healthy_steps_needed(tests, now, rank)
            else:
                back[rank] = self._has_recovered(tests, now, rank)
        if not back.any():
            return
        self._mark_healthy(tests, back)
        started = tests.steps[np.maximum(tests.steps.size - self.well_run[back], 0)]
        self.since[back] = self.fresh[back] = started
        tests.clear(back)

    def _has_recovered(self, tests: RankTests, now: StepEvidence, rank: int) -> bool:
        """Test if the last steps of a rank, from some step on, are those of a healthy one, and not
        of one that is as slow as before them; after many healthy ones running always."""
        if self.well_run[rank] >= _MOST_HEALTHY_STEPS:
            return True
        rows = np.isfinite(tests.window[:, rank]) & (tests.steps >= self.since[rank])
        excess = tests.window[rows, rank].astype(np.float64) - now.reference[rank]
        for count in range(self._settings.recover_steps, min(excess.size, _MOST_HEALTHY_STEPS) + 1):
            slow = excess[:-count][-_FACTOR_STEPS:]
            level = float(np.median(slow) if slow.size else np.log(self.factor[rank]))
            gains = log_ratio(excess[-count:], now.scale[rank], np.array(max(level, self._least)))
            if gains.sum() <= -_RECOVERED_AT:
                return True
        return False

    def _healthy_steps_needed(self, tests: RankTests, now: StepEvidence, rank: int) -> int:
        """Healthy steps before an intermittently slow rank is healthy again: so many that they are
        neither chance nor one of its pauses."""
        seen = tests.window[tests.steps >= self.began[rank], rank]
        seen = seen[np.isfinite(seen)]
        edge = max(EDGE * float(np.log(self.factor[rank])), 0.5 * self._least)
        at = np.flatnonzero(seen - now.reference[rank] > edge)
        slow_share = at.size / max(int(np.ptp(at)) + 1, 1) if at.size else 0.0
        pause = int(np.diff(at).max(initial=1)) - 1
        lucky = int(np.ceil(np.log(_CHANCE) / np.log(min(max(1.0 - slow_share, 0.05), 0.9))))
        return max(
            self._settings.recover_steps, min(max(_PAUSES * pause, lucky), _MOST_HEALTHY_STEPS)
        )


def onset(excess: NDArray[np.floating], scale: float) -> int:
    """Most likely first slow step, given that the last ones are slow.

    The maximum over k of the gain of a shift by the recent level in `excess[k:]`, with each
    step's gain bounded so that a lone outlier does not pull the onset back to itself.

    >>> onset(np.array([0.0, 0.1, 3.0, 0.0, 0.1, 2.9, 3.1, 3.0]), 0.1)
    5
    """
    level = max(float(np.median(excess[-3:])), scale)
    gain = np.clip((excess - 0.5 * level) / level, -1.0, 1.0)
    total = np.cumsum(gain[::-1])[::-1]
    return int(np.argmax(total))
