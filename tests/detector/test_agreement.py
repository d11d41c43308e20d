"""Verdicts, diagnosis and its words say the same, in every shape of a job without lengths."""

from itertools import product

import numpy as np
import pytest

from detector import Detector
from detector.diagnosis import WORTH_NAMING, costs_of
from resihp.contracts import Cause, Job, Layout, Status
from resihp.testing.scenarios import Fault, steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)
DATA, PIPELINE, BOTH, TENSOR, ALL = (8, 1, 1), (1, 4, 1), (4, 2, 1), (1, 1, 4), (2, 2, 2)


def judged(
    shape: tuple[int, int, int],
    per_replica: int,
    factor: float,
    *,
    seed: int,
    coupled: bool = False,
) -> tuple[Detector, int, set[int]]:
    """The detector after 24 steps, the rank that was slowed at the twelfth, and who was named."""
    dp, pp, tp = shape
    layout = Layout.grid(dp=dp, pp=pp, tp=tp, layers=8)
    job = Job(name="job", layout=layout, microbatches=dp * per_replica)
    slow = layout.replicas[0].stages[-1].ranks[-1]
    faults = [Fault(rank=slow, factor=factor, from_step=12)] if factor > 1.0 else []
    detector, named = Detector(job), set()
    for batch in steps_of(
        job, LENGTHS, steps=24, seed=seed, faults=faults, with_lengths=False, coupled=coupled
    ):
        named |= {v.rank for v in detector.update(batch) if v.status is Status.FAIL_SLOW}
    return detector, slow, named


@pytest.mark.parametrize("shape", [DATA, PIPELINE, BOTH, TENSOR, ALL])
@pytest.mark.parametrize("per_replica", [1, 2, 8, 32])
def test_nobody_is_named_and_nothing_blamed_on_devices_where_all_are_healthy(
    shape: tuple[int, int, int], per_replica: int
) -> None:
    detector, _, named = judged(shape, per_replica, 1.0, seed=2083)
    diagnosis = detector.diagnosis()
    assert named == set()
    assert diagnosis.root_cause is not Cause.DEVICE
    assert not any("could not be told" in line for line in diagnosis.detail)


@pytest.mark.parametrize(
    ("shape", "per_replica", "factor"),
    list(product([PIPELINE, BOTH, TENSOR, ALL], [1, 2, 8], [1.2, 2.0])),
)
def test_the_slow_rank_alone_is_named_and_costs_something(
    shape: tuple[int, int, int], per_replica: int, factor: float
) -> None:
    detector, slow, named = judged(shape, per_replica, factor, seed=17)
    assert named <= {slow}
    diagnosis = detector.diagnosis()
    if not named:
        assert diagnosis.root_cause is not Cause.DEVICE or (
            "could not be told" in diagnosis.detail[0]
        )
    elif factor == 2.0:
        assert any(line.startswith(f"Rank {slow} (") for line in diagnosis.detail)


@pytest.mark.parametrize("factor", [1.0, 1.2, 2.0])
@pytest.mark.parametrize("per_replica", [1, 8])
def test_replicas_of_one_rank_are_never_told_from_their_work(
    factor: float, per_replica: int
) -> None:
    detector, _, named = judged(DATA, per_replica, factor, seed=17)
    diagnosis = detector.diagnosis()
    assert named == set()
    assert diagnosis.root_cause is not Cause.DEVICE
    assert not any(line.startswith("Slow devices") for line in diagnosis.detail)


def test_timers_that_last_as_long_as_the_slowest_member_tell_nothing_of_devices() -> None:
    detector, _, named = judged(TENSOR, 8, 2.0, seed=17, coupled=True)
    diagnosis = detector.diagnosis()
    assert named == set()
    assert diagnosis.root_cause is Cause.NONE
    assert "cannot be told" in diagnosis.detail[-1]


SHAPES = [(1, 1, 4), (1, 2, 4), (1, 4, 1), (2, 2, 2), (4, 1, 2), (4, 4, 1)]
CASES = [
    (shape, onset, lengths, (1, 4, 8)[index % 3])
    for index, (shape, onset, lengths) in enumerate(product(SHAPES, [0, 12], [True, False]))
]


@pytest.mark.parametrize(("shape", "onset", "lengths", "per_replica"), CASES)
def test_a_named_device_costs_what_the_job_would_save_without_it(
    shape: tuple[int, int, int], onset: int, lengths: bool, per_replica: int
) -> None:
    """The same job without the fault tells what it truly costs."""
    dp, pp, tp = shape
    layout = Layout.grid(dp=dp, pp=pp, tp=tp, layers=8)
    job = Job(name="job", layout=layout, microbatches=dp * per_replica)
    slow = layout.replicas[-1].stages[0].ranks[-1]
    fault = Fault(rank=slow, factor=1.5, from_step=onset)
    sick, well = (
        list(steps_of(job, LENGTHS, steps=24, seed=5, faults=faults, with_lengths=lengths))
        for faults in ([fault], [])
    )
    detector = Detector(job)
    for batch in sick:
        detector.update(batch)
    named = {v.rank for v in detector.verdicts() if v.status is Status.FAIL_SLOW}
    healthy, recorded = (costs_of(job, layout, batches).step for batches in (well, sick))
    costs = 1.0 - healthy / recorded
    diagnosis = detector.diagnosis()
    if named:
        assert diagnosis.slowdown * diagnosis.attribution[Cause.DEVICE] > 0.0
        assert diagnosis.root_cause is not Cause.NONE or costs < WORTH_NAMING
    if named and costs >= 0.1:
        assert diagnosis.root_cause is Cause.DEVICE
        assert diagnosis.detail[0].startswith(f"Rank {slow} (")
        assert 1.0 - 1.0 / diagnosis.slowdown > 0.6 * costs
