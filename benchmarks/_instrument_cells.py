"""Slow ranks in ordinary loops under `resihp.instrument`: which ranks the sidecar names, and when.

Each cell runs four processes (`resihp.testing.ordinary_loops`) for a fixed number of steps and then
reads every verdict that the sidecar published of the job.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import urllib3

from resihp.testing.local_ranks import LocalRanks
from resihp.testing.ordinary_loops import DocumentLengths, OrdinaryLoop, SlowRank, run_loop
from service import Sidecar

STEPS = 70
ONSET = 20
LATE = 25
"""Steps from the onset after which a right name is late."""
DOUBLED = (30, 40)
_RANKS = 4
_PATIENCE_S = 120.0
_LOOPS = (
    ("ddp", 1), ("ddp", 4), ("fsdp2", 1), ("hsdp", 1), ("tensor_parallel", 1), ("1f1b", 4),
    ("interleaved", 4), ("zero_bubble", 4),
)  # fmt: skip
_PASSES = {"both": ("forward", "backward"), "forward": ("forward",), "backward": ("backward",)}


@dataclass(frozen=True)
class Cell:
    """A kind of loop, and what is slow in it.

    factor   slowdown of one rank; 1.0: all are healthy, one has twice the tokens for ten steps
    passes   a key of `_PASSES`
    since    first slow step
    """

    kind: str
    microbatches: int
    factor: float = 1.0
    passes: str = "both"
    since: int = 0

    @property
    def is_healthy(self) -> bool:
        """True if no rank is slow."""
        return self.factor == 1.0


@dataclass(frozen=True)
class Outcome:
    """Ranks that were named in one run of a cell.

    slow       the rank that was slow; -1: none was
    named      first step in which a rank was called slow, by rank
    since      first slow step according to that verdict, by rank
    last       status and slowdown in the last verdict, by rank
    unapplied  the sidecar did not take all steps into account in time
    seconds    duration of the run
    """

    seed: int
    slow: int
    named: dict[int, int]
    since: dict[int, int | None]
    last: dict[int, tuple[str, float]]
    unapplied: bool
    seconds: float


def cells(*, quick: bool) -> list[Cell]:
    """Return the cells to run."""
    if quick:
        chosen = [("ddp", 1), ("fsdp2", 1), ("1f1b", 4)]
        slow = [Cell(kind, count, 1.5, since=ONSET) for kind, count in chosen]
        return [*slow, Cell("ddp", 1, 1.2, "backward", ONSET), Cell("ddp", 1)]
    found = []
    for kind, count in _LOOPS:
        for factor in (1.5, 1.2):
            found += [Cell(kind, count, factor, passes, ONSET) for passes in _PASSES]
            found.append(Cell(kind, count, factor, "both", 0))
        found.append(Cell(kind, count))
    first = [Cell("ddp", 1, factor, passes) for factor in (1.5, 1.2) for passes in _PASSES]
    return [*found, *(cell for cell in first if cell not in found)]


def run_cells(chosen: Sequence[Cell], seeds: int) -> Iterator[tuple[Cell, list[Outcome]]]:
    """Run each cell once for every seed, with other documents and another slow rank."""
    with tempfile.TemporaryDirectory(prefix="resihp-cells-") as name:
        folder = Path(name)
        with Sidecar(folder / "sidecar") as sidecar:
            for number, cell in enumerate(chosen):
                runs = []
                for seed in range(seeds):
                    job = f"cell-{number}-{seed}"
                    runs.append(_run(sidecar.url, folder / job, cell, job, seed))
                yield cell, runs


def _run(url: str, folder: Path, cell: Cell, job: str, seed: int) -> Outcome:
    rank = (seed + 1) % _RANKS
    documents = DocumentLengths(seed)
    slow = SlowRank(rank, cell.factor, _PASSES[cell.passes], cell.since)
    if cell.is_healthy:
        documents, slow = replace(documents, doubled=(rank, *DOUBLED)), SlowRank()
    loop = OrdinaryLoop(
        cell.kind, STEPS, slow, documents, cell.microbatches, url=url, job=job, ranks=_RANKS
    )
    begun = time.monotonic()
    with LocalRanks(job, folder) as ranks:
        ranks.start(range(_RANKS), run_loop, loop)
        if any(ranks.wait(_PATIENCE_S).values()):
            raise RuntimeError(ranks.logs())
    unapplied = not _wait_until_applied(url, job)
    named, since = _named(url, job)
    verdicts = urllib3.request("GET", f"{url}/v1/jobs/{job}/verdicts").json()["verdicts"]
    last = {each["rank"]: (each["status"], each["slowdown"]) for each in verdicts}
    return Outcome(seed, slow.rank, named, since, last, unapplied, time.monotonic() - begun)


def _wait_until_applied(url: str, job: str, timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = urllib3.request("GET", f"{url}/v1/jobs/{job}").json()
        if not status.get("backlog", 1) and status.get("last_step", -1) >= STEPS - 1:
            return True
        time.sleep(0.05)
    return False


def _named(url: str, job: str) -> tuple[dict[int, int], dict[int, int | None]]:
    """First step in which each rank was called slow, and the first slow step that was told."""
    named: dict[int, int] = {}
    since: dict[int, int | None] = {}
    for event in _events(url, job):
        verdict = event.get("verdict", {})
        if verdict.get("status") == "fail_slow" and verdict["rank"] not in named:
            named[verdict["rank"]] = verdict["step"]
            since[verdict["rank"]] = verdict["since_step"]
    return named, since


def _events(url: str, job: str) -> list[dict[str, Any]]:
    """Return all events of a job that the sidecar keeps."""
    found: list[dict[str, Any]] = []
    address = f"{url}/v1/jobs/{job}/events?replay=true"
    answer = urllib3.request("GET", address, preload_content=False, timeout=20.0)
    try:
        for line in answer:  # lines of the stream, which ends with a sign of life
            if line.startswith(b": keepalive"):
                break
            if line.startswith(b"data: "):
                found.append(json.loads(line.removeprefix(b"data: ")))
    finally:
        answer.close()
    return found


COLUMNS = (
    "loop", "slow rank", "runs", "right", "late", "missed", "wrong names", "steps to name",
    "from step", "at the end",
)  # fmt: skip


def row(cell: Cell, runs: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the row of a cell in a table."""
    taken = [run.named[run.slow] - cell.since for run in runs if run.slow in run.named]
    late = sum(steps > LATE for steps in taken)
    others = [f"{rank}@{step}" for run in runs for rank, step in run.named.items()
              if rank != run.slow]  # fmt: skip
    told = [run.since[run.slow] for run in runs if run.slow in run.named]
    last = [run.last[run.slow] for run in runs if run.slow in run.last]
    healthy = cell.is_healthy
    what = f"{cell.factor}x {cell.passes}, from step {cell.since}"
    name = f"{cell.kind}, {cell.microbatches} microbatch{'es' if cell.microbatches > 1 else ''}"
    return (
        name,
        "none, tokens doubled" if healthy else what,
        str(len(runs)),
        "-" if healthy else str(len(taken) - late),
        "-" if healthy else str(late),
        "-" if healthy else str(len(runs) - len(taken)),
        " ".join(others) or "0",
        f"{statistics.median(taken):.0f}" if taken else "-",
        " ".join("start" if step is None else str(step) for step in told) or "-",
        ", ".join(f"{status} {slowdown:.2f}" for status, slowdown in last) or "-",
    )


def document(results: Sequence[tuple[Cell, list[Outcome]]]) -> list[dict[str, Any]]:
    """Return the results as JSON has them."""
    return [{**asdict(cell), "runs": [asdict(run) for run in runs]} for cell, runs in results]
