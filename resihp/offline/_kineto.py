"""PyTorch profiler (Kineto) JSON as microbatch records.

Steps are the profiler's own marks (`ProfilerStep#N`). Forward and backward passes are the ranges
that the job named so with `record_function`, each of them a microbatch; without any, a step is one
microbatch, and backward is what the autograd engine ran. A pass takes as long as the device was
busy with what was launched in it; on a machine without a device, as the host was.

A collective ends everywhere at once, so that its duration is that of the rank with the shortest
wait: that is its `compute_ms`, the rest is `wait_ms`. Data loading counts as host time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import COLUMNS, Job, Layout, Op, Replica, Stage, TraceError

from ._kineto_events import Range, RankEvents, Transfer, read_events
from ._meta import read_meta, whole_number
from ._trace import Trace


class _Row(NamedTuple):
    rank: int
    step: int
    microbatch: int
    op: Op
    compute_ms: float
    wait_ms: float = float("nan")
    peer: int = -1


def kineto_trace(path: Path, files: Sequence[Path]) -> Trace:
    """The trace in profiler files, one for each rank. Raises `TraceError`."""
    ranks = [_Rank(read_events(file, index)) for index, file in enumerate(files)]
    numbers = [rank.number for rank in ranks]
    if len(set(numbers)) < len(numbers):
        raise TraceError(f"{path}: two files are of the same rank ({sorted(numbers)})")
    rows = [row for rank in ranks for row in rank.rows()]
    if not any(row.op in (Op.FORWARD, Op.BACKWARD) for row in rows):
        raise TraceError(f"{path}: shows no computation within a step")
    rows += _shared(ranks)
    layout = _layout(ranks)
    microbatches = 1 + max(row.microbatch for row in rows)
    job = Job(name=path.name[:128], layout=layout, microbatches=microbatches * layout.dp)
    meta = read_meta(files[0]) if len(files) == 1 else {}
    return Trace(
        path=path,
        format="kineto-json",
        job=job,
        tp=max(whole_number(meta, "tp_size"), layout.tp),
        columns=_columns(rows),
    )


def _columns(rows: Sequence[_Row]) -> dict[str, NDArray[Any]]:
    given = {name: [getattr(row, name) for row in rows] for name in _Row._fields}
    columns: dict[str, NDArray[Any]] = {
        name: np.array(given[name], dtype)
        if name in given
        else np.full(len(rows), 0 if name == "chunk" else default, dtype)
        for name, (dtype, default) in COLUMNS.items()
    }
    columns["plan_version"] = np.zeros(len(rows), np.int64)
    return columns


@dataclass
class _Rank:
    """One rank's events, cut into steps."""

    events: RankEvents
    transfers: dict[int, list[Transfer]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        if not self.events.steps:
            self.events.steps = _steps_by_optimizer(self.events.phases)
        self.events.steps.sort()
        for transfer in sorted(self.events.transfers, key=lambda t: t.host_us):
            for step in self.events.steps:
                if step.start_us <= transfer.host_us < step.stop_us:
                    self.transfers[step.value].append(transfer)

    @property
    def number(self) -> int:
        """Global rank."""
        return self.events.rank

    def rows(self) -> Iterator[_Row]:
        """Records of everything that the rank does alone."""
        for step in self.events.steps:
            yield from self._rows(step)

    def _rows(self, step: Range) -> Iterator[_Row]:
        phases = sorted(p for p in self.events.phases if step.start_us <= p.start_us < step.stop_us)
        host = self.events.work[2]
        inside = (host >= step.start_us) & (host < step.stop_us)
        work = self.events.work[:, inside]
        owner = _owners(phases, work[2])
        single = not any(phase.op is Op.FORWARD for phase in phases)
        if single:
            backward = [i for i, phase in enumerate(phases) if phase.op is Op.BACKWARD]
            yield from self._pass(step, Op.FORWARD, 0, work[:, owner < 0])
            yield from self._pass(step, Op.BACKWARD, 0, work[:, np.isin(owner, backward)])
        counts: dict[Op | None, int] = defaultdict(int)
        for index, phase in enumerate(phases):
            if phase.op is Op.DATA:
                yield _Row(
                    self.number, step.value, -1, Op.DATA, (phase.stop_us - phase.start_us) * 1e-3
                )
            elif phase.op is Op.OPTIMIZER:
                yield from self._pass(step, Op.OPTIMIZER, -1, work[:, owner == index])
            elif phase.op is not None and not single:
                mb = phase.value if phase.value >= 0 else counts[phase.op]
                counts[phase.op] += 1
                yield from self._pass(step, phase.op, mb, work[:, owner == index])

    def _pass(
        self, step: Range, op: Op, microbatch: int, work: NDArray[np.float64]
    ) -> Iterator[_Row]:
        busy_us = _union(work[0], work[1])
        if busy_us > 0:
            yield _Row(self.number, step.value, microbatch, op, busy_us * 1e-3)


def _steps_by_optimizer(phases: Sequence[Range]) -> list[Range]:
    """Steps that end with each optimizer step, where the profiler did not mark them."""
    ends = sorted(phase.stop_us for phase in phases if phase.op is Op.OPTIMIZER)
    edges = [-np.inf, *ends[:-1], np.inf]
    return [Range(*edge, None, step) for step, edge in enumerate(pairwise(edges))]


def _owners(phases: Sequence[Range], host_us: NDArray[np.float64]) -> NDArray[np.intp]:
    """Index of the innermost phase in which each moment lies; -1 outside of all."""
    order = np.argsort(host_us, kind="stable")
    owner = np.full(host_us.size, -1, np.intp)
    for index, phase in enumerate(phases):  # by start: an inner phase comes after the outer one
        low, high = np.searchsorted(host_us[order], (phase.start_us, phase.stop_us))
        owner[order[low:high]] = index
    return owner


def _union(start: NDArray[np.float64], stop: NDArray[np.float64]) -> float:
    """Length of the union of intervals."""
    if not start.size:
        return 0.0
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    reach = np.maximum.accumulate(stop)
    before = np.concatenate([[start[0]], reach[:-1]])
    return float(np.maximum(reach - np.maximum(start, before), 0.0).sum())


def _shared(ranks: Sequence[_Rank]) -> Iterator[_Row]:
    """Records of collectives and transfers, without the waiting if it follows from the peers."""
    durations: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    found: list[tuple[_Rank, int, Transfer, tuple[Any, ...]]] = []
    for rank in ranks:
        for step, transfers in rank.transfers.items():
            counts: dict[tuple[Any, ...], int] = defaultdict(int)
            for transfer in transfers:
                ends = (min(rank.number, transfer.peer), max(rank.number, transfer.peer))
                what = ends if transfer.p2p else (transfer.name,)
                key = (step, transfer.p2p, *what, counts[what])
                counts[what] += 1
                durations[key].append(transfer.duration_us)
                found.append((rank, step, transfer, key))
    for rank, step, transfer, key in found:
        alone = len(durations[key]) == 1 or (transfer.p2p and transfer.peer < 0)
        own = transfer.duration_us if alone else min(durations[key])
        wait = float("nan") if alone else (transfer.duration_us - own) * 1e-3
        op = Op.P2P if transfer.p2p else Op.COLLECTIVE
        yield _Row(rank.number, step, -1, op, own * 1e-3, wait, transfer.peer)


def _layout(ranks: Sequence[_Rank]) -> Layout:
    """Ranks that send to each other form a pipeline, in the order of their numbers."""
    numbers = sorted(rank.number for rank in ranks)
    replica = {number: number for number in numbers}
    for rank in ranks:
        for transfers in rank.transfers.values():
            for transfer in transfers:
                if transfer.p2p and transfer.peer in replica:
                    old, new = replica[rank.number], replica[transfer.peer]
                    replica = {
                        n: min(old, new) if r in (old, new) else r for n, r in replica.items()
                    }
    chains = [[n for n in numbers if replica[n] == root] for root in sorted(set(replica.values()))]
    if len({len(chain) for chain in chains}) > 1:
        chains = [[number] for number in numbers]
    return Layout(
        tuple(
            Replica(tuple(Stage((rank,), (s, s + 1)) for s, rank in enumerate(chain)))
            for chain in chains
        )
    )
