"""Detector and scheduler of a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING

from detector import DetectorSettings
from resihp.contracts import Job
from scheduler import ReplanDecision

from ..settings import Settings
from .plan_processes import InlineExecutor, PlanExecutor, ProcessExecutor

if TYPE_CHECKING:
    from detector import Detector


@dataclass(frozen=True)
class Adapters:
    """Factories of detectors, and the planner; tests inject fakes.

    detector  makes the detector of a job, with the predictor stored by an earlier one, if any.
              Raises `ContractError` for an unreadable one
    restore   makes it from a saved state and its large arrays by name
    replan    `scheduler.replan`
    executor  makes what calls it, with a time limit in seconds
    """

    detector: Callable[[Job, bytes | None], Detector]
    restore: Callable[[Job, bytes, Mapping[str, bytes]], Detector]
    replan: Callable[..., ReplanDecision]
    executor: Callable[[float], PlanExecutor] = lambda _: InlineExecutor()


AdapterFactory = Callable[[Settings], Adapters]
"""Loads detector and scheduler when a worker starts."""


def load_adapters(settings: Settings) -> Adapters:
    """The real detector and scheduler. Called when a worker starts."""
    from detector import Detector, Predictor
    from scheduler import replan

    names = {field.name for field in fields(DetectorSettings)}
    chosen = DetectorSettings(**settings.model_dump(include=names, exclude_none=True))

    def detector(job: Job, stored: bytes | None) -> Detector:
        predictor = None if stored is None else Predictor.from_bytes(stored)
        return Detector(job, settings=chosen, predictor=predictor)

    restore = partial(Detector.restore, settings=chosen)
    return Adapters(detector, restore, replan, ProcessExecutor)
