"""Fast spans equal the replay; bounds never lie above them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import Schedule
from resihp.pipeline.orders import stage_order
from resihp.pipeline.replay import pass_durations, replay
from scheduler.bounds import Pipelines, chain_factors, in_flight_bound, least_span
from scheduler.spans import pipeline_spans

PLANNED = [Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B, Schedule.ZERO_BUBBLE]
SCHEDULES = st.sampled_from(PLANNED)


def replayed(schedule, forward, backward, microbatches, p2p, cap):
    stages = len(forward)
    orders = [
        stage_order(schedule, stage=s, stages=stages, microbatches=microbatches, max_in_flight=cap)
        for s in range(stages)
    ]
    durations = pass_durations(orders, [[f] for f in forward], [[b] for b in backward])
    return replay(orders, durations, p2p=p2p).span


@settings(deadline=None, max_examples=300)
@given(
    schedule=SCHEDULES,
    stages=st.integers(1, 7),
    microbatches=st.integers(1, 20),
    p2p=st.sampled_from([0.0, 0.3]),
    cap=st.none() | st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
def test_spans_and_bounds_of_any_pipeline(schedule, stages, microbatches, p2p, cap, seed):
    random = np.random.default_rng(seed)
    forward, backward = random.uniform(0.2, 3.0, (2, stages))
    exact = replayed(schedule, forward, backward, microbatches, p2p, cap)
    given_ = {"p2p": p2p, "max_in_flight": cap, "schedule": schedule}
    fast = pipeline_spans([forward], [backward], [microbatches], **given_)[0]
    bound = in_flight_bound([forward], [backward], [microbatches], **given_)[0]
    assert fast == pytest.approx(exact)
    assert bound <= exact * (1 + 1e-9)


@settings(deadline=None, max_examples=200)
@given(
    schedule=SCHEDULES,
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 24),
    seed=st.integers(0, 10**6),
)
def test_no_partition_beats_the_chain_bound(schedule, stages, microbatches, seed):
    random = np.random.default_rng(seed)
    speeds = random.uniform(0.2, 1.0, stages)
    work = random.dirichlet(np.ones(stages)) * 10.0
    share = random.uniform(0.2, 0.5)
    span = pipeline_spans(
        [share * work / speeds], [(1 - share) * work / speeds], [microbatches], schedule=schedule
    )[0]
    factor = chain_factors([speeds], [microbatches], schedule, (share, share))[0]
    assert factor * work.sum() <= span * (1 + 1e-9)


def test_equal_pipelines_have_the_bound_of_the_formula():
    part = Pipelines(np.ones((3, 4)), np.full(3, 12.0), np.array([5, 6, 7]))
    assert least_span([part]) == pytest.approx((6 + 3) * 3.0)
