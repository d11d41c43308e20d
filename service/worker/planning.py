"""When to plan anew, and how: level-triggered, so that a crash in between loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

from resihp.contracts import InfeasibleError, Job, Plan, Status, Verdict
from scheduler.switching_rule import ReplanDecision, SkiRental

from .adapters import Adapters

# A slowdown estimate that moves less than this (relative) is not a new situation.
_TOLERANCE = 0.1
_RETRY_S = 5.0
_LONGEST_RETRY_S = 600.0


def speeds_of(
    verdicts: Iterable[Verdict], known: Mapping[int, float], working: Iterable[int]
) -> dict[int, float]:
    """Speed of every device that is not healthy: 1/slowdown, 0.0 where it stopped.

    `known` are the speeds that the last plan was made for. A device that no longer works in the
    layout, and of which the detector does not speak, keeps its speed.
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


def is_news(known: Mapping[int, float], speeds: Mapping[int, float]) -> bool:
    """Whether `speeds` differ from those that the last plan was made for."""
    if known.keys() != speeds.keys():
        return True
    return any(abs(speeds[rank] - known[rank]) > _TOLERANCE * known[rank] for rank in known)


def why_kept(decision: ReplanDecision) -> str:
    """Why the layout stays as it is, and when another one would pay, in a sentence."""
    best, rental = decision.best or decision.rental.offer, decision.rental
    if best is None:
        return "no other layout is quicker with the devices as they are"
    words = (
        f"a new layout would save {best.saved_ms:.3g} ms a step and cost {best.cost_ms:.3g} ms of "
        f"moves, which it saves in {best.pays_after} steps"
    )
    if rental.offer is None:
        return f"{words}: less is gained than speeds are known to"
    return f"{words}: taken on if this lasts {rental.steps_left} steps"


@dataclass(frozen=True)
class Retry:
    """When planning that failed is tried again though the speeds are the same: later each time."""

    failures: int = 0
    due_s: float = float("inf")

    def failed(self, now_s: float) -> Retry:
        """After one more failure."""
        wait_s = min(_RETRY_S * 2.0**self.failures, _LONGEST_RETRY_S)
        return Retry(self.failures + 1, now_s + wait_s)


class Planner:
    """Runs the scheduler beside the caller, and gives up waiting after the time limit.

    The scheduler itself is asked for the best plan that it finds in half of that.
    """

    def __init__(self, adapters: Adapters, *, time_limit_s: float) -> None:
        self._adapters = adapters
        self._time_limit_s = time_limit_s
        # More than one thread: planning that ran over its limit must not block the next one.
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
        """What to change from that step on; `rental` and `horizon_steps` as `scheduler.replan`
        has them.

        A dead rank in the current layout always leads to a plan. Raises `InfeasibleError`.
        """
        adapters, soft_s = self._adapters, self._time_limit_s / 2
        return self._limited(
            lambda: adapters.replan(
                job,
                current,
                speeds,
                step=step,
                rental=rental,
                horizon_steps=horizon_steps,
                time_limit_s=soft_s,
            )
        )

    def _limited(self, work: Callable[[], ReplanDecision]) -> ReplanDecision:
        try:
            return self._pool.submit(work).result(self._time_limit_s)
        except FutureTimeoutError:
            detail = f"planning took longer than {self._time_limit_s:g} s"
            raise InfeasibleError("time", detail) from None

    def close(self) -> None:
        """Let go of the threads without waiting for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)
