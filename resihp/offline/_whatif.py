"""Parquet files in the layout of the published what-if traces: one row per recorded operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.whatif.operations import COMPUTE, LABELS, OpGrid, OpKind, OpTable
from resihp.contracts import Job, Layout, Replica, Schedule, Stage, TraceError
from resihp.contracts.job import acceptable_name

from ._arrow import ParquetColumns, is_empty, is_number, to_numpy
from ._trace import Rows, Trace, absolute, read_meta, tensor_parallel

REQUIRED = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
_KINDS = {label: kind for kind, label in LABELS.items()}
_UNKNOWN = 255


def whatif_trace(path: Path, table: ParquetColumns) -> Trace:
    """The trace in parquet columns. Raises `TraceError` naming the column that is wrong."""
    if table.rows == 0:
        raise TraceError(f"{path}: holds no operations")
    ops = _operations(path, table)
    table.release()
    meta = read_meta(path)
    layout = _layout(ops)
    microbatches = _microbatches(path, ops)
    chunks = int(ops.chunk.max(initial=0)) + 1
    job = Job(
        name=acceptable_name(meta.get("trial_name") or absolute(path).stem),
        layout=layout,
        microbatches=sum(microbatches),
        quotas=microbatches,
        chunks=max(chunks, 1),
        schedule=Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B,
    )
    tp = tensor_parallel(meta, layout.tp)
    grid = OpGrid.of(ops)
    rows = Rows.of(ops, grid)
    return Trace(path=path, format="whatif-parquet", job=job, tp=tp, grid=grid, rows=rows)


def _operations(path: Path, table: ParquetColumns) -> OpTable:
    missing = [name for name in REQUIRED if name not in table.names]
    if missing:
        raise TraceError(f"{path}: lacks the columns {', '.join(missing)}")
    kind = _kinds(path, table.read("optype"))
    known = kind != _UNKNOWN
    if not known.any():
        raise TraceError(f"{path}: optype: holds none of the known operations")
    column = {
        name: values
        for name in table.names
        if name in _WANTED and (values := _column(path, table.read(name), name)) is not None
    }
    if not known.all():
        kind = kind[known]
        column = {name: values[known] for name, values in column.items()}
    dp, stage = column["dp_rank"], column["stage"]
    replicas, stages = int(dp.max()) + 1, int(stage.max()) + 1
    if replicas * stages > _MOST_PLACES:
        raise TraceError(
            f"{path}: dp_rank and stage: {replicas} replicas of {stages} stages are more than "
            f"{_MOST_PLACES} places"
        )
    rank = column.get("rank", dp.astype(np.int64) + replicas * stage.astype(np.int64))
    compute = np.isin(kind, COMPUTE)
    chunk = column.get("mc", np.where(compute, 0, -1))
    order = (dp, stage, rank, column["step"], kind)
    seq = column.get("seq_id")
    seq = _sequence(*order, column["start_ts"]) if seq is None else seq
    microbatch = column.get("mb_id")
    if microbatch is None:
        each = _sequence(*order, chunk, seq) if chunk.max() > 0 else seq
        microbatch = np.where(compute, each, -1)
    return OpTable(
        dp=dp,
        stage=stage,
        rank=rank,
        step=column["step"],
        kind=kind,
        start_s=column["start_ts"],
        duration_s=np.maximum(column["duration"], 0.0),
        seq=seq,
        chunk=chunk,
        global_chunk=column.get("gmc", np.where(chunk >= 0, chunk * stages + stage, -1)),
        microbatch=microbatch,
    )


_MOST_PLACES = 2**17

_CLOCK_S = 1e-3  # a duration may come out below 0 by this, between two clocks, and counts as 0

# Column -> dtype, least and largest value allowed: numbers beyond are a mistake, and would be
# answered with grids that no memory holds.
_WANTED: dict[str, tuple[Any, float, int]] = {
    "dp_rank": (np.int32, 0, 2**14),
    "stage": (np.int16, 0, 2**10 - 1),
    "rank": (np.int32, 0, 2**31 - 2),
    "step": (np.int64, 0, 2**62),
    "start_ts": (np.float64, -(2**62), 2**62),
    "duration": (np.float64, -_CLOCK_S, 2**62),
    "seq_id": (np.int32, 0, 2**20),
    "mc": (np.int16, -1, 2**12),
    "mb_id": (np.int32, -1, 2**17),
    "gmc": (np.int16, -1, 2**14),
}


def _column(path: Path, column: Any, name: str) -> NDArray[Any] | None:
    """The values of a column; None for an empty one that may be missing."""
    if name not in REQUIRED and is_empty(column):
        return None
    dtype, least, most = _WANTED[name]
    decimal = dtype is np.float64
    words = "numbers" if decimal else "whole numbers"
    wrong = TraceError(f"{path}: {name}: must hold {words}, not {column.type}")
    if not is_number(column):
        raise wrong
    if column.null_count and least == -1:
        column = column.fill_null(-1)
    if column.null_count:
        raise TraceError(f"{path}: {name}: holds {column.null_count} empty values")
    values = to_numpy(column)
    if not decimal and values.dtype.kind == "f":
        values = _whole(values, least)
    if values.dtype.kind not in ("iuf" if decimal else "iu"):
        raise wrong
    if decimal and not np.isfinite(values).all():
        raise TraceError(f"{path}: {name}: holds a value that is not finite")
    if values.min() < least:
        raise TraceError(f"{path}: {name}: holds {values.min()}, below {least}")
    if values.max() > most:
        raise TraceError(f"{path}: {name}: holds {values.max()}, above {most}")
    return values.astype(dtype if decimal else _narrow(values, dtype), copy=False)


def _narrow(values: NDArray[Any], dtype: Any) -> Any:
    """The narrowest of the types up to `dtype`, from 16 bits on, that holds all values."""
    most = int(values.max())
    return next(t for t in (np.int16, np.int32, dtype) if most <= np.iinfo(t).max)


def _whole(values: NDArray[Any], least: float) -> NDArray[Any]:
    """Whole numbers that pandas wrote as decimals because some were empty; else as they are."""
    filled = np.where(np.isnan(values), -1.0, values) if least == -1 else values
    whole = np.isfinite(filled).all() and (filled == np.round(filled)).all()
    return filled.astype(np.int64) if whole else values


def _kinds(path: Path, column: Any) -> NDArray[np.uint8]:
    """`OpKind` codes of the operation names."""
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    column = column.unify_dictionaries().combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0)
    if column.null_count:
        raise TraceError(f"{path}: optype: holds {column.null_count} empty values")
    codes = [_KINDS.get(name, _UNKNOWN) for name in column.dictionary.to_pylist()]
    kinds: NDArray[np.uint8] = np.array(codes, np.uint8)[to_numpy(column.indices)]
    return kinds


def _sequence(*keys: NDArray[Any]) -> NDArray[np.int64]:
    """Position of every row among the rows with equal keys, in the order of the last key."""
    order = np.lexsort(keys[::-1])
    same = np.ones(order.size, bool)
    same[0] = False
    for key in keys[:-1]:
        same[1:] &= key[order][1:] == key[order][:-1]
    starts = np.flatnonzero(~same)
    position = np.arange(order.size) - np.repeat(starts, np.diff([*starts, order.size]))
    sequence = np.empty(order.size, np.int64)
    sequence[order] = position
    return sequence


def _layout(ops: OpTable) -> Layout:
    """The recorded ranks by replica and stage; a stage of which none was recorded gets a number."""
    seen: dict[tuple[int, int], list[int]] = {}
    keys = (ops.dp.astype(np.int64) << 44) | (ops.stage.astype(np.int64) << 32) | ops.rank
    places = np.unique(keys)
    for dp, stage, rank in zip(
        (places >> 44).tolist(),
        (places >> 32 & 0xFFF).tolist(),
        (places & 0xFFFFFFFF).tolist(),
        strict=True,
    ):
        seen.setdefault((dp, stage), []).append(rank)
    free = int(ops.rank.max()) + 1
    stages = range(int(ops.stage.max()) + 1)
    replicas = []
    for dp in range(int(ops.dp.max()) + 1):
        members = []
        for stage in stages:
            if (dp, stage) not in seen:
                seen[dp, stage] = [free]
                free += 1
            members.append(Stage(tuple(seen[dp, stage]), (stage, stage + 1)))
        replicas.append(Replica(tuple(members)))
    return Layout(tuple(replicas))


def _microbatches(path: Path, ops: OpTable) -> tuple[int, ...]:
    """Most forward passes of a microbatch that any step of each replica shows."""
    rows = ops.kind == OpKind.FORWARD
    counts = np.zeros(int(ops.dp.max()) + 1, np.int64)
    np.maximum.at(counts, ops.dp[rows], ops.microbatch[rows].astype(np.int64) + 1)
    if not counts.any():
        raise TraceError(f"{path}: holds no forward-compute operation")
    return tuple(int(count) for count in counts)
