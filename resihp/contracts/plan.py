"""Plan of a job: layout, quotas and schedule that hold from a step on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from math import inf

from ._json import OMIT_EMPTY, to_json
from ._numbers import make_plain, number, whole_number, whole_numbers
from .errors import ContractError
from .job import Action
from .layout import Layout, Schedule


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Layout, quotas and schedule, with the predicted step time and its lower bound.

    version    counts up by one for each plan of a job; 0 is the layout it started with
    from_step  the plan may not be applied before this step
    step_ms    predicted step time
    bound_ms   certified lower bound of the step time; gap is (step_ms - bound_ms) / bound_ms
    reason     sentences that a person can read: what changed and why
    action     of the job, by which it takes the plan on; None for the plan that it started with and
               for one that it made by itself
    """

    version: int
    layout: Layout
    quotas: tuple[int, ...]
    from_step: int = 0
    step_ms: float = 0.0
    bound_ms: float = 0.0
    schedule: Schedule = Schedule.ONE_F_ONE_B
    reason: tuple[str, ...] = ()
    action: Action | None = field(default=None, metadata={OMIT_EMPTY: True})

    def __post_init__(self) -> None:
        make_plain(self, whole_number, "version", "from_step", least=0)
        make_plain(self, number, "step_ms", "bound_ms", least=0.0)
        if self.gap == inf:
            raise ContractError("bound_ms", f"is too small beside step_ms ({self.step_ms:g})")
        make_plain(self, whole_numbers, "quotas", least=0)
        make_plain(self, Schedule.named, "schedule")
        if len(self.quotas) != self.layout.dp:
            raise ContractError("quotas", "must have one entry for each replica")
        object.__setattr__(self, "layout", self.layout.under(self.schedule))

    @property
    def gap(self) -> float:
        """Excess of the predicted step time over the bound, as a fraction of the bound."""
        return self.step_ms / self.bound_ms - 1.0 if self.bound_ms > 0 else 0.0

    @property
    def digest(self) -> str:
        """Hash of layout, quotas and schedule: 16 hexadecimal digits.

        Distinguishes plans of the same version with different contents.
        """
        content = [to_json(self.layout), list(self.quotas), self.schedule.value]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def microbatches(self) -> int:
        """Microbatches per step over all replicas."""
        return sum(self.quotas)
