"""Slow ranks in ordinary loops under `resihp.instrument`: which ranks are named, and when.

Each cell runs four processes (`resihp.testing.ordinary_loops`) for a fixed number of steps and then
reads every verdict that the sidecar published of the job. The ranks' messages hold many steps, so
the steps that the detector needed are counted by taking the recorded telemetry step by step.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import urllib3

from detector import Detector
from resihp.contracts import Job, Status, from_json
from resihp.offline import read_trace, write_trace
from resihp.testing.local_ranks import LocalRanks
from resihp.testing.ordinary_loops import (
    DocumentLengths,
    OrdinaryLoop,
    SlowRank,
    recorded_batches,
    run_loop,
)
from service import Sidecar

from ._instrument_slowed import Slowing, detector_steps, least_steps
from ._instrument_traceml import TraceMLRuns

STEPS = 70
ONSET = 20
LATE = 25
"""Steps from the onset after which a right name is late."""
DOUBLED = (30, 40)
_RANKS = 4
_PATIENCE_S = 120.0
_READERS = 32
_LOOPS = (
    ("ddp", 1, 1.0), ("ddp", 4, 1.0), ("fsdp2", 1, 1.0), ("fsdp2", 1, 4.0), ("hsdp", 1, 1.0),
    ("hsdp", 1, 4.0), ("tensor_parallel", 1, 1.0), ("tensor_parallel", 1, 4.0), ("1f1b", 4, 1.0),
    ("interleaved", 4, 1.0), ("zero_bubble", 4, 1.0),
)  # fmt: skip
"""Kinds, microbatches a step, and pace: at 1.0 a microbatch takes a device 20 ms, which is little
beside what FSDP2 and DTensor compute on the host for it."""
_WHOLE = ("ddp", "fsdp2", "hsdp", "tensor_parallel")
"""Kinds in which each rank runs whole microbatches."""
_PASSES = {"both": ("forward", "backward"), "forward": ("forward",), "backward": ("backward",)}


@dataclass(frozen=True)
class Cell:
    """A kind of loop, and what is slow in it.

    factor   slowdown of one rank; 1.0: all are healthy, one has twice the tokens for ten steps
    passes   a key of `_PASSES`
    since    first slow step
    pace     time of a healthy device over 20 ms for a microbatch
    """

    kind: str
    microbatches: int
    factor: float = 1.0
    passes: str = "both"
    since: int = 0
    pace: float = 1.0

    @property
    def is_healthy(self) -> bool:
        """True if no rank is slow."""
        return self.factor == 1.0

    @property
    def name(self) -> str:
        """Name of the cell's job, and of its recordings."""
        what = f"{self.factor}-{self.passes}-{self.since}"
        return f"{self.kind}-{self.microbatches}-{20 * self.pace:.0f}ms-{what}"

    def slow_rank(self, seed: int) -> int:
        """Rank that is slow, or has twice the tokens, in the run of a seed."""
        return (seed + 1) % _RANKS


@dataclass(frozen=True)
class Names:
    """Ranks that a detector called slow: the first step in which it did, the first slow step by
    that verdict, and the status and slowdown in its last verdict; by rank."""

    named: dict[int, int]
    since: dict[int, int | None]
    last: dict[int, tuple[str, float]]


@dataclass(frozen=True)
class Outcome:
    """Ranks that were named in one run of a cell.

    slow      the rank that was slow; -1: none was
    steps     by the detector, step by step
    told      first step in a message by which the sidecar called a rank slow; None: not run live
    seconds   duration of the run
    peer      TraceML's verdict on a run of its own; "-" if there was none
    """

    seed: int
    slow: int
    steps: Names
    told: dict[int, int] | None = None
    seconds: float = 0.0
    peer: str = "-"


def cells(*, quick: bool) -> list[Cell]:
    """Return the cells to run."""
    if quick:
        chosen = [("ddp", 1), ("fsdp2", 1), ("1f1b", 4)]
        slow = [Cell(kind, count, 1.5, since=ONSET) for kind, count in chosen]
        return [*slow, Cell("ddp", 1, 1.2, "backward", ONSET), Cell("ddp", 1)]
    found = []
    for kind, count, pace in _LOOPS:
        for factor in (1.5, 1.2):
            found += [Cell(kind, count, factor, passes, ONSET, pace) for passes in _PASSES]
            found.append(Cell(kind, count, factor, "both", 0, pace))
        found.append(Cell(kind, count, pace=pace))
    first = [Cell("ddp", 1, factor, passes) for factor in (1.5, 1.2) for passes in _PASSES]
    return [*found, *(cell for cell in first if cell not in found)]


