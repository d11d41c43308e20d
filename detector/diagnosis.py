"""Why a job is slow: every cause removed in turn, from microbatch records alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resihp.contracts import Cause, Diagnosis, Job, Layout, TelemetryBatch

from ._advice import NOTHING, WORTH_SAYING, sentences

if TYPE_CHECKING:
    from .whatif.slow import SlowDevice

CAUSES: tuple[Cause, ...] = tuple(cause for cause in Cause if cause is not Cause.NONE)
WORTH_NAMING = 0.02
"""A cause that costs less than this share of the step is not named."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the steps of a job took and what each cause cost of it, in one unit of time.

    step and ideal are means over `steps` steps; `lost` per step, 0 or more. `told` is whether the
    records tell slow devices from more work; `where` says of a cause where it is at its worst.
    """

    step: float
    ideal: float
    lost: Mapping[Cause, float]
    steps: int
    told: bool = True
    where: Mapping[Cause, str] = field(default_factory=dict)

    @property
    def slowdown(self) -> float:
        """Step over ideal step; at least 1.

        The ideal spreads evenly what slow devices add, too: with few devices, and for most of the
        time, the step without that may be shorter, and counts. Where quotas or shares differ by
        design, work spread evenly may take longer than the step did; the ideal is then what is
        left of the step without its dearest cause.
        """
        ideal = min(self.ideal, self.step - self.lost.get(Cause.DEVICE, 0.0))
        if ideal >= self.step:
            ideal = self.step - max(self.lost.values(), default=0.0)
        return max(self.step / ideal, 1.0) if ideal > 0 else 1.0

    @classmethod
    def mean(cls, parts: Iterable[Costs]) -> Costs:
        """The mean over several stretches of a job, by their numbers of steps."""
        parts = [part for part in parts if part.steps]
        steps = sum(part.steps for part in parts)

        def over(values: Iterable[float]) -> float:
            pairs = zip(values, parts, strict=True)
            return sum(value * part.steps for value, part in pairs) / max(steps, 1)

        return cls(
            step=over(part.step for part in parts),
            ideal=over(part.ideal for part in parts),
            lost={cause: over(part.lost.get(cause, 0.0) for part in parts) for cause in CAUSES},
            steps=steps,
            told=all(part.told for part in parts),
            where=max(parts, key=lambda part: part.steps).where if parts else {},
        )


def costs_of(
    job: Job,
    layout: Layout,
    batches: Iterable[TelemetryBatch],
    slow: Sequence[SlowDevice] = (),
) -> Costs:
    """What slowed the steps in `batches`, which were recorded under `layout`; milliseconds.

    Records of an older plan version than the newest are left out. The steps are replayed in the
    order of the job's schedule, as they were and with one cause removed at a time. `slow` are the
    devices that the detector has named: it may know more of them than the records of these steps.
    """
    from .whatif.replayed import Replayed

    replayed = Replayed.of(job, layout, batches, slow)
    if replayed is None:
        return Costs(step=0.0, ideal=0.0, lost={}, steps=0)
    return Costs(
        step=replayed.step_ms,
        ideal=replayed.ideal_ms,
        lost=replayed.lost_ms,
        steps=replayed.steps,
        told=replayed.effects.tell_devices,
        where=replayed.where,
    )


def diagnose(
    job: Job,
    layout: Layout,
    batches: Iterable[TelemetryBatch],
    slow: Sequence[SlowDevice] = (),
) -> Diagnosis:
    """Why the steps in `batches` took as long as they did; see `costs_of` and `conclude`."""
    return conclude(costs_of(job, layout, batches, slow), slow=slow)


def conclude(
    costs: Costs, slowdown: float | None = None, *, slow: Sequence[SlowDevice] = ()
) -> Diagnosis:
    """The diagnosis from what each cause costs.

    Shares are of what the causes cost together. No cause is named where even the largest costs
    less than `WORTH_NAMING` of the step, or less than `WORTH_SAYING` for slow devices where the
    detector has named some (`slow`). Nor are slow devices where the records do not tell them from
    more work, unless the detector has. `slowdown` overrides the one that follows from `costs`.
    """
    total = sum(costs.lost.values())
    shares: dict[Cause, float] = {
        cause: costs.lost.get(cause, 0.0) / total if total > 0 else 0.0 for cause in CAUSES
    }
    worst = max(CAUSES, key=lambda cause: shares[cause])
    least = WORTH_SAYING if slow and worst is Cause.DEVICE else WORTH_NAMING
    costly = total > 0 and costs.lost[worst] >= least * costs.step
    named = costly and (worst is not Cause.DEVICE or costs.told or bool(slow))
    words: tuple[str, ...] = ()
    if costly or slow:
        of_step = {cause: cost / costs.step for cause, cost in costs.lost.items() if costs.step}
        words = sentences(of_step, costs.where, slow, told=costs.told, least=WORTH_NAMING)
    return Diagnosis(
        slowdown=costs.slowdown if slowdown is None else slowdown,
        root_cause=worst if named else Cause.NONE,
        attribution=shares,
        steps=costs.steps,
        detail=words if costly else (NOTHING, *words),
    )
