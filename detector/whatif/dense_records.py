"""Microbatch records of some steps as dense arrays over stages, replicas, steps, microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Job, Layout, Op, Schedule, TelemetryBatch

from ..arrays import positions, quantile
from ..steps.assembler import numbered
from .operations import Floats, Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class DenseRecords:
    """Times in milliseconds; NaN where nothing was recorded.

    Axes: direction 2 (forward, backward), virtual stage C (chunk by chunk), stage S, replica D,
    step T, microbatch M. A tensor-parallel group takes as long as its slowest rank.

    passes      [2, C, D, T, M] forward and backward
    work        [2, D, T, M] tokens and sum of squared lengths; None where they are not known
    mates       as `passes`, of the middle rank of each group for the largest share of a member;
                None where the groups' timers do not differ, each lasting as long as the slowest
                rank's
    p2p         [S, D, T, M] a transfer over the link from a stage to the next one
    collective, optimizer, data
                [S, D, T] all of a step; `data` without what `microbatch_data` holds
    microbatch_data
                [C, D, T, M] loading of one microbatch
    quotas      [D] microbatches per step
    steps       [T] numbers of the steps
    absent      [D, T, M] microbatches beyond the last one that a replica ran in a step; one without
                records in it is assumed to have run as many as it usually does
    """

    passes: Floats
    work: Floats | None
    mates: NDArray[np.float64] | None
    p2p: Floats
    collective: Floats
    optimizer: Floats
    data: Floats
    microbatch_data: Floats
    quotas: tuple[int, ...]
    steps: Ints
    absent: NDArray[np.bool_]

    @classmethod
    def of(cls, job: Job, layout: Layout, batches: Iterable[TelemetryBatch]) -> DenseRecords | None:
        """The records of the newest plan version; None if there is no compute record.

        A broken rank may have sent thousands of microbatches of a step. Those beyond the largest
        quota and four times as many as ranks usually have are left out where the arrays would have
        more than a million cells.
        """
        rows = _PlacedRecords.of(layout, _newest(batches), job.chunks, max(job.quotas))
        if not np.isin(rows.batch.op[rows.batch.microbatch >= 0], _COMPUTE).any():
            return None
        stages, dp, steps = layout.pp, layout.dp, rows.steps.size
        count = int(rows.at["microbatch"].max()) + 1
        place = (stages * job.chunks, dp, steps, count)
        split = job.schedule is Schedule.ZERO_BUBBLE
        passes = [
            rows.fill(place, op, "chunk", "dp", "step", "microbatch", add=split) for op in _COMPUTE
        ]
        known = np.isfinite(passes).any(axis=(0, 1))
        ran = np.where(known, np.arange(1, count + 1), 0).max(axis=2)
        seen = ran.max(axis=1).tolist()
        step = (stages, dp, steps)
        return cls(
            passes=np.stack(passes),
            work=rows.work((dp, steps, count)),
            mates=None if split else rows.mates(place, passes),
            p2p=rows.links((stages, dp, steps, count)),
            collective=rows.fill(step, Op.COLLECTIVE, "stage", "dp", "step", add=True, all_=True),
            optimizer=rows.fill(step, Op.OPTIMIZER, "stage", "dp", "step", add=True, all_=True),
            data=rows.fill(step, Op.DATA, "stage", "dp", "step", add=True),
            microbatch_data=rows.fill(
                place, Op.DATA, "chunk", "dp", "step", "microbatch", add=True
            ),
            quotas=tuple(
                quota or (job.quotas[d] if d < len(job.quotas) else 0)
                for d, quota in enumerate(seen)
            ),
            steps=rows.steps,
            absent=(np.arange(count) >= ran[..., None]) & (ran[..., None] > 0),
        )


_COMPUTE = (Op.FORWARD, Op.BACKWARD)
_SPARE, _FEW_CELLS = 4, 2**20
"""Microbatches of a step as a multiple of what ranks usually have, and cells of an array, up to
which none is left out."""
_SAME = 1e-4
"""Least relative difference of timers within a group that are each rank's own."""


