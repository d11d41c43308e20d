"""From evidence to status: suspicion, names and their withdrawal, with hysteresis."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from resihp.contracts import Status

from ..base.arrays import Bools, Floats, Ints, State
from ..settings import DetectorSettings
from .watch import Standing, Watch

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


@dataclass
class Book:
    """What is currently said of every rank; arrays over ranks.

    since   step of the onset; -1 where it was so from the start
    factor  slowdown; low and high bound it
    slow_run, well_run   consecutive steps with slow, with healthy residuals
    carried whether the name comes from an older layout and has not been confirmed on this one
    """

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

    def __post_init__(self) -> None:
        for name in ("status", "slow_run", "well_run"):
            setattr(self, name, np.zeros(self.size, np.int64))
        self.since = np.full(self.size, -1, np.int64)
        for name in ("factor", "low", "high"):
            setattr(self, name, np.ones(self.size))
        self.evidence = np.full(self.size, -np.inf)
        self.carried = np.zeros(self.size, bool)
        self.by_past = np.zeros(self.size, bool)

    def state(self) -> State:
        """What `load` needs."""
        return dict(vars(self))

    def load(self, state: State) -> None:
        """Takes up what `state` returned."""
        vars(self).update(state)


class Judge:
    """Holds the status of every rank and moves it by the evidence of each step."""

    def __init__(self, size: int, settings: DetectorSettings) -> None:
        self._settings = settings
        self._suspect_at = float(np.log(settings.suspect_steps))
        self._least = float(np.log(settings.min_slowdown))
        self.book = Book(size)

    @property
    def suspect_at(self) -> float:
        """Evidence (log) from which a rank is suspect."""
        return self._suspect_at

    def trusted(self) -> Bools:
        """Ranks that may teach what is healthy."""
        book = self.book
        doubtful = book.evidence > _IN_DOUBT * self._suspect_at
        result: Bools = (book.status == HEALTHY) & ~doubtful
        return result

    def rule(self, watch: Watch, now: Standing, excused: Bools) -> None:
        """Moves every rank's status by one step's standing; `excused` ranks are inconclusive for
        a reason of their own, which their evidence does not end."""
        self._settle(watch, now)
        book = self.book
        book.evidence, book.by_past = now.evidence, now.by_past
        self._count_runs(now)
        live = now.seen & (book.status != FAIL_STOP)
        named = book.status == FAIL_SLOW
        doubted = (book.status == SUSPECT) | (book.status == INCONCLUSIVE)
        rising = live & ~named & (now.evidence >= self._suspect_at)
        falling = live & doubted & ~excused & (now.evidence < self._suspect_at - 2.0)
        measured = rising | (live & named & ~self._carry(watch, now))
        for rank in np.flatnonzero(measured).tolist():
            self._measure(watch, now, rank)
        strong = rising & (now.evidence >= watch.name_at)
        strong &= (book.slow_run >= self._settings.confirm_steps) & (book.low > 1.0)
        strong &= book.factor >= self._settings.min_slowdown
        book.status[rising & (book.status == HEALTHY)] = SUSPECT
        book.status[strong & now.able] = FAIL_SLOW
        book.status[strong & ~now.able] = INCONCLUSIVE
        self._heal(watch, falling)
        self._recover(watch, live & named)

    def _carry(self, watch: Watch, now: Standing) -> Bools:
        """Ranks still named on the word of an older layout alone.

        What the new layout costs is not known well enough to measure them afresh at once. If in
        its first steps such a rank is clearly not healthy, it is taken to be as slow as it was,
        and measured against that from then on.
        """
        book = self.book
        before = book.carried.copy()
        rows = watch.recent(_CARRY_STEPS)
        for rank in np.flatnonzero(book.carried & (book.status == FAIL_SLOW)).tolist():
            seen = watch.window[rows, rank]
            known = np.log(book.factor[rank])
            if np.count_nonzero(np.isfinite(seen)) < _CARRY_STEPS:
                continue
            level = float(np.nanmedian(seen))
            if level > 0.4 * known:
                watch.anchor(rank, level - known)
            book.carried[rank] = False
        return before

    def _settle(self, watch: Watch, now: Standing) -> None:
        """A rank without peers that slows before its past counts: the steps before the onset, if
        there are some and they were unremarkable, become that past."""
        early = watch.unsettled(now) & (now.evidence >= self._suspect_at)
        for rank in np.flatnonzero(early).tolist():
            rows = watch.recent(watch.count)
            series = watch.window[rows, rank]
            series = series[np.isfinite(series)]
            first = onset(series, float(now.scale[rank]))
            level = float(np.median(series[:first])) if first >= _LEAST_PAST else np.inf
            if watch.alike(level):
                watch.anchor(rank, level, float(first))

    def _count_runs(self, now: Standing) -> None:
        book = self.book
        expected = np.where(book.status == FAIL_SLOW, np.log(book.factor), 2.0 * self._least)
        edge = np.maximum(0.5 * self._least, 0.4 * expected)
        slow = now.seen & (now.excess > edge)
        book.slow_run = np.where(slow, book.slow_run + 1, np.where(now.seen, 0, book.slow_run))
        well = now.seen & ~slow
        book.well_run = np.where(well, book.well_run + 1, np.where(now.seen, 0, book.well_run))

    def _measure(self, watch: Watch, now: Standing, rank: int) -> None:
        """Onset and factor of one rank from the window."""
        book = self.book
        rows = watch.recent(watch.count)
        rows = rows[np.isfinite(watch.window[rows, rank])]
        excess = watch.window[rows, rank] - now.reference[rank]
        scale = float(now.scale[rank])
        if book.status[rank] != FAIL_SLOW:
            first = onset(excess, scale)
            whole = first == 0 and watch.count <= watch.window.shape[0]
            book.since[rank] = -1 if whole else int(watch.steps[rows[first]])
        else:
            first = int(np.searchsorted(watch.steps[rows], book.since[rank]))
        recent = excess[max(min(first, excess.size - 1), excess.size - _FACTOR_STEPS) :]
        middle = float(np.median(recent))
        error = float(np.hypot(1.25 * scale / np.sqrt(recent.size), now.doubt[rank]))
        error = min(error, _MOST_ERROR)
        book.factor[rank] = np.exp(max(middle, 0.0))
        book.low[rank] = np.exp(middle - 1.96 * error)
        book.high[rank] = np.exp(middle + 1.96 * error)

    def _heal(self, watch: Watch, ranks: Bools) -> None:
        book = self.book
        if not ranks.any():
            return
        book.status[ranks] = HEALTHY
        book.factor[ranks] = book.low[ranks] = book.high[ranks] = 1.0
        book.carried[ranks] = False
        book.since[ranks] = watch.steps[watch.recent(1)[0]]

    def _recover(self, watch: Watch, named: Bools) -> None:
        book = self.book
        back = named & (book.well_run >= self._settings.recover_steps)
        if not back.any():
            return
        self._heal(watch, back)
        started = watch.recent(self._settings.recover_steps)[0]
        book.since[back] = watch.steps[started]
        watch.clear(back)


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
