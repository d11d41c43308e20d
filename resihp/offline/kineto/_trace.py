"""A profiled job: the files of all its ranks as one trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from resihp.contracts import Job, Op, Schedule, TraceError
from resihp.contracts.job import acceptable_name

from .._trace import Trace, absolute, filled, read_meta, tensor_parallel
from ._groups import layout_of_ranks
from ._rank_profile import ranks_by_name
from ._rank_records import RankRecords, Row, joined_cycles, read_rank
from ._shared_rows import shared_rows


def kineto_trace(path: Path, files: Sequence[Path]) -> Trace:
    """The trace in profiler files, of each rank one, or one for each cycle of the profiler's
    schedule. Raises `TraceError`."""
    ranks = _ranks(path, files)
    numbers = _common_steps(path, ranks)
    rows = [
        row._replace(step=number[row.step])
        for rank, number in zip(ranks, numbers, strict=True)
        for row in rank.rows
        if row.step in number
    ]
    passes = [row for row in rows if row.op in (Op.FORWARD, Op.BACKWARD)]
    if not passes:
        raise TraceError(f"{path}: shows no computation within a step")
    rows += shared_rows(ranks, numbers)
    layout = layout_of_ranks(ranks, 1 + max(row.chunk for row in passes))
    chunks = layout.replicas[0].chunks
    schedule = Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B
    job = Job(
        name=acceptable_name(absolute(path).name),
        layout=layout,
        microbatches=(1 + max(row.microbatch for row in passes)) * layout.dp,
        chunks=chunks,
        schedule=Schedule.ZERO_BUBBLE if any(rank.is_split for rank in ranks) else schedule,
    )
    if layout.pp > 1 and max(layout.pp, layout.dp) > 2:
        # Times of other stages tell the work of a microbatch; shapes hide how documents are packed.
        rows = [row._replace(tokens=-1, sum_sq_len=-1) for row in rows]
    meta = read_meta(files[0]) if len(files) == 1 else {}
    return Trace(
        path=path,
        format="kineto-json",
        job=job,
        tp=tensor_parallel(meta, layout.tp),
        # In a pipeline that is idling and transfers, too.
        untimed_ms=float(np.median([r.untimed_ms for r in ranks])) if layout.pp == 1 else np.nan,
        columns=filled(
            {name: np.array([getattr(row, name) for row in rows]) for name in Row._fields}
        ),
    )


def _ranks(path: Path, files: Sequence[Path]) -> list[RankRecords]:
    cycles: dict[int, list[RankRecords]] = {}
    for file, named in zip(files, ranks_by_name(files), strict=True):
        records = read_rank(file, named)
        cycles.setdefault(records.rank, []).append(records)
    for rank, each in cycles.items():
        numbers = [step.number for one in each for step in one.steps]
        is_numbered = all(one.is_numbered for one in each)
        if len(each) > 1 and not (is_numbered and len(set(numbers)) == len(numbers)):
            raise TraceError(
                f"{path}: {len(each)} files of rank {rank} do not number different steps"
            )
    return [joined_cycles(cycles[rank]) for rank in sorted(cycles)]


def _common_steps(path: Path, ranks: Sequence[RankRecords]) -> list[dict[int, int]]:
    """Numbers of the steps that all ranks recorded, by their index on each rank."""
    if any(rank.is_numbered for rank in ranks):
        found = [[step.number for step in rank.steps] for rank in ranks]
    else:
        found = _numbered_by_clock(ranks)
    common = set.intersection(*map(set, found))
    if not common:
        raise TraceError(f"{path}: the ranks recorded no step in common")
    return [{at: step for at, step in enumerate(each) if step in common} for each in found]


def _numbered_by_clock(ranks: Sequence[RankRecords]) -> list[list[int]]:
    """Steps with the numbers of those of the first rank that ended at about the same time by the
    hosts' clocks; as each rank counts them where the clocks do not tell."""
    ends = [np.array([step.stop_us for step in r.steps[:-1]]) + r.epoch_us for r in ranks]
    first, shifts = ends[0], [0] * len(ranks)
    if first.size > 1 and all(end.size and np.isfinite(end).all() for end in ends):
        close = 0.25 * float(np.median(np.diff(first)))
        for index, end in enumerate(ends):
            apart = np.abs(end[:, None] - first)
            nearest = np.argmin(apart, axis=1)
            by = (nearest - np.arange(end.size))[apart.min(axis=1) < close]
            shifts[index] = int(np.median(by)) if by.size else 0
    return [
        [at + by - min(shifts) for at in range(len(rank.steps))]
        for rank, by in zip(ranks, shifts, strict=True)
    ]
