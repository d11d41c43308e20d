"""The recording of a demo run, for `resihp analyze`: a log of each rank, merged at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from resihp.contracts import COLUMNS, Job, Plan, TelemetryBatch
from resihp.offline import write_trace

_PATTERN = "records-*.jsonl"


class RecordLog:
    """Records of one rank as JSON lines, complete up to the last one of a killed process."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._file = (folder / f"records-{rank}.jsonl").open("a", buffering=1)

    def recorder(
        self, record: Callable[..., None], plan_version: Callable[[], int]
    ) -> Callable[..., None]:
        """Wrap `record` to log as well, with the version of the plan in effect."""

        def record_and_log(**fields: Any) -> None:
            record(**fields)
            row = {"microbatch": -1, **fields, "op": int(fields["op"]), "rank": self._rank}
            self._file.write(json.dumps({**row, "plan_version": plan_version()}) + "\n")

        return record_and_log

    def close(self) -> None:
        """Close the log."""
        self._file.close()


def write_recording(folder: Path, job: Job, plans: Iterable[Plan], path: Path) -> None:
    """Write the trace of all ranks, whose logs are in `folder`, with the plans that took effect."""
    rows = sorted(
        (row for file in sorted(folder.glob(_PATTERN)) for row in _rows(file)),
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
