"""Writes ResiHP's own recordings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from resihp.contracts import COLUMNS, Job, Plan, TelemetryBatch, to_json

from ._resihp_parquet import JOB_KEY, PLANS_KEY

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
        import numpy as np
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
