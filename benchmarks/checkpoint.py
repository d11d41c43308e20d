"""What a checkpoint costs a training loop: ours, `torch.save`, and every mode of torch's dcp.

Each way runs in a process of its own that trains in turn without and with checkpoints, so that
slow-downs compare neighbours in time; repetitions interleave the ways. Blocking is what the
training thread spends in the calls, fences and waits for earlier checkpoints included. The disk's
limit is measured in each process: direct writes of as many bytes from several threads and nothing
else, into a new file and over an old file's bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._checkpoint_disk import limit_s
from benchmarks._checkpoint_modes import MODES
from benchmarks._report import machine, print_table, write_json

Run = dict[str, Any]

OURS, REFERENCE = "ResiHP", "torch.save"
COLUMNS = (
    "way", "blocking ms", "of torch.save's", "slow-down, each step", "each 5th", "durable s",
    "of a new file's", "of an old one's", "extra memory", "skipped",
)  # fmt: skip


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gib", type=float, action="append", help="size of the state; 1")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="of each phase of a loop")
    parser.add_argument("--way", choices=sorted(set(MODES) - {"none"}), action="append")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    options = parser.parse_args()
    ways = options.way or [way for way in MODES if way != "none"]
    root = Path(tempfile.mkdtemp(prefix="resihp-checkpoint-", dir=options.folder))
    document: dict[str, Any] = {}
    try:
        print(machine())
        for gib in options.gib or [1.0]:
            runs = measure(gib, ways, options.repeats, options.steps, root)
            rows = [row(way, runs) for way in ways]
            shown = limits(runs)
            title = f"Checkpoints of {gib:g} GiB; {shown}"
            print_table(title, COLUMNS, rows)
            document[f"{gib:g} GiB"] = {
                "rows": [dict(zip(COLUMNS, cells, strict=True)) for cells in rows],
                "limit": shown,
                "runs": runs,
            }
    finally:
        shutil.rmtree(root)
    if options.json:
        write_json(options.json, document)


def measure(
    gib: float, ways: list[str], repeats: int, steps: int, root: Path
) -> dict[str, list[Run]]:
    """Every way, the repetitions interleaved; a step lasts 1.2 times as long as the disk needs."""
    step_s = 1.2 * statistics.median(
        limit_s(root, int(gib * 2**30) // 4096 * 4096)["new"] for _ in range(3)
    )
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    for number in range(repeats):
        for way in ways:
            arguments = [way, str(root), str(gib), str(step_s), str(steps)]
            command = [sys.executable, "-m", "benchmarks._checkpoint_worker", *arguments]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=900, check=True
            )
            run: Run = json.loads(done.stdout.splitlines()[-1])
            runs[way].append(run)
            blocking = statistics.median(run["each"]["blocking_s"])
            print(f"{number}  {way}: blocking {1e3 * blocking:.1f} ms", flush=True)
    return runs


def row(way: str, runs: dict[str, list[Run]]) -> list[str]:
    """Medians over all repetitions."""
    mine = runs[way]
    blocking = _blocking(mine)
    reference = _blocking(runs[REFERENCE]) if REFERENCE in runs else None
    durable = [s for run in mine for s in run["durable_s"]]
    lasting = statistics.median(durable) if durable else None
    extra = statistics.median(run["extra_bytes"] / run["state_bytes"] for run in mine)
    return [
        way,
        f"{1e3 * blocking:.1f}",
        f"1/{reference / blocking:.0f}" if reference and reference >= blocking else "-",
        *(f"{_percent(mine, cadence):+.1f}%" for cadence in ("each", "fifth")),
        f"{lasting:.2f}" if lasting else "-",
        *(f"{lasting / _limit(runs, k):.2f}x" if lasting else "-" for k in ("new", "again")),
        f"{extra:.2f}x",
        str(sum(run["skipped"] for run in mine)),
    ]


def limits(runs: dict[str, list[Run]]) -> str:
    """The disk's own limit, and the step of the loops."""
    gib = next(iter(runs.values()))[0]["state_bytes"] / 1e9
    rates = {kind: gib / _limit(runs, kind) for kind in ("new", "again")}
    step = statistics.median(run["base_s"] for each in runs.values() for run in each)
    return (
        f"disk {rates['new']:.1f} GB/s into new files, {rates['again']:.1f} GB/s over old ones; "
        f"a step without checkpoints {step:.2f} s"
    )


def _limit(runs: dict[str, list[Run]], kind: str) -> float:
    times: list[float] = [run["limit_s"][kind] for each in runs.values() for run in each]
    return statistics.median(times)


def _blocking(runs: list[Run]) -> float:
    times: list[float] = [s for run in runs for s in run["each"]["blocking_s"]]
    return statistics.median(times)


def _percent(runs: list[Run], cadence: str) -> float:
    ratios: list[float] = [run[cadence]["slowdown"] for run in runs]
    return 100 * (statistics.median(ratios) - 1)


if __name__ == "__main__":
    main()
