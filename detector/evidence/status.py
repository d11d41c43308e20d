"""From evidence to status: suspicion, names and their withdrawal, with hysteresis."""

from __future__ import annotations

import numpy as np

from resihp.contracts import Status

from ..arrays import Bools, Floats
from ..persistence import Persistent
from ..settings import DetectorSettings
from .intermittent import EDGE, first_slow_step
from .rank_tests import RankTests, StepEvidence

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
_SPELLS = 16
"""Steps after a recovery within which a new slow spell continues the one before."""
_CHANCE = 1e-3
"""Chance of a healthy run of an intermittently slow device that counts as recovery."""
_PAUSES = 3
"""Number of its longest pauses for which such a device must be healthy."""
_MOST_HEALTHY_STEPS = 32
"""Most healthy steps required for a recovery."""


class StatusTable(Persistent):
    """Status of every rank; arrays over ranks.

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

    def __init__(self, size: int) -> None:
        self.status = np.full(size, HEALTHY, np.int64)
        self.since, self.began, self.fresh = (np.full(size, -1, np.int64) for _ in range(3))
        self.factor, self.low, self.high = np.ones((3, size))
        self.evidence = np.full(size, -np.inf)
        self.slow_run, self.well_run = np.zeros((2, size), np.int64)
        self.carried, self.by_past, self.turns = np.zeros((3, size), bool)
        self.slow_steps = np.zeros((size, 2), np.int64)


class StatusMachine(Persistent):
    """State machine of the statuses of all ranks, driven by the evidence of each step."""

    _saved = ("status_table",)

    def __init__(self, size: int, settings: DetectorSettings) -> None:
        self._settings = settings
        self._least = float(np.log(settings.min_slowdown))
        self.status_table = StatusTable(size)

    def trusted(self) -> Bools:
        """Ranks that may update baselines."""
        table = self.status_table
        doubtful = table.evidence > _IN_DOUBT * SUSPECT_AT
        result: Bools = (table.status == HEALTHY) & ~doubtful
        return result

    def update(self, tests: RankTests, now: StepEvidence, excused: Bools) -> None:
        """Updates the statuses by the evidence of a step. `excused` ranks are inconclusive for a
        reason of their own, which low evidence does not end."""
        self._fix_early_baseline(tests, now)
        table = self.status_table
        table.evidence, table.by_past = now.evidence, now.by_past
        intermittent = now.intermittent
        self._count_runs(now)
        live = now.seen & (table.status != FAIL_STOP)
        named = table.status == FAIL_SLOW
        doubted = (table.status == SUSPECT) | (table.status == INCONCLUSIVE)
        rising = live & ~named & (now.evidence >= SUSPECT_AT)
        falling = live & doubted & ~excused & (now.evidence < SUSPECT_AT - 2.0)
        measured = rising | (live & named & ~self._confirm_carried(tests))
        for rank in np.flatnonzero(measured).tolist():
            self._measure(tests, now, rank)
        strong = rising & (now.evidence >= tests.name_at)
        strong &= self._confirmed(tests, now) | intermittent
        strong &= table.low > 1.0
        strong &= table.factor >= self._settings.min_slowdown
        table.status[rising & (table.status == HEALTHY)] = SUSPECT
        self._name(tests, strong & now.able, intermittent)
        table.status[strong & ~now.able] = INCONCLUSIVE
        self._mark_healthy(tests, falling)
        self._recover(tests, now, live & named)

    def _confirmed(self, tests: RankTests, now: StepEvidence) -> Bools:
        """Ranks slow for enough consecutive steps that agree in size, or for one more step if they
        do not: two hiccups are seldom of one size."""
        steps = self._settings.confirm_steps
        last = tests.window[tests.recent(steps)] - now.reference
        most = last.max(axis=0)
        agree = most - last.min(axis=0) <= _AGREE * now.scale + _AGREE_SHARE * most
        return self.status_table.slow_run >= np.where(agree, steps, steps + 1)

    def _name(self, tests: RankTests, ranks: Bools, intermittent: Bools) -> None:
        """Names ranks slow: continuously, intermittently, or again soon after a recovery."""
        table = self.status_table
        table.status[ranks] = FAIL_SLOW
        soon = tests.steps[tests.recent(_SPELLS)[0]] <= table.fresh
        again = ranks & (table.fresh >= 0) & soon
        first = ranks & ~again
        table.began[first], table.turns[first] = table.since[first], False
        table.turns |= again | ((table.status == FAIL_SLOW) & intermittent)

    def _confirm_carried(self, tests: RankTests) -> Bools:
        """Confirms names from an older layout; returns the ranks that carried one before.

        In the first steps of a layout the expected times are too uncertain to measure anew. If
        such a rank is clearly not healthy in them, its baseline is set so that it is as slow as
        it was, and it is measured against that from then on.
        """
        table = self.status_table
        before = table.carried.copy()
        rows = tests.recent(_CARRY_STEPS)
        for rank in np.flatnonzero(table.carried & (table.status == FAIL_SLOW)).tolist():
            seen = tests.window[rows, rank]
            known = np.log(table.factor[rank])
            if np.count_nonzero(np.isfinite(seen)) < _CARRY_STEPS:
                continue
            level = float(np.nanmedian(seen))
            if level > 0.4 * known:
                tests.anchor(rank, level - known)
            table.carried[rank] = False
        return before

    def _fix_early_baseline(self, tests: RankTests, now: StepEvidence) -> None:
        """Sets the baseline of a rank without peers that slows before it has one: to the level of
        the steps before the onset, if there are enough and they are within the healthy spread."""
        early = tests.unsettled(now) & (now.evidence >= SUSPECT_AT)
        for rank in np.flatnonzero(early).tolist():
            rows = tests.recent(tests.count)
            series = tests.window[rows, rank]
            series = series[np.isfinite(series)]
            first = onset(series, float(now.scale[rank]))
            level = float(np.median(series[:first])) if first >= _LEAST_PAST else np.inf
            if tests.alike(level):
                tests.anchor(rank, level, float(first))

    def _count_runs(self, now: StepEvidence) -> None:
        table = self.status_table
        expected = np.where(table.status == FAIL_SLOW, np.log(table.factor), 2.0 * self._least)
        edge = np.maximum(0.5 * self._least, EDGE * expected)
        slow = now.seen & (now.excess > edge)
        table.slow_run = np.where(slow, table.slow_run + 1, np.where(now.seen, 0, table.slow_run))
        well = now.seen & ~slow
        table.well_run = np.where(well, table.well_run + 1, np.where(now.seen, 0, table.well_run))

    def _measure(self, tests: RankTests, now: StepEvidence, rank: int) -> None:
        """Measures onset and factor of one rank from the window of residuals."""
        table = self.status_table
        rows = tests.recent(tests.count)
        rows = rows[np.isfinite(tests.window[rows, rank])]
        excess = tests.window[rows, rank] - now.reference[rank]
        scale = float(now.scale[rank])
        named, intermittent = table.status[rank] == FAIL_SLOW, bool(now.turns[:, rank].any())
        slow = np.ones(rows.size, bool)
        if intermittent:
            slow = excess > EDGE * float(
                np.median(tests.window[now.slow_rows(tests, rank), rank]) - now.reference[rank]
            )
        elif named and table.turns[rank]:
            slow = excess > EDGE * float(np.log(table.factor[rank]))
        if not named:
            first = first_slow_step(slow) if intermittent else onset(excess, scale)
            whole = first == 0 and tests.count <= tests.window.shape[0]
            table.since[rank] = -1 if whole else int(tests.steps[rows[first]])
        else:
            first = int(np.searchsorted(tests.steps[rows], table.since[rank]))
        recent = excess[min(first, excess.size - 1) :]
        recent = recent[slow[-recent.size :]][-_FACTOR_STEPS:]
        table.slow_steps[rank] = np.count_nonzero(slow[first:]), rows.size - first
        if not recent.size:
            return
        middle = float(np.median(recent))
        error = float(np.hypot(1.25 * scale / np.sqrt(recent.size), now.doubt[rank]))
        error = min(error, _MOST_ERROR)
        table.factor[rank] = np.exp(max(middle, 0.0))
        table.low[rank] = np.exp(middle - 1.96 * error)
        table.high[rank] = np.exp(middle + 1.96 * error)

    def _mark_healthy(self, tests: RankTests, ranks: Bools) -> None:
        table = self.status_table
        if not ranks.any():
            return
        table.status[ranks] = HEALTHY
        table.factor[ranks] = table.low[ranks] = table.high[ranks] = 1.0
        table.carried[ranks] = False
        table.since[ranks] = tests.steps[tests.recent(1)[0]]

    def _recover(self, tests: RankTests, now: StepEvidence, named: Bools) -> None:
        table = self.status_table
        back = named & (table.well_run >= self._settings.recover_steps)
        for rank in np.flatnonzero(back & table.turns).tolist():
            back[rank] = table.well_run[rank] >= self._healthy_steps_needed(tests, now, rank)
        if not back.any():
            return
        self._mark_healthy(tests, back)
        rows = tests.recent(tests.count)
        started = tests.steps[rows[np.maximum(rows.size - table.well_run[back], 0)]]
        table.since[back] = table.fresh[back] = started
        tests.clear(back)

    def _healthy_steps_needed(self, tests: RankTests, now: StepEvidence, rank: int) -> int:
        """Healthy steps before an intermittently slow rank is healthy again: so many that they are
        neither chance nor one of its pauses."""
        rows = tests.recent(tests.count)
        rows = rows[np.isfinite(tests.window[rows, rank])]
        rows = rows[tests.steps[rows] >= self.status_table.began[rank]]
        edge = max(EDGE * float(np.log(self.status_table.factor[rank])), 0.5 * self._least)
        at = np.flatnonzero(tests.window[rows, rank] - now.reference[rank] > edge)
        slow_share = at.size / max(int(np.ptp(at)) + 1, 1) if at.size else 0.0
        pause = int(np.diff(at).max(initial=1)) - 1
        lucky = int(np.ceil(np.log(_CHANCE) / np.log(min(max(1.0 - slow_share, 0.05), 0.9))))
        return max(
            self._settings.recover_steps, min(max(_PAUSES * pause, lucky), _MOST_HEALTHY_STEPS)
        )


def onset(excess: Floats, scale: float) -> int:
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
