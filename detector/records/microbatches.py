"""Numbers of microbatches made dense, so that arrays over them stay as small as a step is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..base.arrays import Ints


def numbered(parts: Ints, microbatch: NDArray[np.integer], usual: int) -> Ints:
    """The microbatches of each part (a step of a replica) numbered from 0 in their order.

    Some trainers count them through the whole job, and a broken record may hold any number.
    Where all are below `usual`, how many a replica computes in a step, they stay as they are;
    -1 (of no microbatch) always does.

    >>> numbered(np.array([0, 0, 1, 1, 1]), np.array([70, 71, 72, -1, 70]), 2).tolist()
    [0, 1, 1, -1, 0]
    """
    number: Ints = microbatch.astype(np.int64)
    some = number >= 0
    if int(number.max(initial=-1)) < usual:
        return number
    key = (parts[some] << 32) | number[some]
    distinct, at = np.unique(key, return_inverse=True)
    part = distinct >> 32
    position = np.arange(distinct.size) - np.searchsorted(part, part)
    number[some] = position[at.reshape(-1)]
    return number
