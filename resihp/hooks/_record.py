"""One timed piece of work of a rank, as the sender encodes it."""

from __future__ import annotations

from typing import NamedTuple

RecordFields = tuple[int, int, int, int, int, float, float | None, int, int, int, int, int, float]
"""Fields of a `Record` in their order: a plain tuple takes the training thread half the time."""


class Record(NamedTuple):
    """One row of a `TelemetryBatch`, except its rank; the fields are described there."""

    plan_version: int
    step: int
    microbatch: int
    chunk: int
    op: int
    compute_ms: float
    wait_ms: float | None
    tokens: int
    sequences: int
    sum_sq_len: int
    max_len: int
    peer: int
    start_ms: float
