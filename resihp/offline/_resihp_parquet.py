"""Recordings of ResiHP, read and written: `TelemetryBatch` columns as parquet, job as metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import (
    COLUMNS,
    ContractError,
    Job,
    Plan,
    TelemetryBatch,
    TraceError,
    from_json,
    to_json,
)

from ._arrow import ParquetColumns, is_number, to_numpy
from ._trace import Trace

JOB_KEY = b"resihp.job"
PLANS_KEY = b"resihp.plans"


def own_trace(path: Path, table: ParquetColumns) -> Trace:
    """The trace in parquet columns. Raises `TraceError` naming what is wrong."""
    metadata = table.metadata
    try:
        job = from_json(Job, json.loads(metadata[JOB_KEY]))
        plans = from_json(tuple[Plan, ...], json.loads(metadata.get(PLANS_KEY, b"[]")))
        columns = _columns(table)
        TelemetryBatch(**{name: columns[name] for name in COLUMNS})
    except (ValueError, ContractError) as error:
        raise TraceError(f"{path}: {error}") from None
    if not columns["rank"].size:
        raise TraceError(f"{path}: holds no records")
    return Trace(
        path=path, format="resihp-parquet", job=job, tp=job.layout.tp, columns=columns, plans=plans
    )


def _columns(table: ParquetColumns) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    kinds = {**COLUMNS, "plan_version": (np.dtype(np.int64), 0)}
    for name, (dtype, default) in kinds.items():
        if name in table.names:
            columns[name] = _values(table.read(name), name, dtype)
        elif default is None:
            raise ContractError(name, "the column is missing")
        else:
            columns[name] = np.full(table.rows, default, dtype)
    return columns


def _values(column: Any, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    if column.null_count and dtype.kind != "f":
        raise ContractError(name, f"holds {column.null_count} empty values")
    if not is_number(column):
        raise ContractError(name, f"must hold numbers, not {column.type}")
    return to_numpy(column).astype(dtype, copy=False)


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
        """Notes a plan that took effect."""
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
