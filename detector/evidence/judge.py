"""From evidence to status: suspicion, names and their withdrawal, with hysteresis."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from resihp.contracts import Status

from ..base.arrays import Bools, Floats, Ints, State
from ..settings import DetectorSettings
from .turns import EDGE, first_turn
from .watch import TURNS, Standing, Watch

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
class Book:
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
        by_turns = now.by_turns
        self._count_runs(now)
        live = now.seen & (book.status != FAIL_STOP)
        named = book.status == FAIL_SLOW
        doubted = (book.status == SUSPECT) | (book.status == INCONCLUSIVE)
        rising = live & ~named & (now.evidence >= self._suspect_at)
        falling = live & doubted & ~excused & (now.evidence < self._suspect_at - 2.0)
        measured = rising | (live & named & ~self._carry(watch))
        for rank in np.flatnonzero(measured).tolist():
            self._measure(watch, now, rank)
        strong = rising & (now.evidence >= watch.name_at)
        strong &= self._confirmed(watch, now) | by_turns
        strong &= book.low > 1.0
        strong &= book.factor >= self._settings.min_slowdown
        book.status[rising & (book.status == HEALTHY)] = SUSPECT
        self._name(watch, strong & now.able, by_turns)
        book.status[strong & ~now.able] = INCONCLUSIVE
        self._heal(watch, falling)
        self._recover(watch, now, live & named)

    def _confirmed(self, watch: Watch, now: Standing) -> Bools:
        """Ranks slow for enough steps running, if these agree; one more step if they do not, for
        two hiccups seldom are of one size."""
        steps = self._settings.confirm_steps
        last = watch.window[watch.recent(steps)] - now.reference
        most = last.max(axis=0)
        agree = most - last.min(axis=0) <= _AGREE * now.scale + _AGREE_SHARE * most
        result: Bools = self.book.slow_run >= np.where(agree, steps, steps + 1)
        return result

    def _name(self, watch: Watch, ranks: Bools, by_turns: Bools) -> None:
        """Ranks become slow: for good, by turns, or again soon after they were."""
        book = self.book
        book.status[ranks] = FAIL_SLOW
        soon = watch.steps[watch.recent(_SPELLS)[0]] <= book.fresh
        again = ranks & (book.fresh >= 0) & soon
        first = ranks & ~again
        book.began[first], book.turns[first] = book.since[first], False
        book.turns |= again | ((book.status == FAIL_SLOW) & by_turns)

    def _carry(self, watch: Watch) -> Bools:
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
        edge = np.maximum(0.5 * self._least, EDGE * expected)
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
        named, by_turns = book.status[rank] == FAIL_SLOW, bool(now.turns[:, rank].any())
        slow = np.ones(rows.size, bool)
        if by_turns or (named and book.turns[rank]):
            slow = excess > EDGE * self._slow_level(watch, now, rank)
        if not named:
            first = first_turn(slow) if by_turns else onset(excess, scale)
            whole = first == 0 and watch.count <= watch.window.shape[0]
            book.since[rank] = -1 if whole else int(watch.steps[rows[first]])
        else:
            first = int(np.searchsorted(watch.steps[rows], book.since[rank]))
        recent = excess[min(first, excess.size - 1) :]
        recent = recent[slow[-recent.size :]][-_FACTOR_STEPS:]
        book.slow_steps[rank] = np.count_nonzero(slow[first:]), rows.size - first
        if not recent.size:
            return
        middle = float(np.median(recent))
        error = float(np.hypot(1.25 * scale / np.sqrt(recent.size), now.doubt[rank]))
        error = min(error, _MOST_ERROR)
        book.factor[rank] = np.exp(max(middle, 0.0))
        book.low[rank] = np.exp(middle - 1.96 * error)
        book.high[rank] = np.exp(middle + 1.96 * error)

    def _slow_level(self, watch: Watch, now: Standing, rank: int) -> float:
        """How slow (log) a rank that is slow by turns is when it is."""
        rows = watch.recent(TURNS)
        slow = now.turns[-len(rows) :, rank]
        if not slow.any():
            return float(np.log(self.book.factor[rank]))
        return float(np.median(watch.window[rows[slow], rank]) - now.reference[rank])

    def _heal(self, watch: Watch, ranks: Bools) -> None:
        book = self.book
        if not ranks.any():
            return
        book.status[ranks] = HEALTHY
        book.factor[ranks] = book.low[ranks] = book.high[ranks] = 1.0
        book.carried[ranks] = False
        book.since[ranks] = watch.steps[watch.recent(1)[0]]

    def _recover(self, watch: Watch, now: Standing, named: Bools) -> None:
        book = self.book
        back = named & (book.well_run >= self._settings.recover_steps)
        for rank in np.flatnonzero(back & book.turns).tolist():
            back[rank] = book.well_run[rank] >= self._patience(watch, now, rank)
        if not back.any():
            return
        self._heal(watch, back)
        rows = watch.recent(watch.count)
        started = watch.steps[rows[np.maximum(rows.size - book.well_run[back], 0)]]
        book.since[back] = book.fresh[back] = started
        watch.clear(back)

    def _patience(self, watch: Watch, now: Standing, rank: int) -> int:
        """Healthy steps before a rank that is slow by turns is healthy again: so many that they
        are neither chance nor one of its pauses."""
        on, of, pause = self._turns_of(watch, now, rank)
        healthy = min(max(1.0 - on / max(of, 1), 0.05), 0.9)
        lucky = int(np.ceil(np.log(_CHANCE) / np.log(healthy)))
        return max(self._settings.recover_steps, min(max(_PAUSES * pause, lucky), _PATIENCE))

    def _turns_of(self, watch: Watch, now: Standing, rank: int) -> tuple[int, int, int]:
        """Slow steps of a rank, steps from the first of them to the last, and the longest pause
        between two, since the first of its spells."""
        rows = watch.recent(watch.count)
        rows = rows[np.isfinite(watch.window[rows, rank])]
        rows = rows[watch.steps[rows] >= self.book.began[rank]]
        edge = max(EDGE * float(np.log(self.book.factor[rank])), 0.5 * self._least)
        at = np.flatnonzero(watch.window[rows, rank] - now.reference[rank] > edge)
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
