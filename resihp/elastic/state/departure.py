"""Departure of a rank whose node is taken away: it hands over in time, or is lost. Pure.

Durations are measured: those of the last preparations and steps, and bytes over bandwidth. A rank
whose window is too short for a hand-over trains on, and ends between two steps before the node is
gone, so that the others lose it at a known point. Once a hand-over is announced the rank decides
again whenever a change of layout is about to begin: it begins only if it can be committed in time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from math import inf

_SAFETY = 1.5
"""Factor on all measured durations."""
_MARGIN_S = 1.0
"""Time left at the end of the window: for a process to end, and its end to be announced."""
_PLAN_S = 1.0
"""Time from the announcement until the first rank has published a plan, beside its search."""
_PREPARE_S, _BYTES_PER_S = 5.0, 1e8
"""Build of a generation and bandwidth before any is measured."""
_KEPT = 5  # measurements of each kind


@dataclass(frozen=True)
class HandOverCost:
    """Durations of the parts of a hand-over, in seconds.

    prepare_s  build of the next generation in the background
    step_s     step
    copy_s     copy of the state, beside a step
    pause_s    from the summed gradients of that step until the commit
    """

    prepare_s: float
    step_s: float
    copy_s: float
    pause_s: float

    @property
    def commit_s(self) -> float:
        """Time from a vote on the change until its commit: the rest of a step, and one step."""
        return self.step_s + max(self.step_s, self.copy_s) + self.pause_s

    @property
    def total_s(self) -> float:
        """Time from the announcement until the commit."""
        return _PLAN_S + self.prepare_s + self.step_s + self.commit_s


@dataclass(frozen=True)
class Departure:
    """Decision of a rank that has got a notice.

    until_s     time at which the node is gone; inf: not known
    hands_over  a plan without this rank is asked for; False is final
    """

    until_s: float
    hands_over: bool

    @classmethod
    def at_notice(cls, until_s: float, now_s: float, cost: HandOverCost) -> Departure:
        """Decide whether a hand-over fits the window."""
        return cls(until_s, _fits(cost.total_s, until_s - now_s))

    def may_commit(self, now_s: float, cost: HandOverCost) -> bool:
        """Return whether a change of layout that begins now is committed in time."""
        return _fits(cost.commit_s, self.until_s - now_s)

    def at_vote(self, now_s: float, cost: HandOverCost) -> Departure:
        """Decide anew when a change is about to begin."""
        return replace(self, hands_over=self.hands_over and self.may_commit(now_s, cost))

    def ends(self, now_s: float, cost: HandOverCost) -> bool:
        """Return whether the rank is to end now, because another step might not."""
        return not _fits(cost.step_s, self.until_s - now_s)


def _fits(needed_s: float, left_s: float) -> bool:
    return _SAFETY * needed_s + _MARGIN_S <= left_s


class HandOverMeter:
    """Measures the cost of a hand-over on one rank; the worst of the last measurements counts."""

    def __init__(self) -> None:
        self._steps_s = deque[float](maxlen=_KEPT)
        self._prepared_s = deque[float](maxlen=_KEPT)
        self._pauses_s = deque[float](maxlen=_KEPT)
        self._bytes_per_s = deque[float](maxlen=_KEPT)

    @property
    def step_s(self) -> float:
        """The shortest of the last steps; inf: none yet."""
        return min(tuple(self._steps_s), default=inf)

    def step(self, seconds: float) -> None:
        """Note the duration of a step."""
        self._steps_s.append(seconds)

    def prepared(self, seconds: float) -> None:
        """Note the duration of the build of a generation."""
        self._prepared_s.append(seconds)

    def changed(self, copied_bytes: int, copy_s: float, pause_s: float) -> None:
        """Note a change of layout."""
        self._pauses_s.append(pause_s)
        if copied_bytes and copy_s > 0:
            self._bytes_per_s.append(copied_bytes / copy_s)

    def cost(self, state_bytes: int) -> HandOverCost:
        """Cost of handing over `state_bytes`, all of which may have to be sent."""
        copy_s = state_bytes / min(tuple(self._bytes_per_s), default=_BYTES_PER_S)
        pause_s = max(tuple(self._pauses_s), default=0.0)
        return HandOverCost(
            prepare_s=max(tuple(self._prepared_s), default=_PREPARE_S),
            step_s=max(tuple(self._steps_s), default=0.0),
            copy_s=copy_s,
            pause_s=max(pause_s, copy_s),  # gradients are fewer bytes than parameters and moments
        )
