"""Exact spans of many pipelines at once, fast enough to sit inside the search."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resihp.contracts import Schedule
from resihp.pipeline.orders import most_ahead, most_in_flight
from resihp.pipeline.replay import WEIGHT_PART

Floats = NDArray[np.float64]


def pipeline_spans(
    forward: ArrayLike,
    backward: ArrayLike,
    microbatches: ArrayLike,
    *,
    p2p: float = 0.0,
    max_in_flight: int | None = None,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> Floats:
    """Span of each pipeline, the same as `resihp.pipeline.replay` gives.

    forward, backward  [pipeline, stage], time of one microbatch
    microbatches       [pipeline]
    schedule           any but the interleaved one

    Round k runs forward k and the backward that follows it in every stage. Forwards of a round
    form a chain over the stages, which is a running maximum after the stages' own times are
    subtracted; backwards wait for those of the round before. So a round costs a few array
    operations, whatever the number of pipelines. Where the backward is split, it is the half for
    the inputs that others wait for; the other one follows in the same round.
    """
    f, b = np.asarray(forward, float), np.asarray(backward, float)
    counts = np.asarray(microbatches)[:, None]
    stages = f.shape[1]
    weight = b * (WEIGHT_PART if schedule is Schedule.ZERO_BUBBLE else 0.0)
    b = b - weight
    owed = np.array(most_ahead(schedule, stages, max_in_flight))
    put_off = np.array(most_in_flight(schedule, stages, max_in_flight)) - owed
    ahead = owed - 1
    lag = ahead - np.append(ahead[1:], 0)  # rounds since the stage behind ran the same backward
    same, long_ago = np.flatnonzero(lag[:-1] == 0)[::-1], np.flatnonzero(lag[:-1] == 2)
    reach = np.cumsum(f, axis=1) + p2p * np.arange(stages)
    before = reach - f
    free = np.zeros_like(f)  # end of the last pass of each stage
    returned = np.zeros_like(f)  # end of its last backward
    earlier = returned.copy()  # end of the one before
    for round_ in range(int(counts.max(initial=0)) + int(ahead[0])):
        ends = reach + np.maximum.accumulate(free - before, axis=1)
        np.copyto(free, ends, where=round_ < counts)
        turn = round_ - ahead
        runs = (turn >= 0) & (turn < counts)
        arrival = returned + p2p
        arrival[:, :-1] = arrival[:, 1:]
        arrival[:, -1] = 0.0
        if long_ago.size:
            arrival[:, long_ago] = earlier[:, long_ago + 1] + p2p
            earlier = returned.copy()
        ends = np.maximum(free, arrival) + b
        for stage in same:
            ends[:, stage] = np.maximum(free[:, stage], ends[:, stage + 1] + p2p) + b[:, stage]
        np.copyto(returned, ends, where=runs)
        if schedule is Schedule.ZERO_BUBBLE:
            ends += weight * (turn >= put_off)
        np.copyto(free, ends, where=runs)
    free += weight * np.minimum(put_off, counts)
    return np.asarray(free.max(axis=1))
