"""Why a job is slow: every cause removed in turn, from microbatch records alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resihp.contracts import Cause, Diagnosis, Job, Layout, TelemetryBatch

if TYPE_CHECKING:
    from .whatif.slow import SlowDevice

CAUSES: tuple[Cause, ...] = tuple(cause for cause in Cause if cause is not Cause.NONE)
WORTH_NAMING = 0.02
"""A cause that costs less than this share of the step is not named."""

_WORDS = {
    Cause.DEVICE: "Slow devices cost",
    Cause.STAGE_IMBALANCE: "Stages of unequal weight cost",
    Cause.SEQUENCE_IMBALANCE: "Microbatches of unequal work cost",
    Cause.COMMUNICATION: "Slow or heavy communication costs",
    Cause.HOST: "The host (data loading, garbage collection, late launches) costs",
}
_NOTHING = "No cause costs enough of the step to be named."
_UNTOLD = "Devices that compute longer than their peers, by more work or by themselves, cost"
_NOT_TOLD = (
    "Whether the devices are slow or have more work cannot be told: the records carry no lengths, "
    "and no other rank computes the same microbatches by a timer of its own."
)
_NOT_NAMED = "Which of the devices are slow could not be told: see the verdicts."


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the steps of a job took and what each cause cost of it, in one unit of time.

    step and ideal are means over `steps` steps; `lost` per step, 0 or more. `told` is whether the
    records tell slow devices from more work.
    """

    step: float
    ideal: float
    lost: Mapping[Cause, float]
    steps: int
    told: bool = True

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
    less than `WORTH_NAMING` of the step, or less than a quarter of that for slow devices where the
    detector has named some (`slow`). Nor are slow devices where the records do not tell them from
    more work, unless the detector has. `slowdown` overrides the one that follows from `costs`.
    """
    device_named = bool(slow)
    total = sum(costs.lost.values())
    shares: dict[Cause, float] = {
        cause: costs.lost.get(cause, 0.0) / total if total > 0 else 0.0 for cause in CAUSES
    }
    worst = max(CAUSES, key=lambda cause: shares[cause])
    least = WORTH_NAMING / 4 if device_named and worst is Cause.DEVICE else WORTH_NAMING
    costly = total > 0 and costs.lost[worst] >= least * costs.step
    told = costs.told or device_named
    named = costly and (told or worst is not Cause.DEVICE)
    return Diagnosis(
        slowdown=costs.slowdown if slowdown is None else slowdown,
        root_cause=worst if named else Cause.NONE,
        attribution=shares,
        steps=costs.steps,
        detail=_sentences(costs, told, device_named) if costly else (_NOTHING,),
    )


def _sentences(costs: Costs, told: bool, device_named: bool) -> tuple[str, ...]:
    words = _WORDS if told else {**_WORDS, Cause.DEVICE: _UNTOLD}
    least = WORTH_NAMING / 4 * costs.step
    ordered = sorted(costs.lost.items(), key=lambda item: -item[1])
    lines = [
        f"{words[cause]} {100.0 * cost / costs.step:.1f}% of the step."
        for cause, cost in ordered
        if cost >= least
    ]
    cost = costs.lost.get(Cause.DEVICE, 0.0)
    if not told and cost >= least:
        return (*lines, _NOT_TOLD)
    unnamed = cost >= WORTH_NAMING * costs.step and not device_named
    return (*lines, _NOT_NAMED) if unnamed else tuple(lines)
