"""A whole replica that becomes slower, by its devices or by its work, where no lengths tell which.

Nobody may be named: the data cannot tell, so it is `inconclusive`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks._detector_cases import job_of, text_lengths, trace_path
from detector import Detector
from resihp.contracts import Job, Op, Status, TelemetryBatch
from resihp.testing.scenarios import Surge, steps_of, whole_replica

FACTORS = (1.03, 1.05, 1.1, 1.2, 1.5, 2.0)
SHAPES = ((2, 2, 1), (2, 4, 1), (4, 4, 1), (16, 2, 1), (4, 2, 2), (4, 1, 4))
_ONSET = 12


def outcome(job: Job, stream: Iterable[TelemetryBatch]) -> tuple[bool, bool]:
    """Whether anyone was ever named, and whether anyone is inconclusive in the end."""
    detector, named = Detector(job), False
    for batch in stream:
        named |= any(v.status is Status.FAIL_SLOW for v in detector.update(batch))
    return named, any(v.status is Status.INCONCLUSIVE for v in detector.verdicts())


def replica_rows(seeds: int) -> list[list[str]]:
    """One line for each kind of job, over all factors."""
    rows = [_row(name, runs) for name, runs in _recorded(seeds)]
    for dp, pp, tp in SHAPES:
        job = job_of(dp, pp, tp, per_replica=4)
        name = f"DP{dp} PP{pp} TP{tp}"
        rows.append(_row(f"{name}, its devices", _devices(job, seeds)))
        rows.append(_row(f"{name}, its work", _work(job, seeds)))
    return rows


def _row(name: str, outcomes: Iterable[tuple[bool, bool]]) -> list[str]:
    found = list(outcomes)
    named, unclear = (sum(column) for column in zip(*found, strict=True))
    return [name, str(len(found)), str(named), str(unclear)]


def _devices(job: Job, seeds: int) -> Iterator[tuple[bool, bool]]:
    lengths = text_lengths()
    for factor in FACTORS:
        for seed in range(max(seeds, 1)):
            faults = whole_replica(job, seed % job.layout.dp, factor, _ONSET)
            stream = steps_of(job, lengths, steps=30, seed=seed, faults=faults, with_lengths=False)
            yield outcome(job, stream)


def _work(job: Job, seeds: int) -> Iterator[tuple[bool, bool]]:
    lengths = text_lengths()
    for factor in FACTORS:
        for seed in range(max(seeds, 1)):
            surge = Surge(
                replica=seed % job.layout.dp, factor=factor, from_step=_ONSET, longer=seed % 2 == 0
            )
            stream = steps_of(job, lengths, steps=30, seed=seed, surges=[surge], with_lengths=False)
            yield outcome(job, stream)


def _recorded(seeds: int) -> Iterator[tuple[str, Iterator[tuple[bool, bool]]]]:
    from resihp.offline import read_trace

    for name in ("SE", "ST"):
        path = trace_path(name)
        if path is not None:
            trace = read_trace(path)
            yield f"{name}, its devices", _injected(trace.job, list(trace.batches()), seeds)


def _injected(
    job: Job, batches: Sequence[TelemetryBatch], seeds: int
) -> Iterator[tuple[bool, bool]]:
    for factor in FACTORS:
        for seed in range(max(2 * seeds, 1)):
            rng = np.random.default_rng(seed)
            ranks = job.layout.replicas[int(rng.integers(job.layout.dp))].ranks
            onset = int(rng.integers(3, len(batches) - 12))
            yield outcome(job, _slowed(batches, ranks, factor, onset))


def _slowed(
    batches: Sequence[TelemetryBatch], ranks: tuple[int, ...], factor: float, onset: int
) -> Iterator[TelemetryBatch]:
    for at, batch in enumerate(batches):
        slow = np.isin(batch.rank, ranks) & (batch.op <= Op.BACKWARD) & (at >= onset)
        yield replace(batch, compute_ms=batch.compute_ms * np.where(slow, factor, 1.0))
