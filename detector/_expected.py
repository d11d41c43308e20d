"""Residuals of records that carry lengths: observed over expected compute time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resihp.contracts import Job, Op, TelemetryBatch

from ._arrays import Bools, Floats, Ints, State
from ._correction import Correction
from ._places import Places
from ._regression import CellRegression
from .robust import group_location, group_median, mad_sigma
from .workload import TERMS, features_of, work_terms

_LEVEL_STEPS = 6
"""Steps in which the level of a class is still learned; after that only its shape is."""


@dataclass(frozen=True)
class FixedShare:
    """The part of the expected time that does not grow with the work; arrays over ranks.

    mean     share of the expected time, over the rank's records
    both     sum over the records of (share - mean) * residual
    square   sum over the records of (share - mean)**2
    noise    standard deviation of a record's residual
    """

    mean: Floats
    both: Floats
    square: Floats
    noise: float


@dataclass(frozen=True)
class StepResidual:
    """What one step says of every rank; arrays over ranks.

    value   log of observed over expected compute time; NaN where there is none
    error   standard error that the expectation and the number of records leave
    records number of records behind it
    spread  robust standard deviation of single records around their rank's value
    wider   how much further apart healthy ranks lie than devices: witnesses bring their own offsets
    fixed   what of it does not grow with the work; None where lengths tell
    """

    value: Floats
    error: Floats
    records: Ints
    spread: float
    wider: float = 1.0
    fixed: FixedShare | None = None


class LengthModel:
    """Expected compute times from lengths, learned as the steps come in.

    One small regression for each class of peers, chunk and op on the analytic terms. What a rank
    itself is slower or faster by is taken out of its records before anything is learned from them,
    so a slow device does not become the norm.
    """

    def __init__(self, job: Job, places: Places, correction: Correction) -> None:
        self._job, self._places, self.correction = job, places, correction
        self._cells = int(places.peers.max() + 1) * job.chunks * 2
        self.regression = CellRegression(
            self._cells,
            prior=np.array([0.0, 1.0, 1.0]),
            ridge=np.array([0.04, 0.0016, 0.0016]),
            non_negative=np.ones(TERMS, bool),
        )
        self._learned = 0
        self._spread = 0.0

    def cell_of(self, batch: TelemetryBatch, index: Ints) -> Ints:
        """Regression cell of each record."""
        kind = self._places.peers[index] * self._job.chunks + np.minimum(
            batch.chunk, self._job.chunks - 1
        )
        result: Ints = kind * 2 + (batch.op == Op.BACKWARD)
        return result

    def residuals(self, batch: TelemetryBatch, index: Ints, trusted: Bools) -> StepResidual:
        """Scores one step of compute records, then learns from the ranks in `trusted`."""
        terms = work_terms(self._job, self._places, batch, index)
        features = features_of(self._places, batch, index)
        applied, unsure = self.correction.of(features)
        times = np.maximum(batch.compute_ms, 1e-6) * np.exp(-applied)
        cell = self.cell_of(batch, index)
        if not self._learned:
            self._start(cell, terms, times, index, trusted)
        self.regression.open(cell, terms, times)
        expected, doubt = self.regression.predict(cell, terms)
        doubt = np.hypot(doubt, unsure / max(self._spread, 1e-4))
        ratio = np.log(times / expected)
        result = self._score(ratio, doubt, index)
        own = ratio - result.value[index]
        usable = trusted[index] & (np.abs(own) < 6.0 * max(self._spread, 1e-4))
        self._learn(cell, terms, times, expected, index, result.value, trusted)
        self.correction.observe(features, own + applied, applied, usable)
        return result

    def _score(self, residual: Floats, doubt: Floats, index: Ints) -> StepResidual:
        size = self._places.size
        centre = group_median(residual, index, size)
        inner = mad_sigma(residual - centre[index], 0.0)
        self._spread = inner if not self._learned else 0.8 * self._spread + 0.2 * inner
        spread = max(self._spread, 1e-4)
        error = doubt * spread
        weights = 1.0 / (1.0 + (error / spread) ** 2)
        value, left = group_location(residual, index, size, spread, weights)
        counts = np.bincount(index, minlength=size)
        some = np.maximum(left, 1e-9)
        shared = np.bincount(index, weights * error, size) / np.maximum(
            np.bincount(index, weights, size), 1e-9
        )
        total = np.sqrt(spread**2 / some + shared**2)
        return StepResidual(np.where(counts > 0, value, np.nan), total, counts, spread)

    def _start(self, cell: Ints, terms: Floats, times: Floats, index: Ints, trusted: Bools) -> None:
        """First step: fit on it, with what each rank differs by from its class taken out."""
        self.regression.open(cell, terms, times)
        for _ in range(3):
            expected, doubt = self.regression.predict(cell, terms)
            value = self._score(np.log(times / expected), 0.0 * doubt, index).value
            self.regression.forget()
            self._learn(cell, terms, times, expected, index, value, trusted)
            self._learned = 0
        self.regression.forget()

    def _learn(
        self,
        cell: Ints,
        terms: Floats,
        times: Floats,
        expected: Floats,
        index: Ints,
        value: Floats,
        trusted: Bools,
    ) -> None:
        own = value[index]
        level = np.zeros(own.size)
        if self._learned < _LEVEL_STEPS:
            classes = self._places.peers
            use = trusted & np.isfinite(value)
            middle = group_median(value[use], classes[use], int(classes.max()) + 1)
            level = np.nan_to_num(middle)[classes[index]]
        usual = np.abs(np.log(times / expected) - own) < 4.0 * max(self._spread, 1e-4)
        weights = np.where(usual & trusted[index], 1.0, 0.0)
        self.regression.learn(cell, terms, times * np.exp(level - own), weights)
        self._learned += 1

    def inherit(self, older: LengthModel) -> None:
        """Starts from what an older layout taught: cost per FLOP and per layer, by op."""
        for op in range(2):
            known = [c for c in range(op, older._cells, 2) if older.regression.ready[c]]
            if not known:
                continue
            for cell in range(op, self._cells, 2):
                self.regression.inherit(cell, older.regression, known)
        self._spread = older._spread

    def state(self) -> State:
        """What `load` needs."""
        return {
            "correction": self.correction.state(),
            "regression": self.regression.state(),
            "learned": self._learned,
            "spread": self._spread,
        }

    def load(self, state: State) -> None:
        """Takes up what `state` returned."""
        self.correction.load(state["correction"])
        self.regression.load(state["regression"])
        self._learned, self._spread = state["learned"], state["spread"]
