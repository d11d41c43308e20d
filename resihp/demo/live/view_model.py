"""State of the running job for the live display."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from resihp.contracts import Plan, Status

from ..findings import WARM_UP_STEPS
from ..record import StepRecord

RECENT = 5


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the log. `kind` is one of phase, fault, verdict, plan, lost."""

    seconds: float
    step: int | None
    kind: str
    text: str


@dataclass(kw_only=True)
class Device:
    """Status and slowdown of one rank."""

    status: Status = Status.HEALTHY
    slowdown: float = 1.0


@dataclass(kw_only=True)
class ViewModel:
    """The job so far, of the live display."""

    plan: Plan
    steps: int
    plan_step: int = 0
    phase: str = ""
    links: dict[str, str] = field(default_factory=dict)
    seen: list[StepRecord] = field(default_factory=list)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=64))
    devices: dict[int, Device] = field(default_factory=lambda: defaultdict(Device))
    reference: tuple[int, int] | None = None
    first_fault: int | None = None

    def __post_init__(self) -> None:
        for rank in self.plan.layout.ranks:
            self.devices[rank] = Device()

    @property
    def next_step(self) -> int:
        """The step that the job is in."""
        return self.seen[-1].step + 1 if self.seen else 0

    def healthy_ms(self) -> float | None:
        """Median step time between the warm-up and the first fault."""
        times = [
            seen.paced_ms
            for seen in self.seen
            if seen.step >= WARM_UP_STEPS
            and (self.first_fault is None or seen.step < self.first_fault)
        ]
        return median(times) if times else None

    def recent_ms(self) -> float | None:
        """Median of the last few step times under the present plan, its first step left out."""
        times = [seen.paced_ms for seen in self.seen if seen.step > self.plan_step]
        times = times or [seen.paced_ms for seen in self.seen[-1:]]
        return median(times[-RECENT:]) if times else None
