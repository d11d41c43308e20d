"""Cost of checkpoints in a training loop: ResiHP, `torch.save`, and every mode of torch's DCP.

Each mode runs in a process of its own that trains alternately without and with checkpoints, so that
slow-downs compare neighbours in time; reported are medians and quartiles of these rounds. Blocking
is the time of the training thread in the calls, including fences and waits for earlier checkpoints.

The disk is measured in two ways: its own limit (direct writes of the same number of bytes from
memory, into a new file and over an existing one), and the cost of these writes alone, without a
checkpoint, to the same loop.

`--breakdown` breaks the slow-down by ResiHP down instead; see `_checkpoint_breakdown`.
`--ranks 4` measures jobs of several ranks instead, beside peers; see `_checkpoint_ranks`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import _checkpoint_breakdown as parts
from benchmarks import _checkpoint_ranks
from benchmarks._checkpoint_disk import limit_s
from benchmarks._checkpoint_modes import MODES
from benchmarks._report import machine, print_table, write_json

Run = dict[str, Any]
Limits = dict[str, float]

OURS, FLOOR, REFERENCE = "ResiHP", "writes alone", "torch.save"
LONGER = (OURS, FLOOR)
"""Fast modes, compared with each other in more rounds and more loops than the rest."""
FEW_ROUNDS = 2
COLUMNS = (
    "mode", "blocking ms", "of torch.save's", "slow-down, each step", "quartiles", "each 5th",
    "durable s",
    "of a new file's", "of an old one's", "extra memory", "skipped",
)  # fmt: skip


@dataclass(frozen=True)
class Loop:
    """A training loop: number of threads, and length of a step relative to the disk's time."""

    threads: int
    times_the_disk: float

    def __str__(self) -> str:
        cores = f"{self.threads} of {os.cpu_count()} cores"
        return f"trains on {cores}, step at least {self.times_the_disk:g}x the disk's time"


MAIN = Loop(threads=1, times_the_disk=1.2)
OTHERS = (Loop(os.cpu_count() or 1, 1.2), Loop(1, 3.0))


