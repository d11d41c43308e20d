"""The learned part of the expectation while a job runs: when to train, and whether to believe it.

Training happens at fixed points of the stream, so a replay learns the same; it takes seconds at
most, on a bounded sample of healthy records.
"""

from __future__ import annotations

import numpy as np

from ..base.arrays import Bools, Floats, State
from ..base.robust import mad_sigma
from ..predictor import FEATURES, Predictor
from ..settings import DetectorSettings

_LEAST_ROWS = 2_000
_ROUNDS = 3
"""Trainings of one job: at `train_after_steps`, and after four and sixteen times as many."""
_WORSE = 1.1
"""Spread with the correction over spread without from which it no longer fits."""


class Correction:
    """Multiplies analytic times by what the predictor learned; notices when it no longer fits.

    Attributes: `predictor` (None before the first training), `misfit` (set once the correction
    made records less regular than they are without it; it is then out of use until trained anew).
    """

    def __init__(self, settings: DetectorSettings, predictor: Predictor | None = None) -> None:
        self._settings = settings
        self.predictor = predictor
        self.misfit = False
        self._rows = np.empty((0, len(FEATURES)), np.float32)
        self._ratio = np.empty(0, np.float32)
        self._steps = 0
        self._trained = 0
        self._spreads = np.zeros(2)

    @property
    def active(self) -> bool:
        """Whether the correction is in use."""
        predictor = self.predictor
        return predictor is not None and predictor.booster_ is not None and not self.misfit

    def of(self, features: Floats) -> tuple[Floats, Floats]:
        """Log correction and its doubt (log) for each record."""
        predictor = self.predictor
        if predictor is None or not self.active:
            return np.zeros(features.shape[0]), np.zeros(features.shape[0])
        return predictor.correction(features), 0.05 * predictor.beyond(features)

    def observe(self, features: Floats, plain: Floats, applied: Floats, usable: Bools) -> None:
        """One step's records: log of observed over analytic time, the device's own part taken
        out, and the correction that was applied to them."""
        self._check(plain, applied)
        if not self._settings.train or self._trained >= _ROUNDS:
            return
        self._steps += 1
        limit = max(self._settings.train_rows // (4 * self._settings.train_after_steps), 64)
        rows = np.flatnonzero(usable)
        rows = rows[:: max(1, -(-rows.size // limit))]
        most = self._settings.train_rows
        fresh = features[rows].astype(np.float32), plain[rows].astype(np.float32)
        self._rows = np.concatenate([self._rows, fresh[0]])[-most:]
        self._ratio = np.concatenate([self._ratio, fresh[1]])[-most:]
        due = self._settings.train_after_steps * 4**self._trained
        if self._steps >= due and self._ratio.size >= _LEAST_ROWS:
            self._train()

    def _check(self, plain: Floats, applied: Floats) -> None:
        if not self.active:
            return
        seen = np.array([mad_sigma(plain - applied, 0.0), mad_sigma(plain, 0.0)])
        fresh = not self._spreads.any()
        self._spreads = seen if fresh else 0.8 * self._spreads + 0.2 * seen
        self.misfit = bool(self._spreads[0] > _WORSE * self._spreads[1])

    def _train(self) -> None:
        predictor = Predictor(seed=self._settings.seed)
        rows, ratio = self._rows.astype(np.float64), self._ratio.astype(np.float64)
        self.predictor = predictor.fit_correction(rows, ratio)
        self._trained += 1
        if self._trained >= _ROUNDS:
            self._rows, self._ratio = self._rows[:0], self._ratio[:0]
        self.misfit = False
        self._spreads = np.zeros(2)

    def state(self) -> State:
        """What `load` needs."""
        return {
            "predictor": None if self.predictor is None else self.predictor.to_bytes(),
            "misfit": self.misfit,
            "rows": self._rows,
            "ratio": self._ratio,
            "counts": [self._steps, self._trained],
            "spreads": self._spreads,
        }

    def load(self, state: State) -> None:
        """Takes up what `state` returned."""
        data = state["predictor"]
        self.predictor = None if data is None else Predictor.from_bytes(data)
        self.misfit, self._rows, self._ratio = state["misfit"], state["rows"], state["ratio"]
        self._steps, self._trained = state["counts"]
        self._spreads = state["spreads"]
