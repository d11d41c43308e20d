"""Expected compute times of records that carry lengths: FLOPs by arithmetic, fitted to the job."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from resihp.contracts import Job, Op, TelemetryBatch

from ..arrays import Bools, Floats, Ints
from ..persistence import Persistent
from ..rank_table import RankTable
from ..residuals import StepResidual
from .predictor import LearnedCorrection
from .rank_levels import RankLevels
from .regression import CellRegression
from .unlike_work import UnlikeWork

TERMS = 3
"""Terms of the analytic model: fixed, linear in tokens, linear in squared lengths."""

_GUESSED_HIDDEN = 4096
_ENOUGH_STEPS = 12
"""Steps from which the noise of one kind of pass is measured between steps alone."""


def knows_lengths(batch: TelemetryBatch) -> Bools:
    """Mask of the records whose work is known."""
    return (batch.tokens >= 0) & (batch.sum_sq_len >= 0)


def work_terms(job: Job, places: RankTable, batch: TelemetryBatch, index: Ints) -> Floats:
    """Work of each record on its rank, shape (records, TERMS).

    Column 0 is the fixed part, per layer held: launches and reading the weights, independent of
    the amount of work, and at short lengths the memory-bound floor. Column 1 counts the FLOPs
    of matrices, 2 per parameter and token; on the last stage with the head. Column 2 counts those
    of causal attention, `2 * hidden * sum(len**2)` per layer. Backward is twice the forward, three
    times with recomputation. FLOPs are in 1e12.
    """
    tokens = np.maximum(batch.tokens, 0).astype(np.float64)
    squares = np.maximum(batch.sum_sq_len, 0).astype(np.float64)
    model = job.model
    if model is None:  # only a starting point: the ratio is learned
        per_token, per_square, head = 24.0 * _GUESSED_HIDDEN**2, 2.0 * _GUESSED_HIDDEN, 0.0
    else:
        per_token, head = 2.0 * model.layer_params, 2.0 * model.embedding_params
        per_square = 2.0 * model.heads * model.head_dim
    layers = places.layers[index] / job.chunks
    width = places.share[index]
    passes = np.where(batch.op == Op.BACKWARD, 3.0 if job.recompute else 2.0, 1.0)
    final = places.last[index] * (batch.chunk == job.chunks - 1)
    matrices = tokens * (layers * per_token + final * head) * width * passes * 1e-12
    attention = squares * layers * per_square * width * passes * 1e-12
    return np.stack([np.maximum(layers, 0.1), matrices, attention], axis=1)


def features_of(places: RankTable, batch: TelemetryBatch, index: Ints) -> Floats:
    """Feature matrix of records, columns as in `predictor.FEATURES`."""
    columns = [
        np.maximum(batch.tokens, 0),
        np.maximum(batch.sequences, 1),
        np.maximum(batch.sum_sq_len, 0),
        np.maximum(batch.max_len, 0),
        batch.op == Op.BACKWARD,
        places.layers[index],
        places.share[index],
        places.last[index],
    ]
    return np.stack([column.astype(np.float64) for column in columns], axis=1)


class LengthModel(Persistent):
    """Expected compute times from lengths, learned as the steps come in.

    One small regression for each class of peers, chunk and op on the analytic terms. Each rank's
    own level is removed from its records before anything is learned from them, so that a slow
    device does not become the norm.
    """

    _saved = ("correction", "regression", "_levels", "_unlike")

    def __init__(self, job: Job, places: RankTable, correction: LearnedCorrection) -> None:
        self._job, self._places, self.correction = job, places, correction
        self._cells = int(places.peers.max() + 1) * job.chunks * 2
        self.regression = CellRegression(
            self._cells,
            prior=np.array([0.0, 1.0, 1.0]),
            ridge=np.array([0.04, 0.0016, 0.0016]),
            non_negative=np.ones(TERMS, bool),
            guessed=job.model is None,
        )
        self._levels = RankLevels(places.peers)
        self._unlike = UnlikeWork(places.peers)

    def residuals(self, batch: TelemetryBatch, index: Ints, trusted: Bools) -> StepResidual:
        """Scores one step of compute records, then learns from the ranks in `trusted`."""
        backward = batch.op == Op.BACKWARD
        terms = work_terms(self._job, self._places, batch, index)
        features = features_of(self._places, batch, index)
        applied, unsure = self.correction.of(features)
        times = np.maximum(batch.compute_ms, 1e-6) * np.exp(-applied)
        chunk = np.minimum(batch.chunk, self._job.chunks - 1)
        cell = (self._places.peers[index] * self._job.chunks + chunk) * 2 + backward
        if not self._levels.steps:
            self._start(cell, terms, times, index, trusted)
        self.regression.open(cell, terms, times)
        expected, doubt = self.regression.predict(cell, terms)
        doubt = np.hypot(doubt, unsure / max(self._levels.spread, 1e-4))
        ratio = np.log(times / expected)
        result = self._score(ratio, doubt, index, expected, backward)
        own, left, scatter = self._apart(ratio, index, result)
        usable = trusted[index] & (np.abs(left) < 6.0 * scatter)
        usual = trusted[index] & (np.abs(left) < 4.0 * scatter)
        self._learn(cell, terms, times, index, own, usual)
        self._levels.observe(result.value, trusted)
        self.correction.observe(features, left + applied, applied, usable)
        misfit = self._unlike.observe(batch, index, trusted)
        return replace(result, misfit=misfit, expected_ms=expected * np.exp(applied))

    def _apart(
        self, ratio: Floats, index: Ints, result: StepResidual
    ) -> tuple[Floats, Floats, float]:
        """Level of each rank, residuals of the records without it, and their scatter."""
        microbatches = result.records / (2.0 * self._job.chunks)
        own = self._levels.of(result.value, microbatches)
        left = ratio - own[index]
        return own, left, max(self._levels.spread, self._levels.scatter(left, microbatches), 1e-4)

    def _score(
        self, residual: Floats, doubt: Floats, index: Ints, expected: Floats, backward: Bools
    ) -> StepResidual:
        size, weights = self._places.size, 1.0 / (1.0 + doubt**2)
        value, left, records, by_pass = self._levels.locate(
            residual, expected, index, backward, weights
        )
        spread = max(self._levels.spread, 1e-4)
        error = doubt * spread
        shared = np.bincount(index, weights * error, size) / np.maximum(
            np.bincount(index, weights, size), 1e-9
        )
        total = np.sqrt(spread**2 / np.maximum(left, 1e-9) + shared**2)
        whole = StepResidual(value, total, records, spread)
        # The spread of a rank's records lies half in each kind, and is theirs until steps tell.
        noise = 2.0 * spread**2 / np.maximum(0.5 * records, 1.0)
        error = np.hypot(shared, np.sqrt(noise) if self._levels.steps < _ENOUGH_STEPS else 0.0)
        return replace(whole, passes=[replace(whole, value=one, error=error) for one in by_pass])

    def _start(self, cell: Ints, terms: Floats, times: Floats, index: Ints, trusted: Bools) -> None:
        """Fits the first step, with each rank's difference from its class removed."""
        self.regression.open(cell, terms, times)
        for _ in range(3):
            expected, doubt = self.regression.predict(cell, terms)
            ratio = np.log(times / expected)
            result = self._score(ratio, 0.0 * doubt, index, expected, cell % 2 == 1)
            own, left, scatter = self._apart(ratio, index, result)
            self.regression.forget()
            usual = trusted[index] & (np.abs(left) < 4.0 * scatter)
            self._learn(cell, terms, times, index, own, usual)
        self.regression.forget()

    def _learn(
        self, cell: Ints, terms: Floats, times: Floats, index: Ints, own: Floats, usual: Bools
    ) -> None:
        sound = np.bincount(index[usual], minlength=own.size) > 0
        apart = self._levels.beyond_class(own, sound)
        self.regression.learn(cell, terms, times * np.exp(-apart[index]), usual.astype(np.float64))

    def start_from(self, older: LengthModel) -> None:
        """Starts from the fit on an older layout: cost per FLOP and per layer, by op."""
        for op in range(2):
            known = [c for c in range(op, older._cells, 2) if older.regression.ready[c]]
            if not known:
                continue
            for cell in range(op, self._cells, 2):
                self.regression.start_from(cell, older.regression, known)
        self._levels.spread = older._levels.spread
