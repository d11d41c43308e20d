"""Recordings of ResiHP, read and written: `TelemetryBatch` columns as parquet, job as metadata."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import (
    COLUMNS,
    ContractError,
    Job,
    Layout,
    Op,
    Plan,
    TelemetryBatch,
    TraceError,
    from_json,
    to_json,
)

from ._arrow import ParquetColumns, is_number, to_numpy
from ._trace import Columns, Trace

JOB_KEY = b"resihp.job"
PLANS_KEY = b"resihp.plans"

_IDENTITY = (
    "compute_ms", "peer", "op", "chunk", "microbatch", "step", "plan_version", "rank",
)  # fmt: skip
"""Columns by which a record is known again."""


def own_trace(path: Path, table: ParquetColumns) -> Trace:
    """The trace in parquet columns. Raises `TraceError` naming what is wrong."""
    try:
        job = _job(table.metadata)
        plans = _plans(table.metadata)
        given: dict[str, Any] = {
            name: _values(table, name, dtype) for name, (dtype, _) in COLUMNS.items()
        }
        records = TelemetryBatch(**given)
        if not len(records):
            raise ValueError("holds no records")
        columns = {**records.columns(), "plan_version": _plan_version(table, plans)}
        _refuse_copies(table.file_rows, columns)
        _require_known_ranks(records.rank, [job.layout, *(plan.layout for plan in plans.values())])
    except (ValueError, ContractError, RecursionError) as error:
        raise TraceError(f"{path}: {error}") from None
    return Trace(
        path=path,
        format="resihp-parquet",
        job=job,
        tp=job.layout.tp,
        columns=_without_redone(columns),
        plans=tuple(plans[version] for version in sorted(plans)),
    )


def _job(metadata: Sequence[Mapping[bytes, bytes]]) -> Job:
    """The job of all files."""
    jobs = [from_json(Job, json.loads(each[JOB_KEY])) for each in metadata if JOB_KEY in each]
    if len(jobs) < len(metadata) or any(job != jobs[0] for job in jobs):
        raise ValueError("the files are not of the same job; each job needs a folder of its own")
    return jobs[0]


def _plans(metadata: Sequence[Mapping[bytes, bytes]]) -> dict[int, Plan]:
    """The plans of all files by version."""
    plans: dict[int, Plan] = {}
    for each in metadata:
        known = from_json(tuple[Plan, ...], json.loads(each.get(PLANS_KEY, b"[]")))
        own = {plan.version: plan for plan in known}
        if any(plans.get(v, plan).digest != plan.digest for v, plan in own.items()):
            raise ValueError("the files hold different plans of the same version")
        plans |= own
    return plans


def _plan_version(table: ParquetColumns, plans: Collection[int]) -> NDArray[np.int64]:
    """The plan of every record; 0, the layout of the job, for the first one if its plan was not
    recorded, as where a recording began late."""
    name = "plan_version"
    versions = _values(table, name, np.dtype(np.int64))
    if versions is None:
        return np.zeros(table.rows, np.int64)
    if versions.dtype.kind not in "iu" or versions.max() > np.iinfo(np.int64).max:
        raise ContractError(name, "must hold whole numbers of 64 bits")
    if versions.min() < 0:
        raise ContractError(name, "holds a value below 0")
    first, *later = np.unique(versions).tolist()
    if lacking := [version for version in later if version not in plans]:
        raise ContractError(name, f"the plan of version {lacking[0]} was not recorded")
    return np.where(versions == first, first if first in plans else 0, versions).astype(np.int64)


def _require_known_ranks(ranks: NDArray[np.integer], layouts: Iterable[Layout]) -> None:
    known = {rank for layout in layouts for rank in layout.ranks}
    if unknown := sorted(set(np.unique(ranks).tolist()) - known):
        raise ContractError("rank", f"{unknown[0]} is in no layout of the job")


def _refuse_copies(file_rows: Sequence[int], columns: Mapping[str, NDArray[Any]]) -> None:
    """Refuse a record that is in two files, as those of a copy are."""
    rank = columns["rank"]
    ends = np.cumsum(file_rows)[:-1]
    if not ends.size:
        return
    ranks = np.concatenate([np.unique(part) for part in np.split(rank, ends)])
    known, files = np.unique(ranks, return_counts=True)
    rows = np.flatnonzero(np.isin(rank, known[files > 1]))
    file = np.searchsorted(ends, rows, side="right")
    keys = [columns[name][rows] for name in _IDENTITY]
    order = np.lexsort((file, *keys))
    before, after = order[:-1], order[1:]
    same = np.logical_and.reduce([key[before] == key[after] for key in keys])
    if twice := rows[before[same & (file[before] != file[after])]].tolist():
        step, of = int(columns["step"][twice[0]]), int(rank[twice[0]])
        raise ValueError(f"two of the files hold the same records, as of rank {of} in step {step}")


def _without_redone(columns: Columns) -> Columns:
    """The records without those of steps that their rank took again later under the same plan, as
    after a restart from a checkpoint.

    A rank goes back where its steps fall in the order of the file. Late records do so too: a step
    was redone only if one of its forward passes comes again, with another time, after a fall.
    """
    rank = columns["rank"]
    order = np.argsort(rank, kind="stable")
    falls = (np.diff(columns["step"][order]) < 0) & (np.diff(rank[order]) == 0)
    if not falls.any():
        return columns
    stretch = np.empty(rank.size, np.int64)  # of records of a rank without a fall
    stretch[order] = np.concatenate([[0], np.cumsum(falls)])
    of_step = _numbered(*(columns[name] for name in ("plan_version", "rank", "step")))
    passes = np.flatnonzero(columns["op"] == Op.FORWARD)
    key = _numbered(of_step[passes], columns["microbatch"][passes], columns["chunk"][passes])
    # The same record may have been sent twice.
    _, first = np.unique(_numbered(key, columns["compute_ms"][passes]), return_index=True)
    passes, key = passes[first], key[first]
    order = np.lexsort((stretch[passes], key))
    passes, key = passes[order], key[order]
    before, after = passes[:-1], passes[1:]
    again = (np.diff(key) == 0) & (stretch[before] < stretch[after])
    redone = np.full(rank.size, -1, np.int64)  # last stretch of each step before it was redone
    np.maximum.at(redone, of_step[before[again]], stretch[before[again]])
    kept = stretch > redone[of_step]
    return {name: column[kept] for name, column in columns.items()}


def _numbered(*keys: NDArray[Any]) -> NDArray[np.int64]:
    """Number of every row's keys among the different ones, in their order."""
    order = np.lexsort(keys[::-1])
    change = np.logical_or.reduce([np.diff(key[order]) != 0 for key in keys])
    number = np.empty(order.size, np.int64)
    number[order] = np.concatenate([np.zeros(min(order.size, 1), np.int64), np.cumsum(change)])
    return number


