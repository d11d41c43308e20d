"""Dependencies of recorded operations, from the order in which they were recorded.

The rules are those of "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI'25, section 3.2): compute runs in the recorded order on one stream, each kind of transfer on
a stream of its own, and the work after the last backward pass one after the other. One replica's
order is used for all. Where a stage recorded no receives at all, its passes depend on those whose
results they need.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import ContractError
from resihp.pipeline.graph import Graph

from .operations import COMPUTE, P2P, SYNCED, Floats, OpGrid, OpKind

_CLOCK_S = 5e-5  # largest clock difference between ranks
_PEER = {  # kind of the other end, and its distance in stages
    OpKind.FORWARD_SEND: (OpKind.FORWARD_RECV, 1),
    OpKind.FORWARD_RECV: (OpKind.FORWARD_SEND, -1),
    OpKind.BACKWARD_SEND: (OpKind.BACKWARD_RECV, -1),
    OpKind.BACKWARD_RECV: (OpKind.BACKWARD_SEND, 1),
}
_NEEDS = (  # kind of pass, kind of its receive, and distance in chunks of the pass that it needs
    (OpKind.FORWARD, OpKind.FORWARD_RECV, -1),
    (OpKind.BACKWARD, OpKind.BACKWARD_RECV, 1),
)
_TAIL = (OpKind.NORM_REDUCE, OpKind.EMBEDDING_REDUCE)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dependencies:
    """The graph of one replica's step, and its synchronised groups.

    groups  operations that wait for each other; synced: the groups that wait for all replicas
    peer    [N] the other end of each operation's transfer; -1 where there is none
    serves  [N] the pass that needs or made the transferred data; -1 where there is none
    idle    [N] whether it was recorded although nothing was transferred
    lone    [N] whether the other end of its transfer is missing
    """

    graph: Graph
    predecessors: list[list[int]]
    groups: list[list[int]]
    synced: list[int]
    peer: NDArray[np.intp]
    serves: NDArray[np.intp]
    idle: NDArray[np.bool_]
    lone: NDArray[np.bool_]

    def waits(self) -> NDArray[np.bool_]:
        """Mask [N] of the operations whose recorded duration includes waiting for others."""
        mask = np.zeros(len(self.predecessors), bool)
        mask[[op for group in self.groups for op in group]] = True
        return mask


def dependencies(recording: OpGrid) -> Dependencies:
    """The dependencies that a recording shows. Raises `ContractError` where they are circular."""
    try:
        return _Builder(recording).build()
    except ContractError:  # microbatch numbers may be inferred, and contradict the times
        return _Builder(recording, needs=False).build()


class _Builder:
    def __init__(self, recording: OpGrid, *, needs: bool = True) -> None:
        self.rec = recording
        self.needs = needs  # whether passes depend on those that they need, without a receive
        self.start = _reference(recording.start_s)
        self.end = _reference(recording.start_s + recording.duration_s)
        self.preds: list[list[int]] = [[] for _ in recording.kind]
        # Gradients may be reduced while the backward passes still run.
        self.overlapped = bool((recording.kind == OpKind.GRADS_REDUCE).any())
        self.matched = np.full(len(self.preds), -1, np.intp)  # compute that a transfer serves
        self.idle = np.ones(len(self.preds), bool)  # recorded, but nothing was transferred

    def build(self) -> Dependencies:
        for stage in range(self.rec.stages):
            self._stage(stage)
        if self.needs:
            self._without_receives()
        transfers = self._transfers()
        groups = [list(pair) for pair in transfers]
        peer = np.full(len(self.preds), -1, np.intp)
        for one, other in transfers:
            peer[one], peer[other] = other, one
        paired = {op for pair in transfers for op in pair}
        groups += [[int(op)] for op in np.flatnonzero(self.rec.of_kind(*P2P)) if op not in paired]
        groups += self._across_stages(OpKind.EMBEDDING_REDUCE)
        synced_from = len(groups)
        alone = self.rec.of_kind(*(kind for kind in SYNCED if kind is not OpKind.CLIP))
        groups += [[int(op)] for op in np.flatnonzero(alone)]
        groups += self._across_stages(OpKind.CLIP)
        synced = list(range(synced_from, len(groups)))
        idle = self.idle & self.rec.of_kind(*P2P)
        return Dependencies(
            graph=Graph(self.preds, groups, synced),
            predecessors=self.preds,
            groups=groups,
            synced=synced,
            peer=peer,
            serves=self.matched,
            idle=idle,
            lone=self.rec.of_kind(*P2P) & ~idle & (peer < 0),
        )

    def _across_stages(self, kind: OpKind) -> list[list[int]]:
        """The k-th operations of a kind of all stages, for every k."""
        ops = np.flatnonzero(self.rec.kind == kind)
        return [ops[self.rec.seq[ops] == k].tolist() for k in np.unique(self.rec.seq[ops])]

    def _ordered(self, stage: int, *kinds: OpKind) -> list[int]:
        """Operations of a stage in the recorded order."""
        ops = np.flatnonzero((self.rec.stage == stage) & self.rec.of_kind(*kinds))
        keys = (self.rec.kind[ops], self.rec.seq[ops], self.start[ops])
        return [int(op) for op in ops[np.lexsort(keys)]]

    def _chain(self, ops: list[int], after: tuple[int, ...] = ()) -> None:
        for op in ops:
            self.preds[op].extend(after)
            after = (op,)

    def _stage(self, stage: int) -> None:
        compute = self._ordered(stage, *COMPUTE)
        self._chain(compute)
        for kind in P2P:
            stream = self._ordered(stage, kind)
            self._chain(stream)
            self._match(kind, stream, compute)
        self._first_backward(stage, compute)
        self._chain(self._ordered(stage, OpKind.PARAMS_GATHER, OpKind.GRADS_SCATTER))
        self._gather(stage, compute)
        if compute:
            self._after_compute(stage, compute)

    def _match(self, kind: OpKind, stream: list[int], compute: list[int]) -> None:
        """Assigns each transfer to the pass that it serves, and orders the two.

        A receive that starts after the last pass and a send that ends before the first one were
        recorded without a transfer; so were those at the two ends of the model.
        """
        forward = kind in (OpKind.FORWARD_SEND, OpKind.FORWARD_RECV)
        receives = kind in (OpKind.FORWARD_RECV, OpKind.BACKWARD_RECV)
        direction = OpKind.FORWARD if forward else OpKind.BACKWARD
        passes = [op for op in compute if self.rec.kind[op] == direction]
        if not passes:
            return
        if receives:
            last = max(self.start[passes])
            real = [op for op in stream if self.start[op] <= last + _CLOCK_S]
        else:
            first = min(self.end[passes])
            real = [op for op in stream if self.end[op] >= first - _CLOCK_S]
        skip = int(receives and len(real) + 1 == len(passes))
        by_seq = sorted(passes, key=lambda op: int(self.rec.seq[op]))
        chunks = (max(int(self.rec.chunk.max(initial=0)), 0) + 1) * self.rec.stages
        ends = 0 if forward == receives else chunks - 1  # chunk without a neighbour on that side
        for op, index in zip(real, range(skip, len(by_seq)), strict=False):
            self.matched[op] = by_seq[index]
            if not receives:
                self.preds[op].append(by_seq[index])
            else:
                self.preds[by_seq[index]].append(op)
                self.preds[op].extend(by_seq[index - 1 : index] if index else ())
            self.idle[op] = self.rec.global_chunk[by_seq[index]] == ends

    def _without_receives(self) -> None:
        """Makes passes depend on those that they need, in stages that recorded no receive."""
        rec = self.rec
        for kind, receive, away in _NEEDS:
            passes = np.flatnonzero((rec.kind == kind) & (rec.microbatch >= 0))
            where = {(int(rec.global_chunk[op]), int(rec.microbatch[op])): int(op) for op in passes}
            silent = set(rec.stage.tolist()) - set(rec.stage[rec.kind == receive].tolist())
            for (chunk, microbatch), op in where.items():
                source = where.get((chunk + away, microbatch))
                if source is not None and int(rec.stage[op]) in silent:
                    self.preds[op].append(source)

    def _first_backward(self, stage: int, compute: list[int]) -> None:
        """Makes the first backward transfer depend on the forward pass before the last one."""
        kinds = [int(self.rec.kind[op]) for op in compute]
        first = kinds.index(OpKind.BACKWARD) if OpKind.BACKWARD in kinds else 0
        if first < 2:
            return
        for kind in (OpKind.BACKWARD_RECV, OpKind.BACKWARD_SEND):
            op = next(iter(self._of(stage, kind)), None)
            if op is not None:
                self.preds[op].append(compute[first - 2])

    def _gather(self, stage: int, compute: list[int]) -> None:
        """Makes the first forward pass of a chunk depend on its parameters, and the reduction on
        its gradients."""
        forward = [op for op in compute if self.rec.kind[op] == OpKind.FORWARD]
        backward = [op for op in compute if self.rec.kind[op] == OpKind.BACKWARD]
        for chunk, op in self._by_chunk(stage, OpKind.PARAMS_GATHER, last=True).items():
            needs = [p for p in forward if chunk in (-1, self.rec.chunk[p])]
            if needs:
                self.preds[needs[0]].append(op)
        if not self.overlapped:
            return
        for chunk, op in self._by_chunk(stage, OpKind.GRADS_SCATTER, last=False).items():
            needs = [p for p in backward if chunk in (-1, self.rec.chunk[p])]
            if needs:
                self.preds[op].append(max(needs, key=lambda p: self.end[p]))

    def _by_chunk(self, stage: int, kind: OpKind, last: bool) -> dict[int, int]:
        """The last or the first operation of a kind for every model chunk."""
        ops = np.flatnonzero((self.rec.stage == stage) & (self.rec.kind == kind))
        ops = ops[np.argsort(self.rec.seq[ops])]
        ops = ops if last else ops[::-1]
        return {int(self.rec.chunk[op]): int(op) for op in ops}

    def _after_compute(self, stage: int, compute: list[int]) -> None:
        """Chains the operations after the last pass, as far as they were recorded.

        Of several pauses, those before the last pass are part of its own time.
        """
        last = max(compute, key=lambda op: self.end[op])
        pauses = self._of(stage, OpKind.GC)
        late = [op for op in pauses if self.start[op] >= self.start[last]] or pauses[-1:]
        self._chain(late, (last,))
        after: tuple[int, ...] = (late[-1] if late else last,)
        scatter = self._of(stage, OpKind.GRADS_SCATTER)
        tail = self._of(stage, *_TAIL)
        if self.overlapped:
            after = (*after, *scatter[-1:])
            tail += self._of(stage, OpKind.GRADS_REDUCE)
        else:
            tail += scatter
        self._chain(tail + self._of(stage, OpKind.CLIP, OpKind.OPTIMIZER), after)

    def _of(self, stage: int, *kinds: OpKind) -> list[int]:
        """Operations of a stage, one kind after the other, each in its own order."""
        return [
            int(op)
            for kind in kinds
            for op in np.flatnonzero((self.rec.stage == stage) & (self.rec.kind == kind))
        ]

    def _transfers(self) -> list[tuple[int, int]]:
        """The two ends of every transfer: the k-th sent is the k-th received."""
        streams = {
            (stage, kind): [op for op in self._ordered(stage, kind) if not self.idle[op]]
            for stage in range(self.rec.stages)
            for kind in P2P
        }
        pairs: list[tuple[int, int]] = []
        for (stage, kind), ops in streams.items():
            other, away = _PEER[kind]
            if kind in (OpKind.FORWARD_SEND, OpKind.BACKWARD_SEND):
                peers = streams[((stage + away) % self.rec.stages, other)]
                pairs.extend(zip(ops, peers, strict=False))
        return pairs


def _reference(times: Floats) -> Floats:
    """Times [N] of the first replica in the first step, or of the first that shows more operations
    than those before it; the median where it has none."""
    shown = np.isfinite(times).sum(axis=0)
    replica, step = np.unravel_index(int(np.argmax(shown)), shown.shape)
    reference = times[:, replica, step].copy()
    missing = np.isnan(reference)
    if missing.any():
        reference[missing] = np.nanmedian(times[missing].reshape(int(missing.sum()), -1), axis=1)
    return reference


_LATE_S = 1e-2
"""A transfer that ends this long before its last rank started did not wait for it."""


def transfer_seconds(recording: OpGrid, found: Dependencies) -> Floats:
    """Durations [N, D, T] of which the waiting in transfers and collectives is removed.

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
