"""Interfaces of the detector and the scheduler to a worker, and their implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from detector import DetectorSettings, ProbeRequest, ProbeResult
from resihp.contracts import Diagnosis, Heartbeat, Job, Plan, TelemetryBatch, Verdict
from scheduler import ReplanDecision, SkiRental

from ..settings import Settings


class DetectorLike(Protocol):
    """A detector of one job (`detector.Detector`)."""

    def update(self, batch: TelemetryBatch) -> list[Verdict]: ...
    def verdicts(self) -> list[Verdict]: ...
    def diagnosis(self) -> Diagnosis: ...
    def apply_plan(self, plan: Plan) -> None: ...
    def take_heartbeats(self, heartbeats: Iterable[Heartbeat], now: float) -> list[Verdict]: ...
    def heard(self, ranks: Iterable[int], now: float) -> list[Verdict]: ...
    def check_alive(self, now: float) -> list[Verdict]: ...
    def report_failure(
        self, ranks: Iterable[int], *, step: int | None, detail: str
    ) -> list[Verdict]: ...
    def probe_requests(self, now: float) -> list[ProbeRequest]: ...
    def probe_result(self, result: ProbeResult) -> list[Verdict]: ...
    def save(self) -> bytes: ...


class FittedPredictor(Protocol):
    """A fitted cost predictor (`detector.Predictor`)."""

    def to_bytes(self) -> bytes: ...


class Replan(Protocol):
    """Signature of `scheduler.replan`."""

    def __call__(
        self,
        job: Job,
        current: Plan,
        speeds: Mapping[int, float],
        *,
        step: int,
        rental: SkiRental,
        horizon_steps: int | None,
        time_limit_s: float | None,
    ) -> ReplanDecision: ...


@dataclass(frozen=True)
class Adapters:
    """Factories of detectors, and the planner; tests inject fakes.

    with_predictor  makes a detector with a stored predictor; raises `ContractError` for an
                    unreadable one. None: predictors are not reused
    predictor_of    the fitted predictor of a detector; the same object until the next fit
    """

    detector: Callable[[Job], DetectorLike]
    restore: Callable[[Job, bytes], DetectorLike]
    replan: Replan
    with_predictor: Callable[[Job, bytes], DetectorLike] | None = None
    predictor_of: Callable[[DetectorLike], FittedPredictor | None] = lambda detector: None


def _detector_settings(settings: Settings) -> DetectorSettings:
    chosen = {
        "min_slowdown": settings.min_slowdown,
        "false_alarm_steps": settings.false_alarm_steps,
        "confirm_steps": settings.confirm_steps,
        "recover_steps": settings.recover_steps,
        "probes_per_minute": settings.probes_per_minute,
        "probation_probe_s": settings.probation_probe_s,
    }
    known: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    return DetectorSettings(**known)


AdapterFactory = Callable[[Settings], Adapters]
"""Loads detector and scheduler when a worker starts."""


def load_adapters(settings: Settings) -> Adapters:
    """The real detector and scheduler. Imports LightGBM; called when a worker starts."""
    from detector import Detector, Predictor
    from scheduler import replan

    chosen = _detector_settings(settings)

    def with_predictor(job: Job, stored: bytes) -> Detector:
        return Detector(job, settings=chosen, predictor=Predictor.from_bytes(stored))

    def predictor_of(detector: DetectorLike) -> FittedPredictor | None:
        return detector.predictor if isinstance(detector, Detector) else None

    return Adapters(
        detector=partial(Detector, settings=chosen),
        restore=partial(Detector.restore, settings=chosen),
        replan=replan,
        with_predictor=with_predictor,
        predictor_of=predictor_of,
    )
