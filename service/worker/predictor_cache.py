"""What a job's detector learned about the cost of work, for the next job of the same kind."""

from __future__ import annotations

import hashlib
import json

from resihp.contracts import ContractError, Job, to_json

from ..logs import logger
from .adapters import Adapters, DetectorLike, FittedPredictor

log = logger("resihp.learning")


def cache_key(job: Job) -> str | None:
    """Names the jobs that one predictor serves: equal model, device type and recomputation. None
    where the job does not say which model it trains."""
    if job.model is None:
        return None
    kind = [to_json(job.model), job.device, job.recompute]
    return hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:32]


class PredictorCache:
    """Makes a job's detector, with what an earlier job taught if there is something, and tells
    when it has learned anew."""

    def __init__(self, adapters: Adapters, job: Job) -> None:
        self._adapters, self._job = adapters, job
        self._told: FittedPredictor | None = None

    def detector(self, predictor: bytes | None) -> DetectorLike:
        """A detector that starts with a stored predictor; without it if that is unreadable."""
        if predictor is not None and self._adapters.with_predictor is not None:
            try:
                detector = self._adapters.with_predictor(self._job, predictor)
            except ContractError as error:
                log.warning("stored predictor left alone", job=self._job.name, error=str(error))
            else:
                self._told = self._adapters.predictor_of(detector)
                return detector
        return self._adapters.detector(self._job)

    def news(self, detector: DetectorLike) -> tuple[str, bytes] | None:
        """Kind of job and stored form of a predictor that was not told before."""
        kind, fitted = cache_key(self._job), self._adapters.predictor_of(detector)
        if kind is None or fitted is None or fitted is self._told:
            return None
        self._told = fitted
        return kind, fitted.to_bytes()
