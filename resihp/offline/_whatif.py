"""Parquet files in the layout of the published what-if traces: one row per recorded operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.whatif.ops import COMPUTE, LABELS, Kind, OpTable
from resihp.contracts import Job, Layout, Replica, Schedule, Stage, TraceError

from ._arrow import is_number, to_numpy
from ._meta import read_meta, whole_number
from ._trace import Trace

REQUIRED = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
_KINDS = {label: kind for kind, label in LABELS.items()}
_UNKNOWN = 255


def whatif_trace(path: Path, table: Any) -> Trace:
    """The trace in an Arrow table. Raises `TraceError` naming the column that is wrong."""
    if table.num_rows == 0:
        raise TraceError(f"{path}: holds no operations")
    ops = _operations(path, table)
    meta = read_meta(path)
    layout = _layout(ops)
    microbatches = _microbatches(ops)
    chunks = int(ops.chunk.max(initial=0)) + 1
    job = Job(
        name=_name(meta.get("trial_name") or path.stem),
        layout=layout,
        microbatches=sum(microbatches),
        quotas=microbatches,
        chunks=max(chunks, 1),
        schedule=Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B,
    )
    tp = max(whole_number(meta, "tp_size"), layout.tp)
    return Trace(path=path, format="whatif-parquet", job=job, tp=tp, ops=ops)


def _operations(path: Path, table: Any) -> OpTable:
    missing = [name for name in REQUIRED if name not in table.column_names]
    if missing:
        raise TraceError(f"{path}: lacks the columns {', '.join(missing)}")
    kind = _kinds(path, table.column("optype"))
    known = kind != _UNKNOWN
    if not known.any():
        raise TraceError(f"{path}: optype: holds none of the known operations")
    column = {
        name: _column(path, table.column(name), name)[known]
        for name in table.column_names
        if name not in ("optype",) and name in _WANTED
    }
    kind = kind[known]
    dp, stage = column["dp_rank"], column["stage"]
    stages = int(stage.max()) + 1
    chunk = column.get("mc", np.where(np.isin(kind, COMPUTE), 0, -1))
    seq = column.get("seq_id")
    seq = _sequence(dp, stage, column["step"], kind, column["start_ts"]) if seq is None else seq
    return OpTable(
        dp=dp,
        stage=stage,
        rank=column.get("rank", dp.astype(np.int64) + (int(dp.max()) + 1) * stage),
        step=column["step"],
        kind=kind,
        start_s=column["start_ts"],
        duration_s=column["duration"],
        seq=seq,
        chunk=chunk,
        global_chunk=column.get("gmc", np.where(chunk >= 0, chunk * stages + stage, -1)),
        microbatch=column.get("mb_id", np.where(np.isin(kind, COMPUTE), seq, -1)),
    )


_WANTED = {  # column -> least value allowed
    "dp_rank": 0,
    "stage": 0,
    "rank": 0,
    "step": 0,
    "start_ts": -np.inf,
    "duration": 0,
    "seq_id": 0,
    "mc": -1,
    "mb_id": -1,
    "gmc": -1,
}


def _column(path: Path, column: Any, name: str) -> NDArray[Any]:
    if column.null_count:
        raise TraceError(f"{path}: {name}: holds {column.null_count} empty values")
    decimal = name in ("start_ts", "duration")
    values = to_numpy(column) if is_number(column) else np.empty(0, bool)
    if values.dtype.kind not in ("iuf" if decimal else "iu"):
        words = "numbers" if decimal else "whole numbers"
        raise TraceError(f"{path}: {name}: must hold {words}, not {column.type}")
    if decimal:
        values = values.astype(np.float64)
        if not np.isfinite(values).all():
            raise TraceError(f"{path}: {name}: holds a value that is not finite")
    if values.min() < _WANTED[name]:
        raise TraceError(f"{path}: {name}: holds {values.min()}, below {_WANTED[name]}")
    return values


def _kinds(path: Path, column: Any) -> NDArray[np.uint8]:
    """`Kind` codes of the operation names."""
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
    places = np.unique(np.stack([ops.dp, ops.stage, ops.rank]).astype(np.int64), axis=1)
    for dp, stage, rank in places.T.tolist():
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


def _microbatches(ops: OpTable) -> tuple[int, ...]:
    """Most forward passes of a microbatch that any step of each replica shows."""
    rows = ops.kind == Kind.FORWARD
    counts = np.zeros(int(ops.dp.max()) + 1, np.int64)
    np.maximum.at(counts, ops.dp[rows], ops.microbatch[rows].astype(np.int64) + 1)
    if not counts.any():
        raise TraceError("holds no forward-compute operation")
    return tuple(int(count) for count in counts)


def _name(text: str) -> str:
    return "".join(c for c in text if c.isprintable() and c != "/")[:128] or "trace"
