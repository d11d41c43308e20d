"""What transfers and collectives take, without the waiting for others that was recorded."""

from __future__ import annotations

import numpy as np

from .dependencies import Dependencies
from .ops import Floats, Recording

_LATE_S = 1e-2
"""A transfer that ends before its last rank started by this did not wait for it."""


def transfer_seconds(recording: Recording, found: Dependencies) -> Floats:
    """Durations [N, D, T] with the waiting for others taken out of transfers and collectives.

    A transfer lasts from the last start of its group to its own end. A slightly negative value is
    clock skew and stays; one beyond 10 ms means the sender did not wait, and counts as 0. NaN
    where one of the ranks was not recorded in that step, although it was in others or in other
    replicas; 0 where the other end of a transfer was recorded in no replica.
    """
    own = recording.duration_s.copy()
    start, end = recording.start_s, recording.start_s + recording.duration_s
    missing = np.isnan(start)
    never = np.asarray(missing.all(axis=2, keepdims=True))
    lost = missing & ~never
    alone = missing & ~never.all(axis=1, keepdims=True)
    synced = set(found.synced)
    for index, group in enumerate(found.groups):
        latest = np.fmax.reduce(start[group], axis=0)
        gone = (lost if index in synced else alone)[group].any(axis=0)
        if index in synced:
            latest = np.fmax.reduce(latest, axis=0, keepdims=True)
            gone = gone.any(axis=0, keepdims=True)
        own[group] = np.where(gone, np.nan, end[group] - latest)
    own[found.lone] = 0.0
    waits = found.waits()
    own[waits] = np.where(own[waits] <= -_LATE_S, 0.0, own[waits])
    return own
