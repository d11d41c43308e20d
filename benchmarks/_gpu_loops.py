"""Ordinary loops of four ranks on one device, one of them slow: is it named, and after how long?

The ranks exchange by NCCL through loopback sockets (`resihp.testing.ordinary_loops`).
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._gpu_ranks import side_by_side
from benchmarks._gpu_rows import NotRunError, Row
from benchmarks.hooks import sink
from resihp.contracts import Job, Status, from_json
from resihp.testing.local_ranks import LocalRanks
from resihp.testing.ordinary_loops import (
    TOKENS,
    DocumentLengths,
    OrdinaryLoop,
    PaddedLengths,
    SlowRank,
    recorded_batches,
    run_loop,
)
from resihp.testing.profiled_loops import record_loop

RANKS, SLOW, FACTOR = 4, 1, 1.5
STEPS, ONSET, PROFILED_STEPS = 34, 10, 14
PACES = {
    "ddp": 2.0, "fsdp2": 4.0, "hsdp": 4.0, "tensor_parallel": 4.0, "1f1b": 1.0, "interleaved": 1.0,
    "zero_bubble": 1.0,
}  # fmt: skip
"""Time of a healthy device's microbatch over 20 ms: more where more of a step is NCCL's."""
PIPELINES = ("1f1b", "interleaved", "zero_bubble")
DOUBLED = (ONSET, ONSET + 10)
PATIENCE_S = 90.0
_STEPS_ASKED = 8.0


def loop_of(kind: str, device: str, small: bool, steps: int, slow: SlowRank) -> OrdinaryLoop:
    """A loop of these ranks."""
    return OrdinaryLoop(
        kind, steps, slow, microbatches=4 if kind in PIPELINES else 1, job=kind, ranks=RANKS,
        pace=PACES[kind] * (0.2 if small else 1.0), device=device,
    )  # fmt: skip


def named(
    device: str,
    small: bool,
    kind: str,
    factor: float = FACTOR,
    passes: Sequence[str] = ("forward", "backward"),
) -> Iterator[Row]:
    """Slow steps of a rank until `instrument` and the detector name it."""
    slow = SlowRank(SLOW, factor, tuple(passes), since=ONSET)
    found = _named(loop_of(kind, device, small, STEPS, slow))
    steps = {rank: at - ONSET + 1 for rank, at in found.items()}
    words = f"{kind}, rank {SLOW} {factor}x slow in {' and '.join(passes)}: steps until named"
    yield _row(words, steps, "", _STEPS_ASKED, "asked")


def healthy(device: str, small: bool, kind: str) -> Iterator[Row]:
    """Ranks named where one has twice the tokens for ten steps, and none is slow."""
    loop = loop_of(kind, device, small, STEPS, SlowRank())
    found = _named(replace(loop, documents=DocumentLengths(0, doubled=(SLOW, *DOUBLED))))
    note = f"named: {sorted(found)}" if found else ""
    yield Row(
        f"{kind}, twice the tokens on rank {SLOW}: ranks named", len(found), "", 0.0, "", note
    )


def _named(loop: OrdinaryLoop) -> dict[int, int]:
    with side_by_side(loop.device), tempfile.TemporaryDirectory() as name, sink() as address:
        return run_recorded(loop, address, Path(name))


def run_recorded(loop: OrdinaryLoop, address: str, folder: Path) -> dict[int, int]:
    """Run a loop whose ranks keep what they send in `folder`; the step in which each rank that the
    detector calls slow was first called so."""
    detectors = _needed("detector")
    sent = folder / "sent"
    sent.mkdir()
    recorded = replace(loop, url=address, recording=sent)
    with LocalRanks(loop.job, folder / "logs") as ranks:
        ranks.start(range(loop.ranks), run_loop, recorded)
        if any(ranks.wait(PATIENCE_S).values()):
            raise RuntimeError(ranks.logs())
    job = from_json(Job, json.loads((sent / "job.json").read_text()))
    detector, found = detectors.Detector(job), dict[int, int]()
    for batch in recorded_batches(sent):
        for verdict in detector.update(batch):
            if verdict.status is Status.FAIL_SLOW:
                found.setdefault(verdict.rank, int(batch.step[0]))
    return found


def profiled(device: str, small: bool, kind: str) -> Iterator[Row]:
    """The slow rank by what torch's profiler records of a loop that nothing else observes."""
    offline = _needed("resihp.offline")
    with side_by_side(device), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loop = loop_of(kind, device, small, PROFILED_STEPS, SlowRank(SLOW, FACTOR))
        least = TOKENS - 1 if loop.microbatches > 1 else TOKENS // 2  # stages take one shape
        record_loop(replace(loop, documents=PaddedLengths(0, least=least)), folder)
        result = offline.analyze(offline.read_trace(folder))
    slow = [each for each in result.verdicts if each.status is Status.FAIL_SLOW]
    slowdowns = {each.rank: each.slowdown for each in slow}
    words = f"{kind}, profiler's files: slowdown of rank {SLOW}"
    yield _row(words, slowdowns, "x", FACTOR, "made")


def _row(name: str, found: Mapping[int, float], unit: str, limit: float, of: str) -> Row:
    """What was found of the slow rank, and who else was named."""
    others = sorted(set(found) - {SLOW})
    notes = [] if SLOW in found else ["missed"]
    notes += [f"also named: {others}"] if others else []
    return Row(name, found.get(SLOW), unit, limit, of, ", ".join(notes))


def _needed(module: str) -> Any:
    """Return a module of what judges. Raises `NotRunError` where its packages are missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotRunError(f"not run: {error}") from error
