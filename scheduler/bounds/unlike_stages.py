"""The bound over whole layers for pipelines whose stages differ: the odd ones at each count."""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Schedule

from .in_flight import Floats
from .whole_layers import Ints, Stages, whole_layers

_WAYS = 24  # numbers of layers of odd stages that are tried for one pipeline
_AT_ONCE = 256  # which bounds the memory


def unlike_layers(
    stages: Stages,
    layers: int,
    microbatches: Ints,
    within_ms: float,
    *,
    p2p: float = 0.0,
    max_in_flight: int | None = None,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> tuple[Floats, Ints]:
    """As `whole_layers`, never lower, and the layers that attain it; [pipeline].

    The dynamic program takes for every stage the least that the layers before it can take, and the
    least that those behind it can, which no one way to spread them need attain where stages differ.
    With the layers of the odd stages given the rest are alike, and it does. So it is solved for
    every number of layers of the oddest stages, as far as these are not too many, and the least
    solution is the bound.
    """
    limited = stages.within(within_ms, microbatches, layers)
    source, least, most = _ways(limited)
    ends = np.full(len(source), np.inf)
    counts = np.ones(least.shape, np.int64)
    for start in range(0, len(source), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        some = limited.pick(source[part])
        ends[part], counts[part] = whole_layers(
            Stages(some.forward, some.backward, some.extra, most[part], least[part]),
            layers,
            microbatches[source[part]],
            within_ms,
            p2p=p2p,
            max_in_flight=max_in_flight,
            schedule=schedule,
        )
    order = np.lexsort((ends, source))
    first = order[np.unique(source[order], return_index=True)[1]]
    return ends[first], counts[first]


def _ways(stages: Stages) -> tuple[NDArray[np.intp], Ints, Ints]:
    """Pipelines with the layers of their oddest stages given: which one, least and most layers."""
    source, least, most = [], [], []
    each = stages.forward + stages.backward
    for row in range(len(each)):
        usual = np.median(each[row])
        odd, ways = [], 1
        for stage in np.argsort(-np.abs(np.log(each[row] / usual)), kind="stable").tolist():
            count = max(1, int(stages.most[row, stage]))
            if each[row, stage] == usual or ways * count > _WAYS:
                break
            odd.append(stage)
            ways *= count
        for given in product(*(range(1, max(1, int(stages.most[row, s])) + 1) for s in odd)):
            source.append(row)
            least.append(np.ones(each.shape[1], np.int64))
            most.append(stages.most[row].copy())
            least[-1][odd], most[-1][odd] = given, given
    return np.array(source, np.intp), np.array(least), np.array(most)
