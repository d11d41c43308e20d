"""The decision when a job needs another plan, from the verdicts on its devices.

The decision is level-triggered: it compares device speeds with those of the last plan, so that a
crash in between loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from resihp.contracts import InfeasibleError, Job, Plan, Status, Verdict

from .adapters import Adapters
from .planning_state import PlanningRetry, PlanningState

# A slowdown estimate that moves less than this (relative) does not change the situation.
_TOLERANCE = 0.1


class Planner:
    """Runs the scheduler in a thread pool and stops waiting for it after the time limit.

    The scheduler itself is given half of the limit, in which it returns the best plan found.
    """

    def __init__(self, adapters: Adapters, *, time_limit_s: float) -> None:
        self._replan = adapters.replan
        self._time_limit_s = time_limit_s
        # More than one thread, so that a planning run beyond its limit does not block the next.
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="plan")

    def next_plan(
        self,
        state: PlanningState,
        job: Job,
        verdicts: Iterable[Verdict],
        *,
        step: int,
        clock_s: float,
    ) -> Plan | None:
        """A plan from `step` on if one is needed; updates speeds, rental, retry and outcome.

        Plans when the speeds have changed since the last plan, or when the retry after a failure is
        due at `clock_s`. A dead rank in the current layout always leads to a plan.
        """
        speeds = speeds_of(verdicts, state.speeds, state.current.layout.ranks)
        speeds |= dict.fromkeys(state.joiners, 1.0)
        if speeds_changed(state.speeds, speeds):
            state.speeds, state.retry = speeds, PlanningRetry()
        elif not state.retry.is_due(clock_s):
            return None
        future = self._pool.submit(
            self._replan,
            job,
            state.current,
            speeds,
            step=step,
            rental=state.rental,
            horizon_steps=_horizon_steps(state, job, clock_s),
            time_limit_s=self._time_limit_s / 2,
        )
        try:
            decision = future.result(self._time_limit_s)
        except (InfeasibleError, TimeoutError) as error:
            constraint, detail = "time", f"planning took longer than {self._time_limit_s:g} s"
            if isinstance(error, InfeasibleError):
                constraint, detail = error.constraint, error.detail
            state.retry = state.retry.after_failure(clock_s)
            state.outcome = {"state": "infeasible", "constraint": constraint, "detail": detail}
            return None
        state.retry, state.rental = PlanningRetry(), decision.rental
        if decision.plan is None:
            state.outcome = {"state": "kept", "detail": decision.explanation}
        return decision.plan

    def close(self) -> None:
        """Cancel waiting runs; does not wait for running ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)


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


def _horizon_steps(state: PlanningState, job: Job, observed_s: float) -> int | None:
    """Expected steps until the next fault, over which a migration has to pay; None if unknown.

    The registered fault rate is updated with the fail-stops of the `observed_s` seconds since.
    """
    protection = job.protection
    if protection is None or state.step_ms <= 0.0:
        return None
    rate = protection.faults.seen(state.fail_stops, observed_s)
    return replace(protection, faults=rate).horizon_steps(state.step_ms / 1e3)
