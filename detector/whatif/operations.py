"""Recorded operations of a job, as columns and as a dense grid.

The kinds of operation and the fields are those of the traces that were published with
"Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]
Floats = NDArray[np.floating]


class OpKind(IntEnum):
    """Kind of an operation. Ties in the recorded order are broken by this order."""

    BACKWARD = 0
    FORWARD = 1
    FORWARD_SEND = 2
    FORWARD_RECV = 3
    BACKWARD_SEND = 4
    BACKWARD_RECV = 5
    PARAMS_GATHER = 6
    GRADS_SCATTER = 7
    GRADS_REDUCE = 8
    EMBEDDING_REDUCE = 9
    NORM_REDUCE = 10
    CLIP = 11
    OPTIMIZER = 12
    GC = 13


LABELS = {
    OpKind.FORWARD: "forward-compute",
    OpKind.BACKWARD: "backward-compute",
    OpKind.FORWARD_SEND: "forward-send",
    OpKind.FORWARD_RECV: "forward-recv",
    OpKind.BACKWARD_SEND: "backward-send",
    OpKind.BACKWARD_RECV: "backward-recv",
    OpKind.PARAMS_GATHER: "params-all-gather",
    OpKind.GRADS_SCATTER: "grads-reduce-scatter",
    OpKind.GRADS_REDUCE: "separate-grads-all-reduce",
    OpKind.EMBEDDING_REDUCE: "embedding-grads-all-reduce",
    OpKind.NORM_REDUCE: "layernorm-grads-all-reduce",
    OpKind.CLIP: "optimizer-clip-main-grad",
    OpKind.OPTIMIZER: "optimizer",
    OpKind.GC: "gc",
}
COMPUTE = (OpKind.FORWARD, OpKind.BACKWARD)
P2P = (OpKind.FORWARD_SEND, OpKind.FORWARD_RECV, OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV)
SYNCED = (OpKind.PARAMS_GATHER, OpKind.GRADS_SCATTER, OpKind.GRADS_REDUCE, OpKind.CLIP)
COLLECTIVE = (*SYNCED, OpKind.EMBEDDING_REDUCE, OpKind.NORM_REDUCE)


@dataclass(frozen=True, kw_only=True, eq=False)
class OpTable:
    """Equally long columns, one row per recorded operation.

    dp, stage, rank   where it ran: replica, pipeline stage, global rank
    step              training step
    kind              `OpKind` codes
    start_s           start; its origin is arbitrary but common to the ranks of a step
    duration_s        how long it took, waiting included
    seq               order among the operations of its kind in a step of a rank, from 0
    chunk             model chunk within the stage; -1 where it belongs to none
    global_chunk      model chunk within the model; -1 where it belongs to none
    microbatch        microbatch; -1 where it belongs to none
    """

    dp: Ints
    stage: Ints
    rank: Ints
    step: Ints
    kind: Ints
    start_s: Floats
    duration_s: Floats
    seq: Ints
    chunk: Ints
    global_chunk: Ints
    microbatch: Ints

    def __len__(self) -> int:
        return int(self.rank.size)

    def select(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> OpTable:
        """The rows that a mask or an index array picks."""
        return OpTable(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True, kw_only=True, eq=False)
class OpGrid:
    """The operations of an `OpTable` on the grid [operation N, replica D, step T].

    An operation is one (stage, kind, seq). `start_s` and `duration_s` are NaN where nothing was
    recorded; `start_s` counts from the first start of the step. `rank` [D, S] is -1 where no rank
    was recorded; `cell` gives the flat cell of every row of the table.
    """

    steps: Ints
    replicas: Ints
    rank: Ints
    kind: Ints
    stage: Ints
    seq: Ints
    chunk: Ints
    global_chunk: Ints
    microbatch: Ints
    start_s: Floats
    duration_s: Floats
    cell: Ints

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return int(self.rank.shape[1])

    def of_kind(self, *kinds: OpKind) -> NDArray[np.bool_]:
        """Mask [N] of the operations of these kinds."""
        return np.isin(self.kind, kinds)

    @classmethod
    def of(cls, ops: OpTable) -> OpGrid:
        """The grid of a table. A cell that was recorded twice keeps the longer operation."""
        keys, op = _index(_keys(ops))
        first = np.full(keys.size, op.size, np.intp)
        np.minimum.at(first, op, np.arange(op.size, dtype=np.int32))
        replicas, dp = _index(ops.dp)
        rank = np.full((replicas.size, int(ops.stage.max()) + 1), -1, np.int64)
        rank[dp[::-1], ops.stage[::-1]] = ops.rank[::-1]  # the first row of a place wins
        steps, step = _index(ops.step)
        shape = (keys.size, replicas.size, steps.size)
        cell: Ints = op.astype(_width(float(np.prod(shape, dtype=float))))
        for position, size in ((dp, replicas.size), (step, steps.size)):
            cell *= size
            cell += position
        del op, dp
        origin = np.full(steps.size, np.inf)
        np.minimum.at(origin, step, ops.start_s)
        start = origin[step]
        np.subtract(ops.start_s, start, out=start)
        del step
        start_s, duration_s = _scatter(cell, start, ops.duration_s, shape)
        return cls(
            steps=steps,
            replicas=replicas,
            rank=rank,
            kind=ops.kind[first],
            stage=ops.stage[first],
            seq=ops.seq[first],
            chunk=ops.chunk[first],
            global_chunk=ops.global_chunk[first],
            microbatch=ops.microbatch[first],
            start_s=start_s,
            duration_s=duration_s,
            cell=cell,
        )


def _keys(ops: OpTable) -> Ints:
    """One number for every (stage, kind, seq), in that order."""
    width = int(ops.seq.max()) + 1
    most = (int(ops.stage.max()) + 1) * len(OpKind) * width
    key: Ints = ops.stage.astype(_width(most))
    key *= len(OpKind)
    key += ops.kind
    key *= width
    key += ops.seq
    return key


def _width(most: float) -> type[np.int32] | type[np.int64]:
    """Whole numbers wide enough for all up to `most`."""
    return np.int64 if most > 2**31 - 1 else np.int32


def _index(values: Ints) -> tuple[Ints, Ints]:
    """The distinct values in ascending order, and the position of every value among them."""
    low, high = int(values.min()), int(values.max())
    if high - low > 1 << 22:
        distinct = np.unique(values)
        return distinct, np.searchsorted(distinct, values).astype(np.int32)
    there = np.zeros(high - low + 1, bool)
    there[values - low] = True
    position = (np.cumsum(there) - 1).astype(np.int32)
    return np.flatnonzero(there) + low, position[values - low]


def _scatter(
    cell: Ints, start: Floats, duration: Floats, shape: tuple[int, ...]
) -> tuple[Floats, Floats]:
    """Start and duration on a grid: of several rows in a cell, those of the longest one."""
    starts, durations = np.full(shape, np.nan), np.full(shape, np.nan)
    durations.reshape(-1)[cell] = duration
    if np.count_nonzero(~np.isnan(durations)) < cell.size:
        order = np.argsort(duration, kind="stable")  # the last of a cell stays
        cell, start, duration = cell[order], start[order], duration[order]
        durations.reshape(-1)[cell] = duration
    starts.reshape(-1)[cell] = start
    return starts, durations
