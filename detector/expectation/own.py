"""What each rank is slower or faster by, to be taken out of its records before anything is learned
from them: so that a slow device does not become the norm."""

from __future__ import annotations

import numpy as np

from ..base.arrays import Bools, Floats, Ints, State
from ..base.robust import group_median, mad_sigma

_ENOUGH = 4.0
"""Microbatches of a step from which a rank's level is told apart from their work by that step."""
_FADE = 0.2
_LEVEL_STEPS = 6
"""Steps in which the level of a class is still learned; after that only its shape is."""


class OwnLevels:
    """Levels (log) of the ranks of some classes.

    With many microbatches in a step, the step's own level is taken. With one, level and work
    cannot be told apart in a step, so the rank's level over the past steps is taken instead.
    """

    def __init__(self, classes: Ints) -> None:
        self._classes = classes
        self.usual = np.zeros(classes.size)
        self._apart = np.zeros(classes.size)
        self._trusted = np.zeros(classes.size)
        self.steps = 0

    def of(self, value: Floats, microbatches: Floats) -> Floats:
        """Level of each rank in a step with the residuals `value` (NaN where there is none)."""
        by_step = _by_step(microbatches)
        return by_step * np.nan_to_num(value) + (1.0 - by_step) * self.usual

    def scatter(self, left: Floats, microbatches: Floats) -> float:
        """What healthy records scatter by beside their own noise: where levels are not told by
        the step, all that is left over of it; else nothing."""
        untold = 1.0 - float(np.median(_by_step(microbatches[microbatches > 0])))
        return untold * mad_sigma(left, 0.0)

    def beyond_class(self, own: Floats, trusted: Bools) -> Floats:
        """`own` without what is common to the class, as long as that is still learned."""
        if self.steps >= _LEVEL_STEPS:
            return own
        result: Floats = own - self._common(own, trusted)
        return result

    def _common(self, own: Floats, trusted: Bools) -> Floats:
        """What the trusted ranks of each class have in common beside where each of them stands in
        it: so the level of a class does not move when one of its ranks is trusted no longer."""
        size = int(self._classes.max()) + 1
        change = (own - self._apart)[trusted]
        common: Floats = np.nan_to_num(group_median(change, self._classes[trusted], size))
        return common[self._classes]

    def observe(self, value: Floats, trusted: Bools) -> None:
        """A step is over: its residuals join what is usual."""
        self._place(value, trusted & np.isfinite(value))
        self.steps += 1
        fade = max(_FADE, 1.0 / self.steps)
        known = np.isfinite(value)
        self.usual[known] += fade * (value[known] - self.usual[known])

    def _place(self, value: Floats, trusted: Bools) -> None:
        """Learns where each trusted rank stands in its class."""
        if self.steps >= _LEVEL_STEPS or not trusted.any():
            return
        stands = value - self._common(value, trusted)
        self._trusted[trusted] += 1.0
        self._apart[trusted] += ((stands - self._apart) / np.maximum(self._trusted, 1.0))[trusted]

    def state(self) -> State:
        """What `load` needs."""
        return {
            "usual": self.usual,
            "apart": self._apart,
            "trusted": self._trusted,
            "steps": self.steps,
        }

    def load(self, state: State) -> None:
        """Takes up what `state` returned."""
        self.usual, self.steps = state["usual"], state["steps"]
        self._apart, self._trusted = state["apart"], state["trusted"]


def _by_step(microbatches: Floats) -> Floats:
    """How far so many microbatches of a step tell a rank's level, 0 to 1."""
    result: Floats = np.clip((microbatches - 1.0) / (_ENOUGH - 1.0), 0.0, 1.0)
    return result
