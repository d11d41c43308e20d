"""The batched 1F1B spans equal the event-driven replay; bounds never lie above either."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import Schedule
from resihp.pipeline.orders import stage_order
from resihp.pipeline.replay import pass_durations, replay
from scheduler.bounds import in_flight_bound
from scheduler.makespan import pipeline_makespans

PLANNED = (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B, Schedule.ZERO_BUBBLE)


def replayed(forward, backward, microbatches, p2p, cap):
    stages = len(forward)
    orders = [
        stage_order(
            Schedule.ONE_F_ONE_B,
            stage=stage,
            stages=stages,
            microbatches=microbatches,
            max_in_flight=cap,
        )
        for stage in range(stages)
    ]
    durations = pass_durations(orders, forward[:, None], backward[:, None])
    return replay(orders, durations, p2p=p2p).span


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    pipelines=st.integers(1, 3),
    stages=st.integers(1, 7),
    cap=st.none() | st.integers(1, 7),
    p2p=st.sampled_from([0.0, 0.3]),
)
def test_many_spans_at_once_equal_the_replay_of_each(seed, pipelines, stages, cap, p2p):
    random = np.random.default_rng(seed)
    forward, backward = random.uniform(0.1, 3.0, (2, pipelines, stages))
    counts = random.integers(0, 14, pipelines)
    spans = pipeline_makespans(forward, backward, counts, p2p=p2p, max_in_flight=cap)
    for row in range(pipelines):
        exact = replayed(forward[row], backward[row], int(counts[row]), p2p, cap)
        assert spans[row] == pytest.approx(exact)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    stages=st.integers(1, 9),
    cap=st.none() | st.integers(1, 9),
    p2p=st.sampled_from([0.0, 0.3]),
    schedule=st.sampled_from(PLANNED),
)
def test_the_bound_is_never_above_the_span(seed, stages, cap, p2p, schedule):
    """100 random pipelines each, so 6,000 in all."""
    random = np.random.default_rng(seed)
    forward = random.uniform(0.1, 3.0, (100, stages))
    backward = forward * random.uniform(0.5, 4.0, (100, stages))
    counts = random.integers(0, 40, 100)
    given_ = {"p2p": p2p, "max_in_flight": cap, "schedule": schedule}
    spans = pipeline_makespans(forward, backward, counts, **given_)
    bounds = in_flight_bound(forward, backward, counts, **given_)
    assert (bounds <= spans * (1 + 1e-12)).all()


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 5), (8, 64)])
def test_the_bound_of_a_split_backward_is_exact_for_equal_passes(stages, microbatches):
    times, schedule = np.ones((1, stages)), Schedule.ZERO_BUBBLE
    bound = in_flight_bound(times, 2 * times, [microbatches], schedule=schedule)
    assert bound[0] == pytest.approx(3 * microbatches + stages - 1)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 5), (8, 64)])
def test_the_bound_is_exact_for_equal_stages(stages, microbatches):
    times = np.ones((1, stages))
    expected = (microbatches + stages - 1) * 3.0
    assert in_flight_bound(times, 2 * times, [microbatches])[0] == pytest.approx(expected)


def test_the_bound_is_close_for_nearly_equal_stages():
    random = np.random.default_rng(0)
    forward = random.uniform(0.9, 1.1, (500, 8))
    counts = np.full(500, 32)
    spans = pipeline_makespans(forward, 2 * forward, counts)
    bounds = in_flight_bound(forward, 2 * forward, counts)
    assert float(np.mean(spans / bounds - 1.0)) < 0.01
