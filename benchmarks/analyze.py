"""`resihp analyze`: time, start-up included, and memory, on jobs of the published traces' shapes.

The published analyzer has no release to install beside it, so that no peer runs here. With
`RESIHP_TRACES` naming a folder with the published traces, they are measured as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._report import machine, print_table, write_json
from resihp.testing.cuda_profiles import CudaJob
from resihp.testing.synthetic_traces import Recipe, record, write_whatif

_SHAPES = {
    "2 replicas x 4 stages, 32 steps": Recipe(
        dp=2, pp=4, microbatches=4, steps=32, stage_weight=(1, 1, 1, 1.5)
    ),
    "32 replicas x 2 stages, 43 steps": Recipe(
        dp=32, pp=2, microbatches=8, steps=43, work_spread=0.3
    ),
    "512 replicas x 2 stages, 43 steps": Recipe(
        dp=512, pp=2, microbatches=8, steps=43, work_spread=0.3
    ),
}
_CHILD = """
import sys
from resihp.cli import main
sys.argv = ["resihp", *sys.argv[1:]]
try:
    main()
finally:
    lines = open("/proc/self/status").read().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")), file=sys.stderr)
"""


@dataclass(frozen=True)
class Run:
    """One run of the command: seconds from start to exit, MiB at most, and what it found."""

    seconds: float
    mebibytes: float
    found: dict[str, Any]


def analyze(path: Path) -> Run:
    """Runs the command on a trace in a process of its own."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, "analyze", str(path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.perf_counter() - start
    return Run(seconds, int(done.stderr.split()[-1]) / 1024, json.loads(done.stdout))


def measure(traces: dict[str, Path], repeats: int) -> list[dict[str, Any]]:
    """The quickest of some runs on each trace."""
    import pyarrow.parquet as pq

    rows = []
    for name, path in traces.items():
        runs = [analyze(path) for _ in range(repeats)]
        best = min(runs, key=lambda run: run.seconds)
        operations = pq.ParquetFile(path).metadata.num_rows
        rows.append(
            {
                "job": name,
                "operations": operations,
                "seconds": round(best.seconds, 2),
                "peak MiB": round(best.mebibytes),
                "µs per operation": round(1e6 * best.seconds / operations, 1),
                "slowdown": round(best.found["slowdown"], 4),
                "root cause": best.found["root_cause"],
            }
        )
    return rows


def measure_profile(folder: Path, steps: int) -> dict[str, Any]:
    """One run on profiler files of 8 ranks, of which one computes 1.3 times as long."""
    CudaJob(ranks=8, slow=5, factor=1.3, steps=steps, operators=200).write(folder, packed=False)
    run = analyze(folder)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    return {
        "job": f"profiler files of 8 ranks, {steps} steps",
        "MiB": round(size),
        "seconds": round(run.seconds, 1),
        "peak MiB": round(run.mebibytes),
        "MiB per second": round(size / run.seconds),
        "named": [d["rank"] for d in run.found["devices"] if d["verdict"] == "fail_slow"],
    }


def made_up(folder: Path) -> dict[str, Path]:
    """Writes the made-up jobs."""
    traces = {}
    for index, (name, recipe) in enumerate(_SHAPES.items()):
        traces[name] = folder / f"{index}.parquet"
        write_whatif(traces[name], record(recipe))
    return traces


def published() -> dict[str, Path]:
    """The published traces, if they are there."""
    folder = os.environ.get("RESIHP_TRACES")
    files = sorted(Path(folder).glob("trace-*.parquet")) if folder else []
    return {file.name: file for file in files}


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.analyze", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile-steps", type=int, default=150, help="0: no profiler files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(published() | made_up(Path(folder)), arguments.repeats)
        profiles = Path(folder) / "profiles"
        profiles.mkdir()
        steps = arguments.profile_steps
        profiled = [measure_profile(profiles, steps)] if steps else []
    for table in filter(None, (rows, profiled)):
        columns = list(table[0])
        print_table("resihp analyze --json", columns, [[row[c] for c in columns] for row in table])
    print(f"\n{machine()}")
    if arguments.json:
        write_json(arguments.json, {"rows": rows, "profiled": profiled})


if __name__ == "__main__":
    main()