@dataclass(frozen=True, eq=False)
class _PlacedRecords:
    """Records with their index along every axis by name in `at`."""

    batch: TelemetryBatch
    at: dict[str, Ints]
    steps: Ints  # their numbers
    slot: Ints  # of the rank within its tensor-parallel group
    slots: int
    wider: Floats  # largest share of the rank's group over its own
    peer_stage: Ints

    @classmethod
    def of(cls, layout: Layout, batch: TelemetryBatch, chunks: int, quota: int) -> _PlacedRecords:
        places = np.array([(p.rank, p.dp, p.pp, p.tp) for p in layout.places()]).T
        shares = [s.shares for replica in layout.replicas for s in replica.stages]
        wider = np.concatenate([max(part) / np.array(part, np.float64) for part in shares])
        order = np.argsort(places[0])
        places, wider = places[:, order], wider[order]
        batch = batch.select(positions(places[0], batch.rank) >= 0)
        found = positions(places[0], batch.rank)
        steps, step = np.unique(batch.step, return_inverse=True)
        step = step.reshape(-1)
        number = numbered(step * layout.dp + places[1][found], batch.microbatch, quota)
        slots = int(places[3].max()) + 1
        few = _FEW_CELLS // (2 * slots * layout.pp * chunks * layout.dp * max(steps.size, 1))
        if int(number.max(initial=-1)) >= max(quota, few):
            some = np.isin(batch.op, _COMPUTE) & (number >= 0)
            own = step[some] * places.shape[1] + found[some]
            rows = number < max(quota, few, _SPARE * _usual_count(own, number[some]))
            batch, found, step, number = batch.select(rows), found[rows], step[rows], number[rows]
        _, dp, pp, tp = places[:, found]
        peer = positions(places[0], batch.peer)
        at = {
            "dp": dp,
            "stage": pp,
            "chunk": batch.chunk.astype(np.int64) * layout.pp + pp,
            "step": step,
            "microbatch": number,
        }
        beyond = np.where(peer >= 0, places[2][peer], -1)
        return cls(batch, at, steps, tp, slots, wider[found], beyond)

    def fill(
        self, shape: tuple[int, ...], op: Op, *axes: str, add: bool = False, all_: bool = False
    ) -> NDArray[np.float64]:
        """Times of one op on a grid: the slowest rank of each group.

        Several records of a rank in one cell add up, or else the longest counts. Records of a
        microbatch go where `axes` has microbatches, the others elsewhere; with `all_`, all do.
        """
        rows = self.batch.op == op
        if not all_:
            rows = rows & ((self.batch.microbatch >= 0) == ("microbatch" in axes))
        return np.asarray(np.fmax.reduce(self._slots(rows, shape, *axes, add=add), axis=0))

    def _slots(
        self,
        rows: NDArray[np.bool_],
        shape: tuple[int, ...],
        *axes: str,
        add: bool = False,
        times: Floats | None = None,
    ) -> NDArray[np.float64]:
        """Times of some rows on a grid, for each place in a group; those outside are left out."""
        times = self.batch.compute_ms if times is None else times
        inside = rows.copy()
        for axis, size in zip(axes, shape, strict=True):
            inside &= self.at[axis] < size
        grid = np.full((self.slots, *shape), np.nan)
        where = (self.slot[inside], *(self.at[axis][inside] for axis in axes))
        if add:
            grid[where] = 0.0
            np.add.at(grid, where, times[inside])
        else:
            np.fmax.at(grid, where, times[inside])
        return grid

    def mates(
        self, shape: tuple[int, ...], slowest: list[NDArray[np.float64]]
    ) -> NDArray[np.float64] | None:
        """Passes of the middle rank of each group (the lower of two), as if it held the largest
        share; None where they do not differ from those of the slowest."""
        inner = self.batch.microbatch >= 0
        axes = ("chunk", "dp", "step", "microbatch")
        times = self.batch.compute_ms * self.wider
        grids = [
            self._slots(inner & (self.batch.op == op), shape, *axes, times=times) for op in _COMPUTE
        ]
        middle = np.stack([quantile(grid, 0.5, axis=0)[0] for grid in grids])
        apart = np.stack(slowest) > (1.0 + _SAME) * middle
        return middle if np.count_nonzero(apart) > 0.25 * np.isfinite(middle).sum() else None

    def work(self, shape: tuple[int, ...]) -> NDArray[np.float64] | None:
        """Tokens and sum of squared lengths of every microbatch; None unless most are known."""
        rows = (self.batch.microbatch >= 0) & np.isin(self.batch.op, _COMPUTE)
        known = rows & (self.batch.tokens >= 0) & (self.batch.sum_sq_len >= 0)
        if not known.any() or known.sum() < 0.9 * rows.sum():
            return None
        work = np.full((2, *shape), np.nan)
        index = tuple(self.at[axis][known] for axis in ("dp", "step", "microbatch"))
        work[0][index] = self.batch.tokens[known]
        work[1][index] = self.batch.sum_sq_len[known]
        return work

    def links(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Mean transfer over each link; one without a microbatch counts for all of them."""
        stages = shape[0]
        rows = self.batch.op == Op.P2P
        stage, peer = self.at["stage"][rows], self.peer_stage[rows]
        peer = np.where(peer >= 0, peer, np.where(stage + 1 < stages, stage + 1, stage - 1))
        wraps = np.abs(stage - peer) == stages - 1
        link = np.where(wraps & (stages > 2), stages - 1, np.minimum(stage, peer))
        dp, step, mb = (self.at[axis][rows] for axis in ("dp", "step", "microbatch"))
        times = self.batch.compute_ms[rows]
        one = _means(shape, times, (link, dp, step, mb), mb >= 0)
        every = _means(shape[:3], times, (link, dp, step), mb < 0)
        return np.where(np.isnan(one), every[..., None], one)


def _usual_count(owner: Ints, microbatch: Ints) -> int:
    """Median number of different microbatches of an owner; 0 where there is none."""
    _, counts = np.unique(np.unique((owner << 32) | microbatch) >> 32, return_counts=True)
    return int(np.median(counts)) if counts.size else 0


def _means(
    shape: tuple[int, ...], times: Floats, index: tuple[Ints, ...], rows: NDArray[np.bool_]
) -> NDArray[np.float64]:
    inside = rows.copy()
    for axis, size in zip(index, shape, strict=True):
        inside &= (axis >= 0) & (axis < size)
    cell = np.ravel_multi_index(tuple(axis[inside] for axis in index), shape)
    size = int(np.prod(shape))
    count = np.bincount(cell, minlength=size)
    total = np.bincount(cell, times[inside], size)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).reshape(shape)


def _newest(batches: Iterable[TelemetryBatch]) -> TelemetryBatch:
    parts = list(batches)
    newest = max((part.plan_version for part in parts), default=0)
    return TelemetryBatch.concat([part for part in parts if part.plan_version == newest])
