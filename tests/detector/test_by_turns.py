"""Devices that are slow in some steps only, and hiccups, which are no such devices."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from detector import Detector, DetectorSettings
from detector.evidence.intermittent import first_slow_step
from resihp.contracts import Job, Layout, ModelShape, Op, Status, TelemetryBatch
from resihp.testing.scenarios import steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)
MODEL = ModelShape(layers=16, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=32000)
SETTINGS = DetectorSettings(train=False)
BAD = 5
Shape = tuple[int, int, int]
Factors = Callable[[int], dict[int, float]]


@cache
def recorded(
    shape: Shape, with_lengths: bool, coupled: bool = False
) -> tuple[Job, list[TelemetryBatch]]:
    dp, pp, tp = shape
    job = Job(
        name="job",
        layout=Layout.grid(dp=dp, pp=pp, tp=tp, layers=16),
        microbatches=dp * 4,
        model=MODEL,
        tokens_per_microbatch=8192,
    )
    stream = steps_of(
        job, LENGTHS, steps=60, seed=3, with_lengths=with_lengths, coupled=coupled, waits=coupled
    )
    return job, list(stream)


def slowed(batches: Sequence[TelemetryBatch], factors: Factors) -> Iterator[TelemetryBatch]:
    for at, batch in enumerate(batches):
        times = batch.compute_ms.copy()
        for rank, factor in factors(at).items():
            times[(batch.rank == rank) & (batch.op <= Op.BACKWARD)] *= factor
        yield replace(batch, compute_ms=times)


def by_turns(pattern: str, factor: float, onset: int = 12) -> Factors:
    """Slow in the steps marked `x` of a pattern that repeats."""
    return lambda at: (
        {BAD: factor} if at >= onset and pattern[(at - onset) % len(pattern)] == "x" else {}
    )


def history(
    job: Job, stream: Iterator[TelemetryBatch]
) -> tuple[list[tuple[int, int, Status]], Detector]:
    """What was said: step, rank, status, but for suspicions."""
    detector = Detector(job, settings=SETTINGS)
    said = [
        (at, verdict.rank, verdict.status)
        for at, batch in enumerate(stream)
        for verdict in detector.update(batch)
    ]
    return said, detector


@pytest.mark.parametrize("factor", [1.1, 2.0])
@pytest.mark.parametrize(("pattern", "within"), [("x.", 9), ("x..", 16), ("xx.", 4), ("x...", 21)])
@pytest.mark.parametrize(
    ("shape", "with_lengths"), [((8, 2, 1), True), ((1, 8, 1), True), ((2, 4, 1), False)]
)
def test_a_device_slow_by_turns_is_named_once(
    shape: Shape, with_lengths: bool, pattern: str, within: int, factor: float
) -> None:
    job, batches = recorded(shape, with_lengths)
    said, detector = history(job, slowed(batches, by_turns(pattern, factor)))
    named = [at for at, rank, status in said if status is Status.FAIL_SLOW]
    assert {rank for _, rank, status in said if status is Status.FAIL_SLOW} == {BAD}
    assert named[0] - 12 < within
    assert not [at for at, _, status in said if status is Status.HEALTHY and at > named[0]]
    verdict = detector.verdicts()[BAD]
    assert verdict.slowdown == pytest.approx(factor, rel=0.02)
    assert "slow by turns" in " ".join(verdict.evidence)


def test_long_pauses_are_learned_after_the_first() -> None:
    job, batches = recorded((8, 2, 1), True)
    said, _ = history(job, slowed(batches, by_turns("xxxx....", 1.2)))
    statuses = [status for _, rank, status in said if status is not Status.SUSPECT]
    assert statuses == [Status.FAIL_SLOW, Status.HEALTHY, Status.FAIL_SLOW]


def test_a_device_that_was_slow_by_turns_is_healthy_in_the_end() -> None:
    job, batches = recorded((8, 2, 1), True)
    turns = by_turns("x.", 1.2)
    _, detector = history(job, slowed(batches, lambda at: turns(at) if at < 32 else {}))
    assert {verdict.status for verdict in detector.verdicts()} == {Status.HEALTHY}


@pytest.mark.parametrize("size", [1.3, 5.0])
@pytest.mark.parametrize("steps", [(14,), (14, 16), (9, 20, 31, 50)])
@pytest.mark.parametrize(("shape", "with_lengths"), [((8, 2, 1), True), ((2, 4, 1), False)])
def test_hiccups_name_nobody(
    shape: Shape, with_lengths: bool, steps: tuple[int, ...], size: float
) -> None:
    job, batches = recorded(shape, with_lengths)
    said, _ = history(job, slowed(batches, lambda at: {BAD: size} if at in steps else {}))
    assert not [rank for _, rank, status in said if status is Status.FAIL_SLOW]


def test_hiccups_of_random_devices_name_nobody() -> None:
    job, batches = recorded((4, 2, 2), True)
    rng = np.random.default_rng(1)
    hits = rng.random((60, 16)) < 1 / 100
    sizes = rng.uniform(1.1, 5.0, (60, 16))
    said, _ = history(
        job,
        slowed(batches, lambda at: {rank: sizes[at, rank] for rank in np.flatnonzero(hits[at])}),
    )
    assert hits.sum() > 5
    assert not [rank for _, rank, status in said if status is Status.FAIL_SLOW]


def test_a_group_slow_by_turns_is_told_apart_by_its_waiting() -> None:
    job, batches = recorded((4, 2, 2), True, coupled=True)

    def of_group(at: int) -> dict[int, float]:
        return {4: 1.2, 5: 1.2} if at >= 12 and at % 2 else {}

    # Rank 4 waits in the slow steps for as long as it seems to compute longer.
    def waiting() -> Iterator[TelemetryBatch]:
        for at, batch in enumerate(slowed(batches, of_group)):
            rows = (batch.rank == 4) & bool(of_group(at))
            yield replace(batch, wait_ms=batch.wait_ms + np.where(rows, batch.compute_ms / 6, 0.0))

    said, _ = history(job, waiting())
    assert {rank for _, rank, status in said if status is Status.FAIL_SLOW} == {5}


def test_neighbours_of_a_device_slow_by_turns_are_not_named() -> None:
    job, batches = recorded((4, 3, 1), False)
    said, _ = history(job, slowed(batches, by_turns("x.", 1.3)))
    assert {rank for _, rank, status in said if status is Status.FAIL_SLOW} <= {BAD}


def test_the_onset_is_after_a_lone_hiccup() -> None:
    slow = np.array([0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1], bool)
    assert first_slow_step(slow) == 12