def _values(table: ParquetColumns, name: str, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The values of a column as they were stored; None where there is none."""
    if name not in table.names:
        return None
    column = table.read(name)
    if column.null_count and dtype.kind != "f":
        raise ContractError(name, f"holds {column.null_count} empty values")
    if not is_number(column):
        raise ContractError(name, f"must hold numbers, not {column.type}")
    return to_numpy(column)


_ROWS = 1 << 16  # rows held back until they make a row group


class TraceWriter:
    """Appends batches to a recording; `close`, or the end of a `with` block, completes the file.

    Not safe for use by several threads at once. Nothing can be read before it is closed.
    """

    def __init__(self, path: str | Path, job: Job) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        fields = [(name, pa.from_numpy_dtype(dtype)) for name, (dtype, _) in COLUMNS.items()]
        schema = pa.schema([*fields, ("plan_version", pa.int64())])
        self._schema = schema.with_metadata({JOB_KEY: json.dumps(to_json(job)).encode()})
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._held: list[TelemetryBatch] = []
        self._plans: list[Plan] = []

    def write(self, batch: TelemetryBatch) -> None:
        """Adds the records of a batch."""
        self._held.append(batch)
        if sum(len(held) for held in self._held) >= _ROWS:
            self._flush()

    def add_plan(self, plan: Plan) -> None:
        """Notes a plan that took effect. Records of a second plan cannot be read without it."""
        self._plans.append(plan)

    def close(self) -> None:
        """Completes the file."""
        self._flush()
        if self._plans:
            self._writer.add_key_value_metadata(
                {PLANS_KEY: json.dumps([to_json(plan) for plan in self._plans]).encode()}
            )
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._held:
            return
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(batch, name) for batch in self._held]) for name in COLUMNS
        }
        columns["plan_version"] = np.concatenate(
            [np.full(len(batch), batch.plan_version, np.int64) for batch in self._held]
        )
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self._held = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_trace(
    path: str | Path, job: Job, batches: Iterable[TelemetryBatch], plans: Iterable[Plan] = ()
) -> None:
    """Writes a recording of `batches`; see `TraceWriter` to append while a job runs."""
    with TraceWriter(path, job) as writer:
        for batch in batches:
            writer.write(batch)
        for plan in plans:
            writer.add_plan(plan)
