"""Made-up recordings of jobs whose troubles are known, in the form of the what-if traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from detector.whatif.operations import LABELS, OpKind, OpTable
from resihp.contracts import Op, Schedule
from resihp.pipeline.graph import Graph
from resihp.pipeline.orders import stage_order

_TAIL = (OpKind.GC, OpKind.NORM_REDUCE, OpKind.EMBEDDING_REDUCE, OpKind.GRADS_SCATTER, OpKind.CLIP)
_TYPICAL_S = {
    OpKind.GC: 0.0,
    OpKind.NORM_REDUCE: 4e-5,
    OpKind.EMBEDDING_REDUCE: 5e-3,
    OpKind.GRADS_SCATTER: 0.02,
    OpKind.PARAMS_GATHER: 0.01,
    OpKind.CLIP: 2e-3,
    OpKind.OPTIMIZER: 0.01,
}
_SEND = {Op.FORWARD: OpKind.FORWARD_SEND, Op.BACKWARD: OpKind.BACKWARD_SEND}
_RECEIVE = {Op.FORWARD: OpKind.FORWARD_RECV, Op.BACKWARD: OpKind.BACKWARD_RECV}


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A fault of one rank: `factor` on its times, or `extra_s`, from a step on.

    replica, stage  where; None means everywhere
    kinds           operations that it concerns
    every           only every so many steps
    """

    kinds: tuple[OpKind, ...] = (OpKind.FORWARD, OpKind.BACKWARD)
    replica: int | None = None
    stage: int | None = None
    factor: float = 1.0
    extra_s: float = 0.0
    since: int = 0
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A job with pipeline and data parallelism, one recorded rank per stage and replica.

    chunks        model chunks per stage; more than 1 is run interleaved, else 1F1B
    work_spread   spread (log) of the work of a microbatch
    noise         spread (log) of single operations
    stage_weight  how heavy each stage is; empty means all alike
    """

    dp: int = 4
    pp: int = 4
    microbatches: int = 8
    chunks: int = 1
    steps: int = 16
    forward_s: float = 0.05
    work_spread: float = 0.0
    noise: float = 0.01
    p2p_s: float = 5e-4
    stage_weight: tuple[float, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    usual_s: Mapping[OpKind, float] = field(default_factory=dict)


def record(recipe: Recipe, seed: int = 0) -> OpTable:
    """The operations of such a job. The same recipe and seed give the same recording."""
    plan = _Plan(recipe)
    own = plan.durations(recipe, np.random.default_rng(seed))
    start, end = plan.graph.replay(own)
    shape = own.shape
    op, dp, step = (axis.reshape(-1) for axis in np.indices(shape))
    stage = plan.stage[op]
    duration = (end - start).reshape(-1)
    chunk = plan.chunk[op]
    return OpTable(
        dp=dp,
        stage=stage,
        rank=dp + recipe.dp * stage,
        step=step,
        kind=plan.kind[op],
        start_s=start.reshape(-1),
        duration_s=duration,
        seq=plan.seq[op],
        chunk=chunk,
        global_chunk=np.where(chunk >= 0, chunk * recipe.pp + stage, -1),
        microbatch=plan.microbatch[op],
    )


def write_whatif(path: str | Path, ops: OpTable) -> None:
    """Writes operations in the layout of the published what-if traces."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = pa.array([LABELS[kind] for kind in OpKind])
    columns = {
        "dp_rank": ops.dp.astype(np.int32),
        "stage": ops.stage.astype(np.int16),
        "rank": ops.rank.astype(np.int32),
        "step": ops.step.astype(np.int64),
        "optype": pa.DictionaryArray.from_arrays(pa.array(ops.kind.astype(np.int8)), names),
        "start_ts": ops.start_s,
        "duration": ops.duration_s,
        "seq_id": ops.seq.astype(np.int32),
        "mc": ops.chunk.astype(np.int16),
        "mb_id": ops.microbatch.astype(np.int32),
        "gmc": ops.global_chunk.astype(np.int16),
    }
    pq.write_table(pa.table(columns), path, compression="zstd")


