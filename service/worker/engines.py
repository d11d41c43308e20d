"""The pure parts that a worker drives, as it sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from resihp.contracts import Diagnosis, Job, Layout, Plan, TelemetryBatch, Verdict


class DetectorLike(Protocol):
    """A detector of one job (`detector.Detector`)."""

    def update(self, batch: TelemetryBatch) -> list[Verdict]: ...
    def verdicts(self) -> list[Verdict]: ...
    def diagnosis(self) -> Diagnosis: ...
    def apply_plan(self, plan: Plan) -> None: ...
    def heartbeat(self, ranks: Iterable[int], now: float) -> list[Verdict]: ...
    def check_alive(self, now: float) -> list[Verdict]: ...
    def report_failure(
        self, ranks: Iterable[int], *, step: int | None, detail: str
    ) -> list[Verdict]: ...
    def save(self) -> bytes: ...


class Replan(Protocol):
    """`scheduler.replan`: a better plan, or None where a change is not worth it."""

    def __call__(
        self,
        job: Job,
        current: Plan,
        speeds: Mapping[int, float],
        *,
        step: int,
        time_limit_s: float | None,
    ) -> Plan | None: ...


class MakePlan(Protocol):
    """`scheduler.make_plan`: the best plan for these speeds. Raises `InfeasibleError`."""

    def __call__(
        self,
        job: Job,
        speeds: Mapping[int, float],
        layout: Layout,
        *,
        from_step: int,
        time_limit_s: float | None,
    ) -> Plan: ...


@dataclass(frozen=True)
class Engines:
    """How a worker makes its detectors and plans; tests put small fakes here.

    step_ms  predicted step time of the layout that a job starts with, all devices healthy
    """

    detector: Callable[[Job], DetectorLike]
    restore: Callable[[Job, bytes], DetectorLike]
    replan: Replan
    make_plan: MakePlan
    step_ms: Callable[[Job], float]


def load_engines() -> Engines:
    """The real detector and scheduler. Imports LightGBM, so it is called when a worker starts."""
    from detector import Detector
    from scheduler import make_plan, replan, simulate

    def step_ms(job: Job) -> float:
        return float(simulate(job, job.layout, job.quotas).step_ms)

    return Engines(Detector, Detector.restore, replan, make_plan, step_ms)
