"""The recording of a demo run, for `resihp analyze`: a log of each rank, merged at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from resihp.contracts import COLUMNS, Job, Plan, TelemetryBatch
from resihp.offline import write_trace


def log_record(file: TextIO, rank: int, plan_version: int, fields: Mapping[str, Any]) -> None:
    """Append a record of one rank to its log, whose lines survive a kill of the process."""
    row = {"microbatch": -1, **fields, "op": int(fields["op"]), "rank": rank}
    file.write(json.dumps({**row, "plan_version": plan_version}) + "\n")


def write_recording(folder: Path, job: Job, plans: Iterable[Plan], path: Path) -> None:
    """Write the trace of all ranks, whose logs are in `folder`, with the plans that took effect."""
    rows = sorted(
        (row for file in sorted(folder.glob("records-*.jsonl")) for row in _rows(file)),
        key=lambda row: (row["plan_version"], row["step"]),
    )
    versions = sorted({row["plan_version"] for row in rows})
    batches = (
        _batch([row for row in rows if row["plan_version"] == version], version)
        for version in versions
    )
    write_trace(path, job, batches, plans)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # else the process was killed over it
            yield json.loads(line)


def _batch(rows: list[dict[str, Any]], version: int) -> TelemetryBatch:
    columns: dict[str, Any] = {
        name: [row.get(name, default) for row in rows] for name, (_, default) in COLUMNS.items()
    }
    return TelemetryBatch(**columns, plan_version=version)
