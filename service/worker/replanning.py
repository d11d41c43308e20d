"""The decision when a job needs another plan, from the verdicts on its devices.

The decision is level-triggered: it compares device speeds with those of the last plan, so that a
crash in between loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from resihp.contracts import InfeasibleError, Job, Plan, Status, Verdict

from .planner import Planner
from .planning_state import PlanningRetry, PlanningState

# A slowdown estimate that moves less than this (relative) does not change the situation.
_TOLERANCE = 0.1


def speeds_of(
    verdicts: Iterable[Verdict], known: Mapping[int, float], working: Iterable[int]
) -> dict[int, float]:
    """Relative speeds of the devices that are not healthy: 1/slowdown, 0.0 if stopped.

    A device without a verdict that is not among the `working` ranks keeps its speed in `known`,
    the speeds of the last plan.
    """
    verdicts = list(verdicts)
    judged = {*working, *(verdict.rank for verdict in verdicts)}
    speeds = {rank: speed for rank, speed in known.items() if rank not in judged}
    for verdict in verdicts:
        if verdict.status is Status.FAIL_STOP:
            speeds[verdict.rank] = 0.0
        elif verdict.status is Status.FAIL_SLOW and verdict.slowdown > 1.0:
            speeds[verdict.rank] = 1.0 / verdict.slowdown
    return speeds


def speeds_changed(known: Mapping[int, float], speeds: Mapping[int, float]) -> bool:
    """True if `speeds` differ from those of the last plan beyond the tolerance."""
    if known.keys() != speeds.keys():
        return True
    return any(abs(speeds[rank] - known[rank]) > _TOLERANCE * known[rank] for rank in known)


def horizon_steps(state: PlanningState, job: Job, observed_s: float) -> int | None:
    """Expected steps until the next fault, over which a migration has to pay; None if unknown.

    The registered fault rate is updated with the fail-stops of the `observed_s` seconds since.
    """
    protection = job.protection
    if protection is None or state.step_ms <= 0.0:
        return None
    rate = protection.faults.seen(state.fail_stops, observed_s)
    return replace(protection, faults=rate).horizon_steps(state.step_ms / 1e3)


def next_plan(
    state: PlanningState,
    planner: Planner,
    job: Job,
    verdicts: Iterable[Verdict],
    *,
    step: int,
    clock_s: float,
) -> Plan | None:
    """A plan from `step` on if one is needed; updates speeds, rental, retry and outcome.

    Plans when the speeds have changed since the last plan, or when the retry after a failure is
    due at `clock_s`.
    """
    speeds = speeds_of(verdicts, state.speeds, state.current.layout.ranks)
    speeds |= dict.fromkeys(state.joiners, 1.0)
    if speeds_changed(state.speeds, speeds):
        state.speeds, state.retry = speeds, PlanningRetry()
    elif not state.retry.is_due(clock_s):
        return None
    try:
        decision = planner.replan(
            job,
            state.current,
            speeds,
            step=step,
            rental=state.rental,
            horizon_steps=horizon_steps(state, job, clock_s),
        )
    except InfeasibleError as error:
        state.retry = state.retry.after_failure(clock_s)
        constraint, detail = error.constraint, error.detail
        state.outcome = {"state": "infeasible", "constraint": constraint, "detail": detail}
        return None
    state.retry, state.rental = PlanningRetry(), decision.rental
    if decision.plan is None:
        state.outcome = {"state": "kept", "detail": decision.explanation}
    return decision.plan
