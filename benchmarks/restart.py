"""From a lost rank to the next step of a job that restarts: `python -m benchmarks.restart`.

FSDP2 over four ranks (gloo, this machine). Rank 1 is lost in the middle of a step. `resihp run`
restarts from warm processes and the checkpoint in the node's memory, with as many ranks or, where
the device is broken, with one fewer. torchrun restarts its four ranks from torch's distributed
checkpoint on disk, saved each tenth step. `back` is the time until the lost step is completed, with
the steps done again; `next step` that until any step of the second attempt is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._report import machine, print_table, write_json

RANKS, STEPS, LOST_AT = 4, 30, 16
LIMIT_S = 600.0
OURS = ("resihp.launch",)
TORCHRUN = (
    "torch.distributed.run", "--max-restarts=3", "--rdzv-backend=c10d",
    "--rdzv-endpoint=127.0.0.1:0", "--monitor-interval=0.1",
)  # fmt: skip
WAYS = {
    "resihp run, 4 to 4": (OURS, f"{RANKS}", "memory", "kill"),
    "resihp run, 4 to 3": (OURS, f"{RANKS - 1}:{RANKS}", "memory", "device"),
    "torchrun, 4 to 4": (TORCHRUN, f"{RANKS}", "dcp", "kill"),
}
# Without it, torchrun's second attempt reads the addresses that gloo left in the first one's store,
# and fails.
TORCHRUN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
COLUMNS = (
    "model", "way", "back s", "times ours", "next step s", "to script s", "to model s",
    "to state s", "first step s", "usual step s", "steps again",
)  # fmt: skip
Seen = dict[str, float]


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size", choices=("31M", "108M"), action="append")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows: list[list[Any]] = []
    for size in options.size or ("31M", "108M"):
        rounds = [{way: restart(way, size) for way in WAYS} for _ in range(options.repeats)]
        rows += summary(size, rounds)
    print(machine())
    print_table(f"From a lost rank to the next step, medians of {options.repeats}", COLUMNS, rows)
    if options.json:
        write_json(options.json, {"rows": [dict(zip(COLUMNS, r, strict=True)) for r in rows]})


def summary(size: str, rounds: list[dict[str, Seen]]) -> list[list[Any]]:
    """One row a way."""
    rows = []
    ours = statistics.median(one["resihp run, 4 to 4"]["back"] for one in rounds)
    for way in WAYS:
        seen = [one[way] for one in rounds]
        middle = {key: statistics.median(one[key] for one in seen) for key in seen[0]}
        parts = ("total", "script", "model", "state", "first", "usual")
        rows.append(
            [size, way, f"{middle['back']:.2f}", f"{middle['back'] / ours:.1f}"]
            + [f"{middle[part]:.2f}" for part in parts]
            + [f"{middle['again']:.0f}"]
        )
    return rows


def restart(way: str, size: str) -> Seen:
    """Run a job that loses a rank; seconds of the parts of its restart."""
    launcher, processes, kind, end = WAYS[way]
    script = Path(__file__).with_name("_restart_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [kind, size, folder, str(STEPS), str(LOST_AT), end]
        done = subprocess.run(
            [sys.executable, "-m", *launcher, f"--nproc-per-node={processes}", script, *arguments],
            env={
                **os.environ,
                **TORCHRUN_STORE,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(script.parents[1]),
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{way}: status {done.returncode}\n{done.stderr}")
        seen = parts_of(Path(folder))
    print(size, way, {key: round(value, 2) for key, value in seen.items()}, flush=True)
    time.sleep(1.0)
    return seen


def parts_of(folder: Path) -> Seen:
    """Seconds from the loss to the first step of the second attempt, by their parts."""
    before, after = read(folder / "told-0-0"), read(folder / "told-1-0")
    lost = next(one["at"] for one in read(folder / "told-0-1") if one["event"] == "lost")
    at = {one["event"]: one["at"] for one in reversed(after)}
    begun = next(one["step"] for one in after if one["event"] == "restored")
    steps = [one["at"] for one in before if one["event"] == "step"]
    usual = statistics.median(b - a for a, b in pairwise(steps))
    return {
        "back": at["step"] - lost + (LOST_AT - begun) * usual,
        "total": at["step"] - lost,
        "script": at["main"] - lost,
        "model": at["built"] - at["main"],
        "state": at["restored"] - at["built"],
        "first": at["step"] - at["restored"],
        "usual": usual,
        "again": LOST_AT - begun,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """What a rank told."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