@contextmanager
def busy_processors(count: int) -> Iterator[None]:
    """Run so many busy loops meanwhile, as other programs on the machine."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_cells(
    chosen: Sequence[Cell], seeds: int, recordings: Path, *, peer: bool
) -> Iterator[tuple[Cell, list[Outcome]]]:
    """Run each cell once for every seed, with other documents and another slow rank; keep the
    telemetry of each run in the folder `recordings`. With the `peer`, cells of DDP run under
    TraceML, too."""
    recordings.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="resihp-cells-") as name:
        folder = Path(name)
        traceml = None
        if peer and any(cell.kind == "ddp" for cell in chosen):
            traceml = TraceMLRuns(folder / "traceml")
        with Sidecar(folder / "sidecar") as sidecar:
            for cell in chosen:
                runs = []
                for seed in range(seeds):
                    loop = _loop(cell, seed)
                    run = _run(replace(loop, url=sidecar.url), folder, recordings, seed)
                    if traceml is not None and cell.kind == "ddp":
                        run = replace(run, peer=traceml.verdict(loop))
                    runs.append(run)
                yield cell, _with_told(sidecar.url, cell, runs)


def recorded_cells(
    chosen: Sequence[Cell], recordings: Path
) -> Iterator[tuple[Cell, list[Outcome]]]:
    """Take the recorded telemetry of each cell step by step, without running it."""
    for cell in chosen:
        runs = []
        for path in sorted(recordings.glob(f"{cell.name}-*.parquet")):
            seed = int(path.stem.rsplit("-", 1)[1])
            slow = -1 if cell.is_healthy else cell.slow_rank(seed)
            runs.append(Outcome(seed, slow, names_by_steps(path)))
        if runs:
            yield cell, runs


def names_by_steps(path: Path) -> Names:
    """Take recorded telemetry step by step."""
    trace = read_trace(path)
    detector = Detector(trace.job)
    names = Names({}, {}, {})
    for batch in trace.batches():
        for verdict in detector.update(batch):
            if verdict.status is Status.FAIL_SLOW and verdict.rank not in names.named:
                names.named[verdict.rank] = int(batch.step[0])
                names.since[verdict.rank] = verdict.since_step
    last = {each.rank: (each.status.value, each.slowdown) for each in detector.verdicts()}
    names.last.update(last)
    return names


def _loop(cell: Cell, seed: int) -> OrdinaryLoop:
    rank = cell.slow_rank(seed)
    documents = DocumentLengths(seed)
    slow = SlowRank(rank, cell.factor, _PASSES[cell.passes], cell.since)
    if cell.is_healthy:
        documents, slow = replace(documents, doubled=(rank, *DOUBLED)), SlowRank()
    return OrdinaryLoop(
        cell.kind, STEPS, slow, documents, cell.microbatches,
        job=_job(cell, seed), ranks=_RANKS, pace=cell.pace,
    )  # fmt: skip


def _job(cell: Cell, seed: int) -> str:
    return f"{cell.name}-{seed}"


def _run(loop: OrdinaryLoop, folder: Path, recordings: Path, seed: int) -> Outcome:
    job, sent = loop.job, folder / loop.job / "sent"
    sent.mkdir(parents=True)
    begun = time.monotonic()
    with LocalRanks(job, folder / job) as ranks:
        ranks.start(range(_RANKS), run_loop, replace(loop, recording=sent))
        if any(ranks.wait(_PATIENCE_S).values()):
            raise RuntimeError(ranks.logs())
    trace = recordings / f"{job}.parquet"
    write_trace(trace, from_json(Job, json.loads((sent / "job.json").read_text())),
                recorded_batches(sent))  # fmt: skip
    shutil.rmtree(folder / job)
    seconds = time.monotonic() - begun
    return Outcome(seed, loop.slow.rank, names_by_steps(trace), seconds=seconds)


def _with_told(url: str, cell: Cell, runs: Sequence[Outcome]) -> list[Outcome]:
    """Add what the sidecar told. Its streams of events pause for seconds where they end, so all
    are read at once, after the last run."""
    with ThreadPoolExecutor(_READERS) as readers:
        told = readers.map(lambda run: _told(url, _job(cell, run.seed)), runs)
        return [replace(run, told=each) for run, each in zip(runs, told, strict=True)]


def _told(url: str, job: str) -> dict[int, int]:
    _wait_until_applied(url, job)
    told: dict[int, int] = {}
    for verdict in _named(url, job):
        told.setdefault(verdict["rank"], verdict["step"])
    return told


def _wait_until_applied(url: str, job: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = urllib3.request("GET", f"{url}/v1/jobs/{job}").json()
        if not status.get("backlog", 1) and status.get("last_step", -1) >= STEPS - 1:
            return
        time.sleep(0.05)
    raise TimeoutError(f"the sidecar has not taken all steps of {job} into account")


def _named(url: str, job: str) -> list[dict[str, Any]]:
    """Return all verdicts that called a rank slow."""
    found = (event.get("verdict", {}) for event in _events(url, job))
    return [verdict for verdict in found if verdict.get("status") == "fail_slow"]


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
    "each rank", "oracle", "told after", "from step", "at the end", "TraceML at the end",
)  # fmt: skip


def by_slowing(cell: Cell, recordings: Path) -> tuple[str, str]:
    """Return the steps that the detector and an oracle need for each rank in turn, if healthy ranks
    of the loop have been recorded.

    Not for pipelines, whose passes are parts of a microbatch, nor without healthy steps before.
    """
    healthy = replace(cell, factor=1.0, passes="both", since=0)
    recorded = sorted(recordings.glob(f"{healthy.name}-*.parquet"))
    if cell.is_healthy or not cell.since or cell.kind not in _WHOLE or not recorded:
        return "-", "-"
    slowing = Slowing(cell.factor, _PASSES[cell.passes], cell.pace, cell.since)
    each = statistics.median(detector_steps(one, slowing) for one in recorded)
    least = statistics.median(least_steps(one, slowing) for one in recorded)
    return _steps(each), _steps(least)


def _steps(count: float) -> str:
    return f"{count:.0f}" if math.isfinite(count) else "-"


def row(cell: Cell, runs: Sequence[Outcome], recordings: Path) -> tuple[str, ...]:
    """Return the row of a cell in a table."""
    right = [run for run in runs if run.slow in run.steps.named]
    taken = [run.steps.named[run.slow] - cell.since + 1 for run in right]
    told = [
        run.told[run.slow] - cell.since + 1 for run in runs if run.told and run.slow in run.told
    ]
    late = sum(steps > LATE for steps in taken)
    others = [
        f"{rank}@{step}"
        for run in runs
        for names in (run.steps.named, run.told or {})
        for rank, step in names.items()
        if rank != run.slow
    ]
    since = [run.steps.since[run.slow] for run in right]
    last = [run.steps.last[run.slow] for run in runs if run.slow in run.steps.last]
    healthy = cell.is_healthy
    what = f"{cell.factor}x {cell.passes}, from step {cell.since}"
    name = f"{cell.kind}, {cell.microbatches} x {20 * cell.pace:.0f} ms"
    return (
        name,
        "none, tokens doubled" if healthy else what,
        str(len(runs)),
        "-" if healthy else str(len(taken) - late),
        "-" if healthy else str(late),
        "-" if healthy else str(len(runs) - len(taken)),
        " ".join(others) or "0",
        " ".join(map(str, sorted(taken))) or "-",
        *by_slowing(cell, recordings),
        f"{statistics.median(told):.0f}" if told else "-",
        " ".join("start" if step is None else str(step) for step in since) or "-",
        ", ".join(f"{status} {slowdown:.2f}" for status, slowdown in last) or "-",
        _counted(run.peer for run in runs),
    )


def _counted(words: Iterable[str]) -> str:
    """Distinct words, with how often each comes if that is more than once."""
    counts = Counter(words).most_common()
    return ", ".join(word if count == 1 else f"{count} {word}" for word, count in counts)


def document(results: Sequence[tuple[Cell, list[Outcome]]]) -> list[dict[str, Any]]:
    """Return the results as JSON has them."""
    return [{**asdict(cell), "runs": [asdict(run) for run in runs]} for cell, runs in results]
