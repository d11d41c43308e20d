"""Checkpoint intervals: every step, every n steps, or the interval of least expected loss.

A checkpoint that costs C seconds of training at intervals of T seconds, with faults a mean time M
apart, loses C/T to saving and about T/2 of repeated work per fault. The sum is least near
T = sqrt(2 C M) (J. W. Young, A first order approximation to the optimum checkpoint interval,
Comm. ACM 17(9), 1974); `best_interval_s` is the higher-order estimate of J. T. Daly (Future
Generation Computer Systems 22(3), 2006, eq. 37).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from resihp.contracts import ContractError, FaultRate


@dataclass(frozen=True)
class SaveTiming:
    """Measurements available to a policy at the end of a step.

    since_s    seconds since the last checkpoint began; None before the first one
    cost_s     seconds of the training thread per checkpoint; None until measured
    durable_s  seconds until a checkpoint is complete on the slowest level; None until measured
    """

    step: int
    since_s: float | None
    cost_s: float | None
    durable_s: float | None


class SavePolicy(Protocol):
    """Selects the steps to checkpoint."""

    def is_due(self, timing: SaveTiming) -> bool:
        """Return True to begin a checkpoint now."""


@dataclass(frozen=True)
class EveryStep:
    """A checkpoint at every step."""

    def is_due(self, timing: SaveTiming) -> bool:
        return True


@dataclass(frozen=True)
class Every:
    """A checkpoint at each step that is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ContractError("steps", f"must be a positive integer, not {self.steps!r}")

    def is_due(self, timing: SaveTiming) -> bool:
        return timing.step % self.steps == 0


@dataclass(frozen=True)
class LeastLoss:
    """The interval of least expected loss, from the measured cost and the given fault rate."""

    faults: FaultRate

    def __post_init__(self) -> None:
        if not isinstance(self.faults, FaultRate):
            raise ContractError("faults", f"must be a FaultRate, not {self.faults!r}")

    def is_due(self, timing: SaveTiming) -> bool:
        """Return True once the best interval has passed and storage has had time to finish."""
        if timing.since_s is None or timing.cost_s is None:
            return True
        best_s = best_interval_s(timing.cost_s, self.faults.mtbf_s)
        return timing.since_s >= max(best_s, timing.durable_s or 0.0)


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints with the least expected loss (Daly, eq. 37).

    >>> round(best_interval_s(0.01, 3600.0), 2)
    8.48
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(cost_s / (2 * mtbf_s))
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - cost_s
