"""Series with one number per step, as replicas, links and hosts have: which of them became slow."""

from __future__ import annotations

import numpy as np

from ..arrays import Bools, Floats, Ints, group_median, median
from ..persistence import Persistent, State
from ..residuals import StepResidual
from ..settings import DetectorSettings
from .rank_tests import RankTests

_STEPS = 3
_QUIET = 3.0
_MAJORITY = 3


class LevelTest(Persistent):
    """Finds series that became slow, of several with one number per step: replicas, links, hosts.

    The result never names a device. It makes ranks inconclusive, or is reported in addition to
    the verdicts.

    classes   series of one class are compared with each other, if there are three or more; others
              with their own past only, for two of a kind may differ permanently
    least     slowdown below which nothing is reported
    error     standard error (log) of a number, at least

    slow      series that are slow, since the step in `since`, by `factor`; the middle one of the
              last three steps has to exceed `least` for that, and to fall to 0.4 of it (log), or
              below half of `least`, for the end of it
    level     that number (log); NaN where a series has none
    evidence  log e-value that the series is slow
    """

    _saved = ("tests", "slow", "factor", "since", "scale", "level", "evidence")

    def __init__(
        self, classes: Ints, settings: DetectorSettings, *, least: float, error: float
    ) -> None:
        count = classes.size
        few = np.bincount(classes)[classes] < _MAJORITY
        _, classes = np.unique(np.where(few, -1 - np.arange(count), classes), return_inverse=True)
        self._classes, self._compared = classes, ~few
        self._error, self._least = error, float(np.log(least))
        self.tests = RankTests(classes, settings)
        self.slow = np.zeros(count, bool)
        self.factor = np.ones(count)
        self.since = np.full(count, -1, np.int64)
        self.scale = np.full(count, error)
        self.level, self.evidence = np.full(count, np.nan), np.full(count, -np.inf)

    def continue_from(self, older: LevelTest, new: Ints) -> None:
        """Takes over the series of an older test, which are at the positions `new` here; but not
        those that were compared with their past and now are with others."""
        old = np.flatnonzero(older._compared == self._compared[new])
        new = new[old]
        self.tests.continue_from(older.tests, old, new)
        for name in ("slow", "factor", "since", "scale", "level", "evidence"):
            getattr(self, name)[new] = getattr(older, name)[old]

    def compare(self, step: int, value: Floats) -> Bools:
        """Takes logs of one step that say nothing but by their distance from those of their class;
        see `observe`."""
        seen = np.isfinite(value)
        middle = group_median(value[seen], self._classes[seen], int(self._classes.max()) + 1)
        return self.observe(step, np.where(self._compared, value - middle[self._classes], value))

    def observe(self, step: int, value: Floats) -> Bools:
        """Takes the logs of one step (NaN where there is none); returns the slow ones."""
        count = value.size
        residual = StepResidual(
            value, np.full(count, self._error), np.ones(count, np.int64), self._error
        )
        quiet = ~(self.tests.past_test.evidence() > _QUIET) & ~self.slow
        now = self.tests.observe(step, residual, quiet, np.ones(count, bool))
        self.scale = now.scale
        recent = median(self.tests.window[-_STEPS:], 0)[0]
        level = recent - now.reference
        rises = (now.evidence >= self.tests.name_at) & (level > self._least)
        over = (level < 0.4 * np.log(self.factor)) | (level < 0.5 * self._least)
        back = self.slow & over
        if back.any():
            self.tests.clear(back)
        for at in np.flatnonzero(rises & ~self.slow).tolist():
            self.since[at] = self._onset(at, float(now.reference[at]), float(level[at]))
        self.slow = (self.slow | rises) & ~back
        known = np.where(np.isfinite(level), np.exp(np.nan_to_num(level)), self.factor)
        self.factor = np.where(self.slow, known, 1.0)
        self.level, self.evidence = level, np.where(back, -np.inf, now.evidence)
        return self.slow

    @property
    def is_high(self) -> Bools:
        """Series whose level exceeds `least`."""
        result: Bools = self.level > self._least
        return result

    def _onset(self, at: int, reference: float, level: float) -> int:
        """First of the slow steps that lead up to the last one."""
        seen = self.tests.window[:, at] - reference
        healthy = np.flatnonzero(seen < 0.5 * level)
        first = int(healthy[-1]) + 1 if healthy.size else 0
        return int(self.tests.steps[min(first, self.tests.steps.size - 1)])

    def state(self) -> State:
        """The saved attributes; none before the first step."""
        return super().state() if self.tests.count else {}

    def load(self, state: State) -> None:
        """Restores what `state` returned."""
        if state:
            super().load(state)
