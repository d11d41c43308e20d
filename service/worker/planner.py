"""Planning under a time limit, in threads of its own."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

from resihp.contracts import InfeasibleError, Job, Plan
from scheduler import ReplanDecision, SkiRental

from .adapters import Adapters


class Planner:
    """Runs the scheduler in a thread pool and stops waiting for it after the time limit.

    The scheduler itself is given half of the limit, in which it returns the best plan found.
    """

    def __init__(self, adapters: Adapters, *, time_limit_s: float) -> None:
        self._adapters = adapters
        self._time_limit_s = time_limit_s
        # More than one thread, so that a planning run beyond its limit does not block the next.
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="plan")

    def replan(
        self,
        job: Job,
        current: Plan,
        speeds: Mapping[int, float],
        *,
        step: int,
        rental: SkiRental,
        horizon_steps: int | None = None,
    ) -> ReplanDecision:
        """The decision of `scheduler.replan` for the plan from `step` on.

        A dead rank in the current layout always leads to a plan. Raises `InfeasibleError`, also
        with the constraint "time" when the limit is exceeded.
        """
        future = self._pool.submit(
            self._adapters.replan,
            job,
            current,
            speeds,
            step=step,
            rental=rental,
            horizon_steps=horizon_steps,
            time_limit_s=self._time_limit_s / 2,
        )
        try:
            return future.result(self._time_limit_s)
        except FutureTimeoutError:
            detail = f"planning took longer than {self._time_limit_s:g} s"
            raise InfeasibleError("time", detail) from None

    def close(self) -> None:
        """Cancel waiting runs; does not wait for running ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)
