"""Reuse of the fitted cost predictor by later jobs of the same kind."""

from __future__ import annotations

import hashlib
import json

from resihp.contracts import ContractError, Job, to_json

from ..logs import logger
from .adapters import Adapters, DetectorLike, FittedPredictor

log = logger("resihp.predictor_cache")


def cache_key(job: Job) -> str | None:
    """Key of the jobs that share a predictor: equal model, device type and recomputation.

    None for a job without a model description.
    """
    if job.model is None:
        return None
    kind = [to_json(job.model), job.device, job.recompute]
    return hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:32]


class PredictorCache:
    """Makes a job's detector, with a stored predictor if there is one, and reports new fits."""

    def __init__(self, adapters: Adapters, job: Job) -> None:
        self._adapters, self._job = adapters, job
        self._known: FittedPredictor | None = None

    def detector(self, predictor: bytes | None) -> DetectorLike:
        """A detector that starts with the stored predictor, or without it if it is unreadable."""
        if predictor is not None and self._adapters.with_predictor is not None:
            try:
                detector = self._adapters.with_predictor(self._job, predictor)
            except ContractError as error:
                log.warning("stored predictor ignored", job=self._job.name, error=str(error))
            else:
                self._known = self._adapters.predictor_of(detector)
                return detector
        return self._adapters.detector(self._job)

    def new_fit(self, detector: DetectorLike) -> tuple[str, bytes] | None:
        """Cache key and stored form of a predictor fitted since the last call; None otherwise."""
        key, fitted = cache_key(self._job), self._adapters.predictor_of(detector)
        if key is None or fitted is None or fitted is self._known:
            return None
        self._known = fitted
        return key, fitted.to_bytes()
