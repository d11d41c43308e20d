"""Digests of the passes of each rank in a step, by which a step that comes again is known.

The digest of a rank is the sum of the marks of its passes, hashes of 32 bits of what they are and
how long they took: the same in whatever order and parts they come.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import TelemetryBatch

from ..arrays import ODD, Bools, Ints

Digests = NDArray[np.uint32]
"""Of each rank; 0 without a pass."""


def record_marks(batch: TelemetryBatch, passes: Bools) -> Ints:
    """Marks of the records that are passes; 0 for the others."""
    key = (batch.microbatch.astype(np.int64) << 20) | (batch.chunk.astype(np.int64) << 4) | batch.op
    mixed = (key.view(np.uint64) * ODD) ^ batch.compute_ms.view(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * ODD
    return np.where(passes, (mixed >> np.uint64(32)).astype(np.int64), 0)


def digests(marks: Ints, index: Ints, size: int) -> Digests:
    """Digests of `size` ranks from the marks of records and the positions of their ranks."""
    total = np.bincount(index, marks, size)  # exact for two million records of a rank
    return (total.astype(np.int64) & 0xFFFF_FFFF).astype(np.uint32)
