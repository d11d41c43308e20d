"""ResiHP's own recordings: the columns of `TelemetryBatch` in parquet, the job in its metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
        path=path,
        format="resihp-parquet",
        job=job,
        tp=job.layout.tp,
        columns=columns,
        plans=plans,
    )


def _columns(table: ParquetColumns) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, (dtype, default) in COLUMNS.items():
        if name not in table.names:
            if default is None:
                raise ContractError(name, "the column is missing")
            columns[name] = np.full(table.rows, default, dtype)
        else:
            columns[name] = _values(table.read(name), name, dtype)
    name = "plan_version"
    versions = np.dtype(np.int64)
    columns[name] = (
        _values(table.read(name), name, versions)
        if name in table.names
        else np.zeros(table.rows, versions)
    )
    return columns


def _values(column: Any, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    if column.null_count and dtype.kind != "f":
        raise ContractError(name, f"holds {column.null_count} empty values")
    if not is_number(column):
        raise ContractError(name, f"must hold numbers, not {column.type}")
    return to_numpy(column).astype(dtype, copy=False)
