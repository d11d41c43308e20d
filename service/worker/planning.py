"""When to plan anew, and how: level-triggered, so that a crash in between loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace

from resihp.contracts import InfeasibleError, Job, Plan, Status, Verdict

from .engines import Engines

# A slowdown estimate that moves less than this (relative) is not a new situation.
_TOLERANCE = 0.1


def speeds_of(
    verdicts: Iterable[Verdict], known: Mapping[int, float], working: Iterable[int]
) -> dict[int, float]:
    """Speed of every device that is not healthy: 1/slowdown, 0.0 where it stopped.

    `known` are the speeds that the last plan was made for. A device that no longer works in the
    layout sends no records, so that nothing can show that it recovered: it keeps its speed.
    """
    at_work = set(working)
    speeds = {rank: speed for rank, speed in known.items() if rank not in at_work}
    for verdict in verdicts:
        if verdict.status is Status.FAIL_STOP:
            speeds[verdict.rank] = 0.0
        elif verdict.status is Status.FAIL_SLOW and verdict.slowdown > 1.0:
            speeds[verdict.rank] = 1.0 / verdict.slowdown
    return speeds


def is_news(known: Mapping[int, float], speeds: Mapping[int, float]) -> bool:
    """Whether `speeds` differ from those that the last plan was made for."""
    if known.keys() != speeds.keys():
        return True
    return any(abs(speeds[rank] - known[rank]) > _TOLERANCE * known[rank] for rank in known)


class Planner:
    """Runs the scheduler beside the caller, and gives up waiting after the time limit.

    The scheduler itself is asked for the best plan that it finds in half of that.
    """

    def __init__(self, engines: Engines, *, time_limit_s: float) -> None:
        self._engines = engines
        self._time_limit_s = time_limit_s
        # More than one thread: planning that ran over its limit must not block the next one.
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="plan")

    def replan(
        self, job: Job, current: Plan, speeds: Mapping[int, float], *, version: int, step: int
    ) -> Plan | None:
        """A plan of that version from that step on; None where the current one is better kept.

        A dead rank in the current layout always leads to a plan. Raises `InfeasibleError`.
        """
        engines, soft_s = self._engines, self._time_limit_s / 2
        plan = self._limited(
            lambda: engines.replan(job, current, speeds, step=step, time_limit_s=soft_s)
        )
        dead = [rank for rank in current.layout.ranks if speeds.get(rank, 1.0) <= 0.0]
        if plan is None and dead:
            plan = self._limited(
                lambda: engines.make_plan(
                    job, speeds, current.layout, from_step=step, time_limit_s=soft_s
                )
            )
        return plan and replace(plan, version=version, from_step=step)

    def _limited(self, work: Callable[[], Plan | None]) -> Plan | None:
        try:
            return self._pool.submit(work).result(self._time_limit_s)
        except FutureTimeoutError:
            detail = f"planning took longer than {self._time_limit_s:g} s"
            raise InfeasibleError("time", detail) from None

    def close(self) -> None:
        """Let go of the threads without waiting for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)
