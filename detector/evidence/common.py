"""What all peers have in common in a step, which is no matter of any of them.

As a rule that is the median of what they differ from their own past by: a map or a class of
records has changed. Where most of them have moved and some have stayed exactly where they were, it
is not: what is common to all would have moved those too.
"""

from __future__ import annotations

import numpy as np

from ..base.arrays import Bools, Floats, Ints
from ..base.robust import group_median

_NEAR = 4.0
"""Standard deviations within which a rank has stayed."""
_GAP = 3.0
"""Standard deviations between those that stayed and those that moved."""
_LEAST_STEPS = 3
"""Steps of a past that can be stayed at."""
_STAYERS = 0.2
"""Share of a class that stayed from which the movers are slow or fast by themselves; the word of
fewer clears them alone."""
MAJORITY = 3


def common_change(
    change: Floats, classes: Ints, trusted: Bools, past: Floats, noise: Floats
) -> Floats:
    """What is to be taken off each rank's residual.

    change   of every rank against its past (log), NaN where it has no record
    trusted  ranks that are not under suspicion; a class without any is judged by all of its ranks
    past     steps that each rank's past rests on; noise: standard deviation of its residual

    Classes of fewer than three take the median over the job.
    """
    seen = np.isfinite(change)
    size = int(classes.max()) + 1
    counts = np.bincount(classes[seen], minlength=size)
    sound = np.bincount(classes[seen & trusted], minlength=size) > 0
    use = seen & (trusted | ~sound[classes])
    middle = group_median(change[use], classes[use], size)
    many = counts >= MAJORITY
    result: Floats = np.where(many[classes], middle[classes], float(np.median(change[use])))
    usual = float(np.median(noise))
    moved = many & (np.abs(np.nan_to_num(middle)) > _NEAR * usual)
    if not moved.any() or not usual:
        return result
    way = np.abs(np.nan_to_num(change))
    near = seen & (way <= _NEAR * noise)
    unknown = np.bincount(classes[seen & (past < _LEAST_STEPS)], minlength=size)
    stayed = np.bincount(classes[near], minlength=size)
    nearest, least = np.zeros(size), np.full(size, np.inf)
    np.maximum.at(nearest, classes[near], way[near])
    np.minimum.at(least, classes[seen & ~near], way[seen & ~near])
    clear = moved & (stayed > 0) & (unknown == 0) & (least - nearest > _GAP * usual)
    by_themselves = clear & (stayed >= _STAYERS * counts)
    result[by_themselves[classes] | (clear[classes] & near)] = 0.0
    return result
