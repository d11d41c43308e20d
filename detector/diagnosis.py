"""Why a job is slow: every cause removed in turn, from microbatch records alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resihp.contracts import Cause, Diagnosis, Job, Layout, TelemetryBatch

CAUSES: tuple[Cause, ...] = tuple(cause for cause in Cause if cause is not Cause.NONE)
WORTH_NAMING = 0.02
"""A cause that costs less than this share of the step is not named."""

_WORDS = {
    Cause.DEVICE: "slow devices",
    Cause.STAGE_IMBALANCE: "stages of unequal weight",
    Cause.SEQUENCE_IMBALANCE: "microbatches of unequal work",
    Cause.COMMUNICATION: "communication",
    Cause.HOST: "the host (data loading, garbage collection, late launches)",
}


def diagnose(job: Job, layout: Layout, batches: Iterable[TelemetryBatch]) -> Diagnosis:
    """What slows the steps in `batches`, which were recorded under `layout`.

    Records of an older plan version than the newest are left out. The steps are replayed in the
    order of the job's schedule, as they were and with one cause removed at a time.
    """
    from .whatif.replayed import Replayed

    replayed = Replayed.of(job, layout, batches)
    if replayed is None:
        return conclude(step=0.0, lost={}, slowdown=1.0, steps=0)
    return conclude(
        step=replayed.step_ms,
        lost=replayed.lost_ms,
        slowdown=replayed.slowdown,
        steps=replayed.steps,
    )


def conclude(*, step: float, lost: Mapping[Cause, float], slowdown: float, steps: int) -> Diagnosis:
    """The diagnosis, from the mean step and what each cause costs of it, in one unit.

    Shares are of what the causes cost together. No cause is named where even the largest costs
    less than `WORTH_NAMING` of the step.
    """
    total = sum(lost.values())
    shares: dict[Cause, float] = {
        cause: lost.get(cause, 0.0) / total if total > 0 else 0.0 for cause in CAUSES
    }
    worst = max(CAUSES, key=lambda cause: shares[cause])
    named = total > 0 and lost[worst] >= WORTH_NAMING * step
    return Diagnosis(
        slowdown=slowdown,
        root_cause=worst if named else Cause.NONE,
        attribution=shares,
        steps=steps,
        detail=_sentences(step, lost, named),
    )


def _sentences(step: float, lost: Mapping[Cause, float], named: bool) -> tuple[str, ...]:
    if not named:
        return ("No cause costs enough of the step to be named.",)
    ordered = sorted(lost.items(), key=lambda item: -item[1])
    return tuple(
        f"Without {_WORDS[cause]} a step would be {100.0 * cost / step:.1f}% shorter."
        for cause, cost in ordered
        if cost >= 0.5 * WORTH_NAMING * step
    )
