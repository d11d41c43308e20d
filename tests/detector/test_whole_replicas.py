"""Without lengths, more work of a replica and its devices' slowness look the same: no names."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from detector import Detector
from resihp.contracts import Job, Layout, ModelShape, Status
from resihp.testing.scenarios import Fault, Surge, steps_of, whole_replica

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)
MODEL = ModelShape(layers=16, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=32000)
Shape = tuple[int, int, int]


def job_of(shape: Shape) -> Job:
    dp, pp, tp = shape
    return Job(
        name="job",
        layout=Layout.grid(dp=dp, pp=pp, tp=tp, layers=16),
        microbatches=dp * 4,
        model=MODEL,
        tokens_per_microbatch=8192,
    )


def outcome(
    job: Job, seed: int, *, faults: Sequence[Fault] = (), surges: Sequence[Surge] = ()
) -> tuple[set[int], set[int]]:
    """Ranks that were ever named, and those that are inconclusive in the end."""
    detector = Detector(job)
    stream = steps_of(
        job, LENGTHS, steps=28, seed=seed, faults=faults, surges=surges, with_lengths=False
    )
    named = {
        verdict.rank
        for batch in stream
        for verdict in detector.update(batch)
        if verdict.status is Status.FAIL_SLOW
    }
    unclear = {v.rank for v in detector.verdicts() if v.status is Status.INCONCLUSIVE}
    return named, unclear


@pytest.mark.parametrize("shape", [(2, 4, 1), (4, 4, 1), (8, 2, 1), (4, 2, 2), (4, 1, 4)])
@pytest.mark.parametrize("factor", [1.05, 1.2, 2.0])
def test_the_devices_of_a_slowed_replica_are_not_named(shape: Shape, factor: float) -> None:
    job = job_of(shape)
    seed = round(100 * factor)
    replica = seed % shape[0]
    named, unclear = outcome(job, seed, faults=whole_replica(job, replica, factor, 12))
    assert named == set()
    if factor == 2.0 and shape[0] > 2:
        assert unclear == set(job.layout.replicas[replica].ranks)


@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 1), (4, 4, 1), (8, 2, 1)])
def test_more_work_of_a_replica_is_not_blamed_on_a_device(shape: Shape, longer: bool) -> None:
    surge = Surge(replica=1, factor=1.5, from_step=12, longer=longer)
    named, _ = outcome(job_of(shape), 5, surges=[surge])
    assert named == set()


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 2, 1), (1, 2, 1), (1, 1, 2)])
def test_where_there_is_no_majority_nobody_is_named(shape: Shape) -> None:
    fault = Fault(rank=1, factor=1.3, from_step=12)
    named, _ = outcome(job_of(shape), 2, faults=[fault])
    assert named == set()


@pytest.mark.parametrize("shape", [(4, 4, 1), (8, 2, 1)])
def test_the_neighbour_of_a_device_that_recovers_is_not_named(shape: Shape) -> None:
    fault = Fault(rank=2, factor=1.15, from_step=0, until_step=14)
    named, _ = outcome(job_of(shape), 4, faults=[fault])
    assert named <= {2}


@pytest.mark.parametrize("shape", [(4, 4, 1), (8, 2, 1), (4, 2, 2)])
def test_one_slow_device_of_a_replica_is_still_named(shape: Shape) -> None:
    named, unclear = outcome(job_of(shape), 3, faults=[Fault(rank=3, factor=1.1, from_step=12)])
    assert (named, unclear) == ({3}, set())


@pytest.mark.soak
@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 4, 1), (4, 4, 1), (16, 2, 1), (4, 2, 2)])
@pytest.mark.parametrize("factor", [1.03, 1.05, 1.1, 1.2, 1.5, 2.0])
def test_over_many_seeds_no_device_of_a_slowed_replica_is_named(
    shape: Shape, factor: float
) -> None:
    job = job_of(shape)
    for seed in range(10):
        faults = whole_replica(job, seed % shape[0], factor, 12)
        assert outcome(job, seed, faults=faults)[0] == set(), seed


def test_what_could_not_be_told_without_lengths_is_told_once_there_are_some() -> None:
    job, detector = job_of((4, 2, 1)), Detector(job_of((4, 2, 1)))
    surges = [Surge(replica=1, factor=1.4, from_step=12)]
    for batch in steps_of(job, LENGTHS, steps=40, seed=1, surges=surges):
        told = batch
        if batch.step[0] < 30:
            told = replace(batch, tokens=None, sequences=None, sum_sq_len=None, max_len=None)
        detector.update(told)
        if batch.step[0] == 29:
            unclear = [v for v in detector.verdicts() if v.status is Status.INCONCLUSIVE]
            assert unclear
    assert all(v.status is Status.HEALTHY for v in detector.verdicts())
    assert all(v.evidence == () for v in detector.verdicts())
