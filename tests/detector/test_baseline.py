"""What a rank's own past is made of: its first steps, its noise, and what must stay out of both."""

from dataclasses import replace

import numpy as np
import pytest

from detector import Detector
from detector.residuals import noise_of
from resihp.contracts import Job, Layout, Op, Status
from resihp.testing.scenarios import Fault, steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)


def residuals(steps: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 0.01, (steps, 16)).astype(np.float32)


@pytest.mark.parametrize("steps", [12, 24, 48])
def test_a_change_of_level_does_not_make_a_rank_seem_noisy(steps: int) -> None:
    calm = residuals(steps, seed=1)
    shifted = calm.copy()
    shifted[steps // 2 :, 3] += 0.2
    assert noise_of(shifted)[3] < 1.5 * noise_of(calm)[3]


def test_a_slow_swing_counts_as_noise() -> None:
    swing = 0.02 * np.sin(2.0 * np.pi * np.arange(48) / 16.0).astype(np.float32)
    window = residuals(48, seed=2)
    assert noise_of(window + swing[:, None]).min() > 1.3 * noise_of(window).max()


def test_ranks_that_sent_nothing_have_the_noise_of_all() -> None:
    window = residuals(20, seed=3)
    window[:, 5] = np.nan
    assert noise_of(window)[5] == pytest.approx(float(np.median(noise_of(window))), rel=0.2)


@pytest.mark.parametrize("interrupted", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_interrupted_witness_in_the_first_steps_blames_nobody(
    interrupted: int, seed: int
) -> None:
    """One microbatch a step and one witness: for that step the other seems to be twice as fast.
    As a past of one or two steps that made every later step of it look slow."""
    job = Job(name="job", layout=Layout.grid(dp=8, pp=2, tp=1, layers=8), microbatches=8)
    reference = job.layout.replicas[2].stages[1].ranks[0]
    detector = Detector(job)
    for batch in steps_of(job, LENGTHS, steps=30, seed=seed, with_lengths=False):
        struck = (batch.rank == reference) & (batch.op == Op.FORWARD)
        struck &= batch.step == interrupted
        times = batch.compute_ms * np.where(struck, 2.0, 1.0)
        changed = detector.update(replace(batch, compute_ms=times))
        assert all(verdict.status is not Status.FAIL_SLOW for verdict in changed)


def test_a_slow_device_is_not_hidden_by_the_noise_of_its_own_onset() -> None:
    """Few steps of past, two replicas: its first slow steps must not widen what it is held to."""
    job = Job(name="job", layout=Layout.grid(dp=2, pp=4, tp=1, layers=8), microbatches=16)
    slow = job.layout.replicas[1].stages[2].ranks[0]
    detector, named = Detector(job), {}
    faults = [Fault(rank=slow, factor=1.06, from_step=8)]
    for batch in steps_of(job, LENGTHS, steps=20, seed=4, faults=faults, with_lengths=False):
        for verdict in detector.update(batch):
            if verdict.status is Status.FAIL_SLOW:
                named.setdefault(verdict.rank, int(batch.step[0]))
    assert set(named) == {slow}
    assert named[slow] < 8 + 5


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_few_ranks_of_noisy_steps_are_not_named_by_their_first_ones(dp: int) -> None:
    """One microbatch a step: nothing within a step tells that a rank's time varies."""
    job = Job(name="noisy", layout=Layout.grid(dp=dp, pp=1, tp=1, layers=8), microbatches=dp)
    batches = list(steps_of(job, [500], steps=20, seed=1))
    for seed in range(12):
        noise = np.exp(np.random.default_rng(seed).normal(0.0, 0.2, (len(batches), dp)))
        detector = Detector(job)
        for batch in batches:
            times = batch.compute_ms * noise[batch.step, batch.rank]
            changed = detector.update(replace(batch, compute_ms=times))
            assert all(verdict.status is not Status.FAIL_SLOW for verdict in changed)
