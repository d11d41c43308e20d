"""The pure parts that a worker drives, as it sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from detector.probes import ProbeRequest, ProbeResult
from resihp.contracts import Diagnosis, Job, Plan, TelemetryBatch, Verdict
from scheduler.rental import Decision, Rental


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
    def probe_requests(self, now: float) -> list[ProbeRequest]: ...
    def probe_result(self, result: ProbeResult) -> list[Verdict]: ...
    def save(self) -> bytes: ...


class Replan(Protocol):
    """`scheduler.replan`: what to change now, and what once it pays."""

    def __call__(
        self,
        job: Job,
        current: Plan,
        speeds: Mapping[int, float],
        *,
        step: int,
        rental: Rental,
        time_limit_s: float | None,
    ) -> Decision: ...


@dataclass(frozen=True)
class Engines:
    """How a worker makes its detectors and plans; tests put small fakes here."""

    detector: Callable[[Job], DetectorLike]
    restore: Callable[[Job, bytes], DetectorLike]
    replan: Replan


def load_engines() -> Engines:
    """The real detector and scheduler. Imports LightGBM, so it is called when a worker starts."""
    from detector import Detector
    from scheduler import replan

    return Engines(Detector, Detector.restore, replan)
