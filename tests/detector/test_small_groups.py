"""Without lengths, and with two stages of two ranks: one slow witness must not blame the others."""

import numpy as np
import pytest

from detector import Detector
from resihp.contracts import Job, Layout, Status
from resihp.testing.scenarios import Fault, steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)


@pytest.mark.parametrize("factor", [1.1, 1.3, 2.0])
@pytest.mark.parametrize("from_step", [0, 12])
@pytest.mark.parametrize("replicas", [1, 2])
def test_only_the_slow_rank_is_named(replicas: int, from_step: int, factor: float) -> None:
    layout = Layout.grid(dp=replicas, pp=2, tp=2, layers=8)
    job = Job(name="job", layout=layout, microbatches=8 * replicas)
    slow = layout.replicas[0].stages[1].ranks[1]
    detector, named = Detector(job), set()
    faults = (Fault(rank=slow, factor=factor, from_step=from_step),)
    for batch in steps_of(job, LENGTHS, steps=25, seed=1, faults=faults, with_lengths=False):
        named |= {v.rank for v in detector.update(batch) if v.status is Status.FAIL_SLOW}
    # With one replica and no healthy past, one of two may be slow as well as the other fast.
    assert named == ({slow} if replicas > 1 or from_step else set())


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_healthy_one_of_a_pair_is_not_named_for_the_other(stages: int) -> None:
    """Once the slow one is in doubt, the level of the pair is learned from the healthy one alone;
    that must not make it look slower than in its first steps."""
    layout = Layout.grid(dp=2, pp=stages, tp=1, layers=16)
    job = Job(name="job", layout=layout, microbatches=16)
    slow = layout.replicas[1].stages[1].ranks[0]
    detector, named = Detector(job), set()
    faults = (Fault(rank=slow, factor=1.6, from_step=0),)
    for batch in steps_of(job, LENGTHS, steps=20, seed=1, faults=faults):
        named |= {v.rank for v in detector.update(batch) if v.status is Status.FAIL_SLOW}
    assert named <= {slow}
