"""Documents of another length than before, or than the peers have, do not make a device slow."""

from dataclasses import replace

import numpy as np
import pytest

from detector import Detector, DetectorSettings
from resihp.contracts import Job, Layout, ModelShape, Op, Status
from resihp.testing.scenarios import Fault, Surge, steps_of

MODEL = ModelShape(layers=16, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=32000)
SHORT = np.clip(np.exp(np.random.default_rng(5).normal(5.0, 0.6, 3000)), 16, 8192).astype(int)
Shape = tuple[int, int, int]


def job_of(shape: Shape, per_replica: int) -> Job:
    dp, pp, tp = shape
    return Job(
        name="job",
        layout=Layout.grid(dp=dp, pp=pp, tp=tp, layers=16),
        microbatches=dp * per_replica,
        model=MODEL,
        tokens_per_microbatch=8192,
    )


def named(job: Job, *, faults: tuple[Fault, ...] = (), surges: tuple[Surge, ...] = ()) -> list[int]:
    """Ranks that were named in 36 steps, in order."""
    detector, found = Detector(job), list[int]()
    for batch in steps_of(job, SHORT, steps=36, seed=2, faults=faults, surges=surges):
        found += [v.rank for v in detector.update(batch) if v.status is Status.FAIL_SLOW]
    return found


@pytest.mark.parametrize("from_step", [0, 14])
@pytest.mark.parametrize("factor", [0.1, 20.0])
@pytest.mark.parametrize("per_replica", [1, 4])
@pytest.mark.parametrize("shape", [(4, 1, 1), (2, 2, 1)])
def test_a_replica_with_other_documents_is_not_slow(
    shape: Shape, per_replica: int, factor: float, from_step: int
) -> None:
    other = Surge(replica=1, factor=factor, from_step=from_step, longer=True)
    assert named(job_of(shape, per_replica), surges=(other,)) == []


@pytest.mark.parametrize("shape", [(4, 1, 1), (2, 2, 1)])
def test_a_device_that_slows_later_is_measured_against_its_new_past(shape: Shape) -> None:
    job = job_of(shape, 4)
    slow = job.layout.replicas[1].ranks[0]
    other = Surge(replica=1, factor=10.0, from_step=10, longer=True)
    fault = Fault(rank=slow, factor=1.6, from_step=26)
    assert named(job, faults=(fault,), surges=(other,)) == [slow]


@pytest.mark.parametrize("factor", [1.2, 1.5])
@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 2, 1)])
def test_the_slower_one_of_a_pair_is_named_from_the_start(
    shape: Shape, replica: int, factor: float
) -> None:
    """Devices become slower than they were built, not faster."""
    job = job_of(shape, 4)
    slow = job.layout.replicas[replica].ranks[-1]
    detector = Detector(job)
    faults = (Fault(rank=slow, factor=factor, from_step=0),)
    for batch in steps_of(job, SHORT, steps=16, seed=1, faults=faults):
        detector.update(batch)
    verdicts = {v.rank: v for v in detector.verdicts() if v.status is not Status.HEALTHY}
    assert {rank: v.status for rank, v in verdicts.items()} == {slow: Status.FAIL_SLOW}
    assert verdicts[slow].slowdown == pytest.approx(factor, rel=0.05)
    assert verdicts[slow].since_step is None


@pytest.mark.parametrize("seed", range(6))
def test_one_of_two_replicas_with_longer_documents_does_not_blame_the_other(seed: int) -> None:
    """Half of the job changes against its past: no common change, which the other half lacks."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6.0, 1.2, 4000), 16, 8192).astype(int)
    job, surge = job_of((2, 2, 1), 2), Surge(replica=0, factor=3.0, from_step=30, longer=True)
    detector = Detector(job)
    for batch in steps_of(job, lengths, steps=60, seed=seed, surges=[surge]):
        assert all(v.status is not Status.FAIL_SLOW for v in detector.update(batch))


@pytest.mark.parametrize("seed", range(4))
def test_ranks_whose_expectation_fails_do_not_blame_those_that_work_as_before(seed: int) -> None:
    """A cost model that takes launches for work finds twice the tokens quicker than they are."""
    job = job_of((4, 1, 1), 4)
    detector = Detector(job, settings=DetectorSettings(train=False))
    noise = np.random.default_rng(seed)
    for batch in steps_of(job, SHORT, steps=50, seed=seed):
        more = (batch.rank % 2 == 0) & (batch.step >= 30) & (batch.step < 40)
        times = batch.compute_ms * np.where(more, 2.0 * 0.85, 1.0)
        times *= np.exp(0.03 * noise.normal(size=8))[2 * batch.rank + (batch.op == Op.BACKWARD)]
        work = {
            name: np.where(more & (getattr(batch, name) >= 0), 2, 1) * getattr(batch, name)
            for name in ("tokens", "sequences", "sum_sq_len")
        }
        for verdict in detector.update(replace(batch, compute_ms=times, **work)):
            assert verdict.status is not Status.FAIL_SLOW, verdict