class _Plan:
    """The operations of one replica and what each waits for."""

    def __init__(self, recipe: Recipe) -> None:
        self._rows: list[tuple[int, int, int, int, int]] = []  # kind, stage, seq, mb, chunk
        self._before: list[list[int]] = []
        self._count: dict[tuple[OpKind, int], int] = {}
        self._ends: dict[tuple[OpKind, int, int], int] = {}  # kind, virtual stage, microbatch
        for stage in range(recipe.pp):
            self._add_stage(recipe, stage)
        groups = self._transfers()
        synced = [len(groups) + 1]
        groups += [
            [op for op, row in enumerate(self._rows) if row[0] == kind]
            for kind in (OpKind.EMBEDDING_REDUCE, OpKind.CLIP)
        ]
        for op, row in enumerate(self._rows):
            if row[0] in (OpKind.PARAMS_GATHER, OpKind.GRADS_SCATTER):
                synced.append(len(groups))
                groups.append([op])
        self.graph = Graph(self._before, groups, synced)
        self.kind, self.stage, self.seq, self.microbatch, self.chunk = np.array(self._rows).T

    def _add(
        self, kind: OpKind, stage: int, before: list[int], mb: int = -1, chunk: int = -1
    ) -> int:
        seq = self._count.get((kind, stage), 0)
        self._count[kind, stage] = seq + 1
        self._rows.append((kind, stage, seq, mb, chunk))
        self._before.append(before)
        return len(self._rows) - 1

    def _add_stage(self, recipe: Recipe, stage: int) -> None:
        order = stage_order(
            Schedule.INTERLEAVED if recipe.chunks > 1 else Schedule.ONE_F_ONE_B,
            stage=stage,
            stages=recipe.pp,
            microbatches=recipe.microbatches,
            chunks=recipe.chunks,
        )
        last = gather = self._add(OpKind.PARAMS_GATHER, stage, [], chunk=0)
        previous = {Op.FORWARD: gather, Op.BACKWARD: gather}
        for item in order:
            virtual, away = item.chunk * recipe.pp + stage, 1 if item.op is Op.FORWARD else -1
            receive = self._transfer(recipe, _RECEIVE[item.op], virtual, -away, item.microbatch)
            kind = OpKind.FORWARD if item.op is Op.FORWARD else OpKind.BACKWARD
            if receive is not None:
                self._before[receive].append(previous[item.op])
            before = [last] if receive is None else [last, receive]
            last = self._add(kind, stage, before, item.microbatch, item.chunk)
            previous[item.op] = last
            send = self._transfer(recipe, _SEND[item.op], virtual, away, item.microbatch)
            if send is not None:
                self._before[send].append(last)
        for kind in (*_TAIL, OpKind.OPTIMIZER):
            if kind is not OpKind.EMBEDDING_REDUCE or stage in (0, recipe.pp - 1):
                chunk = 0 if kind is OpKind.GRADS_SCATTER else -1
                last = self._add(kind, stage, [last], chunk=chunk)

    def _transfer(
        self, recipe: Recipe, kind: OpKind, virtual: int, away: int, mb: int
    ) -> int | None:
        """One end of a transfer to or from the neighbour that is `away`.

        The ends of the model have no neighbour. An interleaved schedule records a transfer there
        all the same, in which nothing happens.
        """
        real = 0 <= virtual + away < recipe.pp * recipe.chunks
        if not real and recipe.chunks == 1:
            return None
        op = self._add(kind, virtual % recipe.pp, [])
        if real:
            self._ends[kind, virtual, mb] = op
        return op

    def _transfers(self) -> list[list[int]]:
        peers = {
            OpKind.FORWARD_SEND: (OpKind.FORWARD_RECV, 1),
            OpKind.BACKWARD_SEND: (OpKind.BACKWARD_RECV, -1),
        }
        groups = []
        for (kind, virtual, mb), op in self._ends.items():
            if kind in peers:
                other, away = peers[kind]
                groups.append([op, self._ends[other, virtual + away, mb]])
        return groups

    def durations(self, recipe: Recipe, rng: np.random.Generator) -> NDArray[np.float64]:
        """Durations [N, D, T] without waiting for others."""
        shape = (self.kind.size, recipe.dp, recipe.steps)
        work = np.exp(recipe.work_spread * rng.standard_normal((recipe.microbatches, *shape[1:])))
        weight = np.array(recipe.stage_weight or (1.0,) * recipe.pp)
        usual = {**_TYPICAL_S, **recipe.usual_s}
        real = set(self._ends.values())
        own = np.empty(shape)
        for op, (kind, stage, _, mb, _) in enumerate(self._rows):
            if kind in (OpKind.FORWARD, OpKind.BACKWARD):
                passes = (2.0 if kind == OpKind.BACKWARD else 1.0) / recipe.chunks
                own[op] = recipe.forward_s * passes * weight[stage] * work[mb]
            else:
                own[op] = usual.get(OpKind(kind), recipe.p2p_s if op in real else 0.0)
        own *= np.exp(recipe.noise * rng.standard_normal(shape))
        for trouble in recipe.troubles:
            self._afflict(own, trouble)
        return own

    def _afflict(self, own: NDArray[np.float64], trouble: Trouble) -> None:
        rows = np.isin(self.kind, trouble.kinds)
        if trouble.stage is not None:
            rows &= self.stage == trouble.stage
        replicas = slice(None) if trouble.replica is None else [trouble.replica]
        part = own[rows]
        chosen = part[:, replicas, trouble.since :: trouble.every]
        part[:, replicas, trouble.since :: trouble.every] = (
            chosen * trouble.factor + trouble.extra_s
        )
        own[rows] = part
