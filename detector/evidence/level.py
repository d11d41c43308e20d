"""A test on things that have one number a step: replicas, links, hosts.

What it finds never names a device. It makes ranks inconclusive, or is told beside the verdicts.
"""

from __future__ import annotations

import numpy as np

from ..base.arrays import Bools, Floats, Ints, State
from ..base.places import Places
from ..expectation.residual import StepResidual
from ..settings import DetectorSettings
from .watch import Watch

_STEPS = 3
_QUIET = 3.0
_MAJORITY = 3


class LevelTest:
    """Which of several things, each with one number a step, have become slower than their like.

    classes   things of one class are compared with each other, if there are three or more of
              them; others with their own past only, for two of a kind may differ for good
    least     slowdown below which nothing is said
    error     standard error (log) of a number, at least
    """

    def __init__(
        self, classes: Ints, settings: DetectorSettings, *, least: float, error: float
    ) -> None:
        count = classes.size
        ids = np.arange(count, dtype=np.int64)
        few = np.bincount(classes)[classes] < _MAJORITY
        _, classes = np.unique(np.where(few, -1 - ids, classes), return_inverse=True)
        classes = classes.reshape(-1).astype(np.int64)
        ones = np.ones(count)
        places = Places(ids, ids, ids, ids, classes, ones, ones, ones, ones)
        self._error, self._least = error, float(np.log(least))
        self.watch = Watch(places, settings)
        self.slow = np.zeros(count, bool)
        self.factor = np.ones(count)
        self.since = np.full(count, -1, np.int64)
        self.scale = np.full(count, error)

    def observe(self, step: int, value: Floats) -> Bools:
        """Takes the logs of one step (NaN where there is none); returns what is slow."""
        count = value.size
        residual = StepResidual(
            value, np.full(count, self._error), np.ones(count, np.int64), self._error
        )
        quiet = ~(self.watch.past_test.evidence() > _QUIET) & ~self.slow
        now = self.watch.observe(step, residual, quiet, np.ones(count, bool))
        self.scale = now.scale
        recent = np.median(self.watch.window[self.watch.recent(_STEPS)], axis=0)
        level = recent - now.reference
        rises = (now.evidence >= self.watch.name_at) & (level > self._least)
        stays = self.slow & ~(level < 0.4 * np.log(self.factor))
        back = self.slow & ~stays
        if back.any():
            self.watch.clear(back)
        self.since = np.where((rises | stays) & ~self.slow, step, self.since)
        self.slow = stays | (rises & ~back)
        self.factor = np.where(self.slow, np.exp(np.nan_to_num(level)), 1.0)
        return self.slow

    def state(self) -> State | None:
        """What `load` needs; None before the first step."""
        if not self.watch.count:
            return None
        return {
            "watch": self.watch.state(),
            "slow": self.slow,
            "factor": self.factor,
            "scale": self.scale,
            "since": self.since,
        }

    def load(self, state: State | None) -> None:
        """Takes up what `state` returned."""
        if state is None:
            return
        self.watch.load(state["watch"])
        self.scale = state["scale"]
        self.slow, self.factor, self.since = state["slow"], state["factor"], state["since"]
