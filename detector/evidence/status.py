"""From evidence to status: suspicion, names and their withdrawal, with hysteresis."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from resihp.contracts import Status

from ..arrays import Bools, Floats, Ints
from ..persistence import Persistent
from ..settings import DetectorSettings
from .intermittent import EDGE, first_slow_step
from .rank_tests import TURNS, RankTests, StepEvidence

CODES: tuple[Status, ...] = tuple(Status)
HEALTHY, SUSPECT, FAIL_SLOW, FAIL_STOP, INCONCLUSIVE = range(len(CODES))
_CARRY_STEPS = 3
"""Steps on a new layout before a device named on the old one is measured again."""
_LEAST_PAST = 3
_IN_DOUBT = 0.25
"""Share of the evidence of a suspicion from which a rank no longer teaches what is healthy."""
_MOST_ERROR = 2.0
"""Most that a factor may be uncertain by (log), where its records contradict each other."""
_FACTOR_STEPS = 12
"""Steps that the factor of a named device is measured over."""
_AGREE, _AGREE_SHARE = 6.0, 0.1
"""Standard deviations, and share of the slowness (log), that the steps of a slow device lie within
of each other."""
_SPELLS = 16
"""Steps after a recovery within which a new slow spell belongs to the one before."""
_CHANCE = 1e-3
"""Chance of so many healthy steps running, of a device that is slow by turns."""
_PAUSES = 3
"""Longest pauses between slow steps that such a device must be healthy for."""
_PATIENCE = 32
"""Most healthy steps that are waited for."""


@dataclass
class StatusTable(Persistent):
    """What is currently said of every rank; arrays over ranks.

    since   step of the onset; -1 where it was so from the start
    factor  slowdown; low and high bound it
    slow_run, well_run   consecutive steps with slow, with healthy residuals
    carried whether the name comes from an older layout and has not been confirmed on this one
    turns   whether it is slow in some steps and healthy in others
    slow_steps  slow ones of the steps since its onset, shape (ranks, 2): how many, of how many
    began   step of its first slow spell, where several lie close together; -1 from the start
    fresh   step from which it was healthy again, -1 if it never was slow
    """

    _saved = (
        "status",
        "since",
        "factor",
        "low",
        "high",
        "evidence",
        "slow_run",
        "well_run",
        "carried",
        "by_past",
        "turns",
        "slow_steps",
        "began",
        "fresh",
    )

    size: int
    status: Ints = field(init=False)
    since: Ints = field(init=False)
    factor: Floats = field(init=False)
    low: Floats = field(init=False)
    high: Floats = field(init=False)
    evidence: Floats = field(init=False)
    slow_run: Ints = field(init=False)
    well_run: Ints = field(init=False)
    carried: Bools = field(init=False)
    by_past: Bools = field(init=False)
    turns: Bools = field(init=False)
    slow_steps: Ints = field(init=False)
    began: Ints = field(init=False)
    fresh: Ints = field(init=False)

    def __post_init__(self) -> None:
        for name in ("status", "slow_run", "well_run"):
            setattr(self, name, np.zeros(self.size, np.int64))
        for name in ("since", "began", "fresh"):
            setattr(self, name, np.full(self.size, -1, np.int64))
        for name in ("factor", "low", "high"):
            setattr(self, name, np.ones(self.size))
        self.evidence = np.full(self.size, -np.inf)
        self.carried = np.zeros(self.size, bool)
        self.by_past = np.zeros(self.size, bool)
        self.turns = np.zeros(self.size, bool)
        self.slow_steps = np.zeros((self.size, 2), np.int64)


class StatusMachine(Persistent):
    """Holds the status of every rank and moves it by the evidence of each step."""

    _saved = ("status_table",)

    def __init__(self, size: int, settings: DetectorSettings) -> None:
        self._settings = settings
        self._suspect_at = float(np.log(settings.suspect_steps))
        self._least = float(np.log(settings.min_slowdown))
        self.status_table = StatusTable(size)

    @property
    def suspect_at(self) -> float:
        """Evidence (log) from which a rank is suspect."""
        return self._suspect_at

    def trusted(self) -> Bools:
        """Ranks that may teach what is healthy."""
        status_table = self.status_table
        doubtful = status_table.evidence > _IN_DOUBT * self._suspect_at
        result: Bools = (status_table.status == HEALTHY) & ~doubtful
        return result

    def update(self, tests: RankTests, now: StepEvidence, excused: Bools) -> None:
        """Moves every rank's status by one step's standing; `excused` ranks are inconclusive for
        a reason of their own, which their evidence does not end."""
        self._fix_early_baseline(tests, now)
        status_table = self.status_table
        status_table.evidence, status_table.by_past = now.evidence, now.by_past
        by_turns = now.by_turns
        self._count_runs(now)
        live = now.seen & (status_table.status != FAIL_STOP)
        named = status_table.status == FAIL_SLOW
        doubted = (status_table.status == SUSPECT) | (status_table.status == INCONCLUSIVE)
        rising = live & ~named & (now.evidence >= self._suspect_at)
        falling = live & doubted & ~excused & (now.evidence < self._suspect_at - 2.0)
        measured = rising | (live & named & ~self._confirm_carried(tests))
        for rank in np.flatnonzero(measured).tolist():
            self._measure(tests, now, rank)
        strong = rising & (now.evidence >= tests.name_at)
        strong &= self._confirmed(tests, now) | by_turns
        strong &= status_table.low > 1.0
        strong &= status_table.factor >= self._settings.min_slowdown
        status_table.status[rising & (status_table.status == HEALTHY)] = SUSPECT
        self._name(tests, strong & now.able, by_turns)
        status_table.status[strong & ~now.able] = INCONCLUSIVE
        self._mark_healthy(tests, falling)
        self._recover(tests, now, live & named)

    def _confirmed(self, tests: RankTests, now: StepEvidence) -> Bools:
        """Ranks slow for enough steps running, if these agree; one more step if they do not, for
        two hiccups seldom are of one size."""
        steps = self._settings.confirm_steps
        last = tests.window[tests.recent(steps)] - now.reference
        most = last.max(axis=0)
        agree = most - last.min(axis=0) <= _AGREE * now.scale + _AGREE_SHARE * most
        result: Bools = self.status_table.slow_run >= np.where(agree, steps, steps + 1)
        return result

    def _name(self, tests: RankTests, ranks: Bools, by_turns: Bools) -> None:
        """Ranks become slow: for good, by turns, or again soon after they were."""
        status_table = self.status_table
        status_table.status[ranks] = FAIL_SLOW
        soon = tests.steps[tests.recent(_SPELLS)[0]] <= status_table.fresh
        again = ranks & (status_table.fresh >= 0) & soon
        first = ranks & ~again
        status_table.began[first], status_table.turns[first] = status_table.since[first], False
        status_table.turns |= again | ((status_table.status == FAIL_SLOW) & by_turns)

    def _confirm_carried(self, tests: RankTests) -> Bools:
        """Ranks still named on the word of an older layout alone.

        What the new layout costs is not known well enough to measure them afresh at once. If in
        its first steps such a rank is clearly not healthy, it is taken to be as slow as it was,
        and measured against that from then on.
        """
        status_table = self.status_table
        before = status_table.carried.copy()
        rows = tests.recent(_CARRY_STEPS)
        for rank in np.flatnonzero(
            status_table.carried & (status_table.status == FAIL_SLOW)
        ).tolist():
            seen = tests.window[rows, rank]
            known = np.log(status_table.factor[rank])
            if np.count_nonzero(np.isfinite(seen)) < _CARRY_STEPS:
                continue
            level = float(np.nanmedian(seen))
            if level > 0.4 * known:
                tests.anchor(rank, level - known)
            status_table.carried[rank] = False
        return before

    def _fix_early_baseline(self, tests: RankTests, now: StepEvidence) -> None:
        """A rank without peers that slows before its past counts: the steps before the onset, if
        there are some and they were unremarkable, become that past."""
        early = tests.unsettled(now) & (now.evidence >= self._suspect_at)
        for rank in np.flatnonzero(early).tolist():
            rows = tests.recent(tests.count)
            series = tests.window[rows, rank]
            series = series[np.isfinite(series)]
            first = onset(series, float(now.scale[rank]))
            level = float(np.median(series[:first])) if first >= _LEAST_PAST else np.inf
            if tests.alike(level):
                tests.anchor(rank, level, float(first))

    def _count_runs(self, now: StepEvidence) -> None:
        status_table = self.status_table
        expected = np.where(
            status_table.status == FAIL_SLOW, np.log(status_table.factor), 2.0 * self._least
        )
        edge = np.maximum(0.5 * self._least, EDGE * expected)
        slow = now.seen & (now.excess > edge)
        status_table.slow_run = np.where(
            slow, status_table.slow_run + 1, np.where(now.seen, 0, status_table.slow_run)
        )
        well = now.seen & ~slow
        status_table.well_run = np.where(
            well, status_table.well_run + 1, np.where(now.seen, 0, status_table.well_run)
        )

    def _measure(self, tests: RankTests, now: StepEvidence, rank: int) -> None:
        """Onset and factor of one rank from the window."""
        status_table = self.status_table
        rows = tests.recent(tests.count)
        rows = rows[np.isfinite(tests.window[rows, rank])]
        excess = tests.window[rows, rank] - now.reference[rank]
        scale = float(now.scale[rank])
        named, by_turns = status_table.status[rank] == FAIL_SLOW, bool(now.turns[:, rank].any())
        slow = np.ones(rows.size, bool)
        if by_turns or (named and status_table.turns[rank]):
            slow = excess > EDGE * self._slow_level(tests, now, rank)
        if not named:
            first = first_slow_step(slow) if by_turns else onset(excess, scale)
            whole = first == 0 and tests.count <= tests.window.shape[0]
            status_table.since[rank] = -1 if whole else int(tests.steps[rows[first]])
        else:
            first = int(np.searchsorted(tests.steps[rows], status_table.since[rank]))
        recent = excess[min(first, excess.size - 1) :]
        recent = recent[slow[-recent.size :]][-_FACTOR_STEPS:]
        status_table.slow_steps[rank] = np.count_nonzero(slow[first:]), rows.size - first
        if not recent.size:
            return
        middle = float(np.median(recent))
        error = float(np.hypot(1.25 * scale / np.sqrt(recent.size), now.doubt[rank]))
        error = min(error, _MOST_ERROR)
        status_table.factor[rank] = np.exp(max(middle, 0.0))
        status_table.low[rank] = np.exp(middle - 1.96 * error)
        status_table.high[rank] = np.exp(middle + 1.96 * error)

    def _slow_level(self, tests: RankTests, now: StepEvidence, rank: int) -> float:
        """How slow (log) a rank that is slow by turns is when it is."""
        rows = tests.recent(TURNS)
        slow = now.turns[-len(rows) :, rank]
        if not slow.any():
            return float(np.log(self.status_table.factor[rank]))
        return float(np.median(tests.window[rows[slow], rank]) - now.reference[rank])

    def _mark_healthy(self, tests: RankTests, ranks: Bools) -> None:
        status_table = self.status_table
        if not ranks.any():
            return
        status_table.status[ranks] = HEALTHY
        status_table.factor[ranks] = status_table.low[ranks] = status_table.high[ranks] = 1.0
        status_table.carried[ranks] = False
        status_table.since[ranks] = tests.steps[tests.recent(1)[0]]

    def _recover(self, tests: RankTests, now: StepEvidence, named: Bools) -> None:
        status_table = self.status_table
        back = named & (status_table.well_run >= self._settings.recover_steps)
        for rank in np.flatnonzero(back & status_table.turns).tolist():
            back[rank] = status_table.well_run[rank] >= self._patience(tests, now, rank)
        if not back.any():
            return
        self._mark_healthy(tests, back)
        rows = tests.recent(tests.count)
        started = tests.steps[rows[np.maximum(rows.size - status_table.well_run[back], 0)]]
        status_table.since[back] = status_table.fresh[back] = started
        tests.clear(back)

    def _patience(self, tests: RankTests, now: StepEvidence, rank: int) -> int:
        """Healthy steps before a rank that is slow by turns is healthy again: so many that they
        are neither chance nor one of its pauses."""
        on, of, pause = self._turns_of(tests, now, rank)
        healthy = min(max(1.0 - on / max(of, 1), 0.05), 0.9)
        lucky = int(np.ceil(np.log(_CHANCE) / np.log(healthy)))
        return max(self._settings.recover_steps, min(max(_PAUSES * pause, lucky), _PATIENCE))

    def _turns_of(self, tests: RankTests, now: StepEvidence, rank: int) -> tuple[int, int, int]:
        """Slow steps of a rank, steps from the first of them to the last, and the longest pause
        between two, since the first of its spells."""
        rows = tests.recent(tests.count)
        rows = rows[np.isfinite(tests.window[rows, rank])]
        rows = rows[tests.steps[rows] >= self.status_table.began[rank]]
        edge = max(EDGE * float(np.log(self.status_table.factor[rank])), 0.5 * self._least)
        at = np.flatnonzero(tests.window[rows, rank] - now.reference[rank] > edge)
        if not at.size:
            return 0, 0, 0
        pause = int(np.diff(at).max()) - 1 if at.size > 1 else 0
        return int(at.size), int(at[-1] - at[0]) + 1, pause


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
