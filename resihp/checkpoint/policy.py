"""When to checkpoint: at every step, at every n-th, or as often as loses least.

A checkpoint that costs C seconds of training at intervals of T seconds, with faults a mean time M
apart, wastes C/T on saving and about T/2 for each fault on work done again. The sum is least near
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
    """What is known when the question comes, at the end of a step.

    since_s    since the last checkpoint was begun; None: there has been none
    cost_s     what a checkpoint has cost the training thread; None: not measured yet
    durable_s  how long the slowest level that always takes part has needed; None as above
    """

    step: int
    since_s: float | None
    cost_s: float | None
    durable_s: float | None


class SavePolicy(Protocol):
    """Says at which steps to checkpoint."""

    def is_due(self, moment: SaveTiming) -> bool:
        """Whether to begin one now."""


@dataclass(frozen=True)
class EveryStep:
    """At every step."""

    def is_due(self, moment: SaveTiming) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class Every:
    """At every `steps`-th step."""

    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ContractError("steps", f"a whole number, 1 or more, not {self.steps!r}")

    def is_due(self, moment: SaveTiming) -> bool:
        """Whether `steps` divides the step."""
        return moment.step % self.steps == 0


@dataclass(frozen=True)
class LeastLoss:
    """At the interval that loses least for the measured cost and the given rate of faults."""

    faults: FaultRate

    def __post_init__(self) -> None:
        if not isinstance(self.faults, FaultRate):
            raise ContractError("faults", f"a FaultRate, not {self.faults!r}")

    def is_due(self, moment: SaveTiming) -> bool:
        """Whether the best interval has passed, and storage can keep up."""
        if moment.since_s is None or moment.cost_s is None:
            return True
        best_s = best_interval_s(moment.cost_s, self.faults.mtbf_s)
        return moment.since_s >= max(best_s, moment.durable_s or 0.0)


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints that lose least in expectation (Daly, eq. 37).

    >>> round(best_interval_s(0.01, 3600.0), 2)
    8.48
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(cost_s / (2 * mtbf_s))
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - cost_s


def expected_loss(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Share of time lost to saving, to work done again and to restarts, to first order (Young)."""
    return cost_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s