def main() -> None:
    """Measure, print, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gib", type=float, action="append", help="size of the state; 1 and 2")
    parser.add_argument("--steps", type=int, default=3, help="without, then with checkpoints")
    parser.add_argument("--mode", choices=sorted(set(MODES) - {"none"}), action="append")
    parser.add_argument("--breakdown", action="store_true", help="parts of the slow-down")
    parser.add_argument("--ranks", type=int, help="measure jobs of so many ranks; an even number")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="with --ranks")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds is 2 or more")
    modes = options.mode or [mode for mode in MODES if mode != "none"]
    root = Path(tempfile.mkdtemp(prefix="resihp-checkpoint-", dir=options.folder))
    document: dict[str, Any] = {}
    try:
        print(machine())
        if options.breakdown:
            for gib, loop in product(options.gib or [1.0], (MAIN, OTHERS[0])):
                document |= break_down(gib, loop, options.rounds, root)
            options.gib = []
        if options.ranks:
            for gib in options.gib or [1.0]:
                document |= several_ranks(gib, options, root)
            options.gib = []
        for number, gib in enumerate([1.0, 2.0] if options.gib is None else options.gib):
            loops = (MAIN, *OTHERS) if number == 0 else (MAIN,)
            for loop in loops:
                chosen = modes if loop is MAIN else [mode for mode in modes if mode in LONGER]
                runs, disk = measure(gib, chosen, loop, options.rounds, options.steps, root)
                document |= report(f"{gib:g} GiB", loop, runs, disk)
    finally:
        shutil.rmtree(root)
    if options.json:
        write_json(options.json, document)


def break_down(gib: float, loop: Loop, rounds: int, root: Path) -> Run:
    """Measure, print and return the parts of the slow-down of one loop."""
    disk = limit_s(root, int(gib * 2**30))
    step_s = loop.times_the_disk * disk["new"]
    found = parts.breakdown(root / "parts", gib, step_s, loop.threads, rounds)
    size = f"{gib:g} GiB, {loop}"
    title = f"Parts of the slow-down, {size}; a step {found['step_s']:.2f} s, {rounds} rounds"
    print_table(title, parts.COLUMNS, found["rows"])
    cells = [dict(zip(parts.COLUMNS, row, strict=True)) for row in found["rows"]]
    return {f"parts of the slow-down, {size}": {"rows": cells, "step_s": found["step_s"]}}


def several_ranks(gib: float, options: argparse.Namespace, root: Path) -> Run:
    """Measure, print and return the jobs of several ranks."""
    jobs, notes = _checkpoint_ranks.measure_ranks(
        options.ranks, gib, options.steps, options.rounds, root, with_peers=options.peers
    )
    for kind, found in jobs.items():
        base = statistics.median(r["base_s"] for r in found["modes"].values() if "base_s" in r)
        title = f"{kind}, {options.ranks} ranks, state of {found['state_bytes'] / 2**30:.2f} GiB, "
        title += f"a checkpoint at each step; a step without {base:.2f} s"
        print_table(title, _checkpoint_ranks.COLUMNS, _checkpoint_ranks.rows(found))
    print("Peers: " + "; ".join(notes))
    return {f"{options.ranks} ranks, {kind}, {gib:g} GiB": found for kind, found in jobs.items()}


def measure(
    gib: float, modes: Sequence[str], loop: Loop, rounds: int, steps: int, root: Path
) -> tuple[dict[str, Run], Limits]:
    """Measure every mode, and the disk's limits before, between and after."""
    nbytes = int(gib * 2**30)
    disk = [limit_s(root, nbytes)]
    step_s = loop.times_the_disk * disk[0]["new"]
    runs: dict[str, Run] = {}
    for mode in modes:
        turns = rounds if mode in LONGER else FEW_ROUNDS
        arguments = [mode, root, gib, step_s, steps, turns, loop.threads]
        command = [sys.executable, "-m", "benchmarks._checkpoint_worker", *map(str, arguments)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=900, check=True
        )
        runs[mode] = run = json.loads(done.stdout.splitlines()[-1])
        blocking = statistics.median(run["each"]["blocking_s"])
        print(f"{mode}: blocking {1e3 * blocking:.1f} ms", flush=True)
        disk.append(limit_s(root, nbytes))
    return runs, {kind: statistics.median(each[kind] for each in disk) for kind in disk[0]}


def report(size: str, loop: Loop, runs: dict[str, Run], disk: Limits) -> Run:
    """Print the table of one loop; return it as an object."""
    rows, shown = [row(mode, runs, disk) for mode in runs], summary(runs, disk)
    print_table(f"Checkpoints of {size}, {loop}; {shown}", COLUMNS, rows)
    cells = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return {f"{size}, {loop}": {"rows": cells, "limit": shown, "runs": runs}}


def row(mode: str, runs: dict[str, Run], disk: Limits) -> list[str]:
    """Format the medians over all rounds of one mode."""
    run = runs[mode]
    blocking = statistics.median(run["each"]["blocking_s"])
    reference = statistics.median(runs[REFERENCE]["each"]["blocking_s"]) if REFERENCE in runs else 0
    durable = statistics.median(run["durable_s"]) if run["durable_s"] else None
    low, middle, high = statistics.quantiles(run["each"]["slowdowns"], n=4)
    return [
        mode,
        f"{1e3 * blocking:.1f}",
        f"1/{reference / blocking:.0f}" if reference >= blocking else "-",
        f"{_percent(middle)}%",
        f"{_percent(low)}..{_percent(high)}%",
        f"{_percent(statistics.median(run['fifth']['slowdowns']))}%",
        f"{durable:.2f}" if durable else "-",
        *(f"{durable / disk[k]:.2f}x" if durable else "-" for k in ("new", "again")),
        f"{run['extra_bytes'] / run['state_bytes']:.2f}x",
        str(run["skipped"]),
    ]


def summary(runs: dict[str, Run], disk: Limits) -> str:
    """Describe the disk's limits and the step of the loops."""
    size = next(iter(runs.values()))["state_bytes"] / 1e9
    step = statistics.median(run["base_s"] for run in runs.values())
    return (
        f"disk {size / disk['new']:.1f} GB/s into new files, {size / disk['again']:.1f} GB/s over "
        f"old ones; a step without checkpoints {step:.2f} s"
    )


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}"


if __name__ == "__main__":
    main()
