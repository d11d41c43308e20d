"""What a record should cost by arithmetic: FLOPs from the lengths and the shape of the model."""

from __future__ import annotations

import numpy as np

from resihp.contracts import Job, ModelShape, Op, TelemetryBatch

from ..base.arrays import Bools, Floats, Ints
from ..base.places import Places

TERMS = 3
"""Terms of the analytic model: fixed, linear in tokens, linear in squared lengths."""

_GUESSED_HIDDEN = 4096


def knows_lengths(batch: TelemetryBatch) -> Bools:
    """Which records say how much work they held."""
    return (batch.tokens >= 0) & (batch.sum_sq_len >= 0)


def work_terms(job: Job, places: Places, batch: TelemetryBatch, index: Ints) -> Floats:
    """Work of each record on its rank, shape (records, TERMS).

    Column 0 is the fixed part, per layer held: launches and reading the weights, paid however
    little work there is, and at short lengths the memory-bound floor. Column 1 counts the FLOPs
    of matrices, 2 per parameter and token; on the last stage with the head. Column 2 counts those
    of causal attention, `2 * hidden * sum(len**2)` per layer. Backward is twice the forward, three
    times with recomputation. FLOPs are in 1e12.
    """
    tokens = np.maximum(batch.tokens, 0).astype(np.float64)
    squares = np.maximum(batch.sum_sq_len, 0).astype(np.float64)
    per_token, per_square, head = _flops(job.model)
    layers = places.layers[index] / job.chunks
    width = places.share[index]
    passes = np.where(batch.op == Op.BACKWARD, 3.0 if job.recompute else 2.0, 1.0)
    final = places.last[index] * (batch.chunk == job.chunks - 1)
    matrices = tokens * (layers * per_token + final * head) * width * passes * 1e-12
    attention = squares * layers * per_square * width * passes * 1e-12
    return np.stack([np.maximum(layers, 0.1), matrices, attention], axis=1)


def features_of(places: Places, batch: TelemetryBatch, index: Ints) -> Floats:
    """Feature matrix of records, columns as in `detector.predictor.FEATURES`."""
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


def _flops(model: ModelShape | None) -> tuple[float, float, float]:
    """FLOPs of one layer per token and per squared length, and of the head per token."""
    if model is None:  # only a starting point: the ratio is learned
        return 24.0 * _GUESSED_HIDDEN**2, 2.0 * _GUESSED_HIDDEN, 0.0
    inner = model.heads * model.head_dim
    return 2.0 * model.layer_params, 2.0 * inner, 2.0 * model.embedding_params
