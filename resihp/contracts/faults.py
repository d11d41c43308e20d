"""Fault rate of a job, its protection, and the horizon over which a change of layout must pay."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from math import inf

from ._numbers import make_plain, number, whole_number
from .errors import ContractError

_MOST_S = 1e15  # between checkpoints: more is no time that a step can be weighed against
_MOST_STEPS = 2**53  # of a horizon: more change no decision


@dataclass(frozen=True)
class FaultRate:
    """Posterior of the fault rate: a gamma distribution whose prior weighs as much as one fault.

    prior_mtbf_s  mean time between faults that one would guess beforehand
    observed_s    how long the job has run;  `faults` how many it has had
    """

    prior_mtbf_s: float
    faults: int = 0
    observed_s: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self, number, "prior_mtbf_s", above=0.0)
        make_plain(self, whole_number, "faults", least=0)
        make_plain(self, number, "observed_s", least=0.0)

    @property
    def mtbf_s(self) -> float:
        """Mean time between faults."""
        return (self.prior_mtbf_s + self.observed_s) / (1 + self.faults)

    def seen(self, faults: int, observed_s: float) -> FaultRate:
        """After more faults in more time."""
        total_s = self.observed_s + observed_s
        return replace(self, faults=self.faults + faults, observed_s=total_s)


@dataclass(frozen=True, kw_only=True)
class Protection:
    """Protection of a job against faults.

    faults      how often they come
    interval_s  between checkpoints, at most 1e15; 0: no work is done again after a fault
    cost_s      of training time that one checkpoint takes
    """

    faults: FaultRate = field(default_factory=lambda: FaultRate(86_400.0))
    interval_s: float = 0.0
    cost_s: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self, number, "interval_s", "cost_s", least=0.0, most=_MOST_S)
        if self.cost_s > self.interval_s:
            raise ContractError("cost_s", "must be from 0 to interval_s")

    def horizon_steps(self, step_s: float) -> int:
        """Steps until the next fault that last, in expectation: a change has to pay over these.

        Half an interval is done again after the fault, and checkpoints take their part.
        """
        share = 1.0 - self.cost_s / self.interval_s if self.interval_s else 1.0
        mtbf_s = min(self.faults.mtbf_s, sys.float_info.max)
        lasting_s = max(0.0, mtbf_s - self.interval_s / 2.0) * share
        steps = lasting_s / step_s if step_s > 0.0 else inf
        return max(1, int(min(steps, _MOST_STEPS)))
