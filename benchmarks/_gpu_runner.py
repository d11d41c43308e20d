"""Measurements one after the other, each in processes of its own, within a part's time.

A measurement that fails, hangs or takes the device with it costs its own rows alone: its processes
are ended at its deadline, and what it had measured until then is kept. CUDA's errors are sticky, so
that a process that had one could measure nothing more.

`python -m benchmarks._gpu_runner MODULE:FUNCTION ARGUMENTS FILE` runs one of them, in this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks._gpu_rows import NotRunError, Row

_ROOT = Path(__file__).parents[1]
_REAPED_S = 10.0
"""Time for processes to end; one that hangs in the driver may never."""


@dataclass(frozen=True)
class Measurement:
    """A function that yields rows.

    name        of the row that stands for it where it does not run or fails
    function    "module:function", called with `arguments`
    seconds     duration at most, where nothing hangs; not started with less
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 60.0


def measure(
    measurements: Sequence[Measurement],
    part_s: float,
    tell: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Rows of the measurements that fit into `part_s`; of the others a row that says so."""
    end, rows = time.monotonic() + part_s, list[Row]()
    for one in measurements:
        left_s = end - time.monotonic()
        if left_s < one.seconds:
            found = [Row(one.name, note=f"not run: needs {one.seconds:.0f} s, {left_s:.0f} s left")]
        else:
            found = run(one)
        for row in found:
            tell(row)
        rows += found
    return rows


def run(measurement: Measurement) -> list[Row]:
    """Rows of one measurement, and one with the reason where it has ended early."""
    with tempfile.TemporaryDirectory(prefix="resihp-gpu-", ignore_cleanup_errors=True) as folder:
        written, log = Path(folder, "rows"), Path(folder, "log")
        arguments = [measurement.function, json.dumps(dict(measurement.arguments)), str(written)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks._gpu_runner", *arguments],
                stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=_ROOT,
                start_new_session=True, env={**os.environ, "TMPDIR": folder},
            )  # fmt: skip
            code = _wait(process, measurement.seconds)
        rows = _read(written, measurement.name)
        if code == 0:
            return rows
        said = log.read_text(errors="replace").strip().splitlines()
        why = f"failed: {said[-1] if said else f'exit code {code}'}"
        if code is None:
            why = f"hung: ended after {measurement.seconds:.0f} s"
        return [*rows, Row(measurement.name, note=why[:200])]


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Exit code, None after `seconds`; ends all processes of the measurement."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_REAPED_S)


def _read(path: Path, name: str) -> list[Row]:
    """Whole lines alone: the last one may be cut."""
    text = path.read_text() if path.exists() else ""
    rows = [Row(**json.loads(line)) for line in text.splitlines(True) if line.endswith("\n")]
    return [replace(row, name=row.name or name) for row in rows]


def main(function: str, arguments: str, path: str) -> None:
    """Measure, and write each row as soon as it is there."""
    module, name = function.split(":")
    with open(path, "a", encoding="utf-8", buffering=1) as file:

        def write(row: Row) -> None:
            file.write(json.dumps(asdict(row)) + "\n")

        try:
            for row in getattr(import_module(module), name)(**json.loads(arguments)):
                write(row)
        except NotRunError as reason:
            write(Row("", note=str(reason)))
    sys.stdout.flush()
    os._exit(0)  # destructors of communicators and threads of peers may wait


if __name__ == "__main__":
    main(*sys.argv[1:])
