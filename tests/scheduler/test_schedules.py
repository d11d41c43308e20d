"""Fast spans equal the replay; bounds never lie above them."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import ContractError, Job, LayerCost, Layout, Plan, Schedule
from resihp.pipeline.orders import stage_order
from resihp.pipeline.replay import pass_durations, replay
from scheduler import make_plan, simulate
from scheduler.bounds import (
    StageCosts,
    heterogeneous_layers,
    in_flight_bound,
    relaxed_factors,
    whole_layers,
)
from scheduler.makespan import pipeline_makespans
from scheduler.search.plan_bounds import least_makespan

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
    fast = pipeline_makespans([forward], [backward], [microbatches], **given_)[0]
    bound = in_flight_bound([forward], [backward], [microbatches], **given_)[0]
    assert fast == pytest.approx(exact)
    assert bound <= exact * (1 + 1e-9)


@settings(deadline=None, max_examples=200)
@given(
    lags=st.lists(st.integers(0, 3), max_size=5),
    microbatches=st.integers(1, 16),
    p2p=st.sampled_from([0.0, 0.3, 4.0]),
    seed=st.integers(0, 10**6),
)
def test_no_order_of_whole_passes_beats_the_bound_of_any(lags, microbatches, p2p, seed):
    random = np.random.default_rng(seed)
    stages = len(lags) + 1
    forward, backward = random.uniform(0.2, 3.0, (2, stages))
    counts = np.cumsum([1, *lags])[::-1].tolist()
    orders = [
        stage_order(
            Schedule.EAGER_1F1B,
            stage=s,
            stages=stages,
            microbatches=microbatches,
            in_flight=counts[s],
        )
        for s in range(stages)
    ]
    durations = pass_durations(orders, [[f] for f in forward], [[b] for b in backward])
    exact = replay(orders, durations, p2p=p2p).span
    given_ = {"p2p": p2p, "schedule": None}
    bound = in_flight_bound([forward], [backward], [microbatches], **given_)[0]
    assert bound <= exact * (1 + 1e-9)
    # and no lower than for a schedule with limits, whose orders are some of these
    limited = in_flight_bound([forward], [backward], [microbatches], p2p=p2p)[0]
    assert bound <= limited * (1 + 1e-9)


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
    span = pipeline_makespans(
        [share * work / speeds], [(1 - share) * work / speeds], [microbatches], schedule=schedule
    )[0]
    factor = relaxed_factors([speeds], [microbatches], schedule, (share, share))[0]
    assert factor * work.sum() <= span * (1 + 1e-9)


@settings(deadline=None, max_examples=300)
@given(
    schedule=SCHEDULES,
    stages=st.integers(1, 5),
    more_layers=st.integers(0, 6),
    microbatches=st.integers(1, 20),
    p2p=st.sampled_from([0.0, 0.3]),
    cap=st.none() | st.integers(1, 5),
    slack=st.sampled_from([1.0, 1.2, 100.0]),
    seed=st.integers(0, 10**6),
)
def test_no_whole_layers_beat_their_bound(
    schedule, stages, more_layers, microbatches, p2p, cap, slack, seed
):
    random = np.random.default_rng(seed)
    layers = stages + more_layers
    forward, backward = random.uniform(0.3, 1.5, (2, 1, stages))
    extra = np.zeros((1, stages))
    extra[0, 0], extra[0, -1] = random.choice([0.0, 0.7], 2)
    most = random.integers(1, layers + 1, (1, stages))
    partitions = [
        counts
        for cuts in combinations(range(1, layers), stages - 1)
        if ((counts := np.diff((0, *cuts, layers))) <= most[0]).all()
    ]
    given_ = {"p2p": p2p, "max_in_flight": cap, "schedule": schedule}
    pipelines = StageCosts(forward, backward, extra, most)
    count = np.array([microbatches])
    if not partitions:
        assert np.isinf(whole_layers(pipelines, layers, count, 1e9, **given_)[0]).all()
        return
    times = forward * partitions + extra, backward * partitions + 2.0 * extra
    counts = np.full(len(partitions), microbatches)
    best = pipeline_makespans(*times, counts, **given_).min()
    bound = whole_layers(pipelines, layers, count, slack * best, **given_)[0][0]
    closer = heterogeneous_layers(pipelines, layers, count, slack * best, **given_)[0][0]
    assert bound <= closer * (1 + 1e-9)
    assert closer <= best * (1 + 1e-9)
    assert closer <= in_flight_bound(*times, counts, **given_).min() * (1 + 1e-9)


@pytest.mark.parametrize("schedule", PLANNED)
def test_layers_that_attain_the_program_have_its_bound(schedule):
    """With one odd stage: the rest is alike, so that the program is exact."""
    speeds = np.array([[1.0, 1.0, 0.4, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    most = np.full((2, 5), 20)
    stages = StageCosts(1.0 / speeds, 2.0 / speeds, np.zeros((2, 5)), most)
    counts = np.array([7, 9])
    bounds, layers = heterogeneous_layers(stages, 20, counts, 1e4, schedule=schedule)
    assert (layers.sum(axis=1) == 20).all()
    own = in_flight_bound(layers / speeds, 2.0 * layers / speeds, counts, schedule=schedule)
    assert own == pytest.approx(bounds)


def test_eager_stages_alike_but_in_layers_have_a_close_bound():
    """Ten layers a stage and a little more or less of them: no fractions would do."""
    stages = StageCosts(*(np.full((1, 8), each) for each in (0.25, 0.5, 0.0)), np.full((1, 8), 80))
    given_ = {"schedule": Schedule.EAGER_1F1B}
    bound = whole_layers(stages, 80, np.array([32]), 300.0, **given_)[0][0]
    even = np.full((1, 8), 10) + np.array([[1, 0, 0, 0, 0, 0, 0, -1]])
    span = pipeline_makespans(0.25 * even, 0.5 * even, [32], **given_)[0]
    assert bound <= span < 1.04 * bound
    assert relaxed_factors([np.full(8, 4 / 3)], [32], Schedule.EAGER_1F1B)[0] * 80 < 0.95 * bound


def test_equal_pipelines_have_the_bound_of_the_formula():
    counts = np.array([5, 6, 7])

    def times(rows, tried):
        return 12.0 * relaxed_factors(np.ones((len(rows), 4)), tried)

    assert least_makespan([(counts, times)]) == pytest.approx((6 + 3) * 3.0)


@pytest.mark.parametrize("schedule", PLANNED)
def test_a_schedule_given_by_its_name_is_that_schedule(schedule):
    layout, cost = Layout.grid(dp=1, pp=4, tp=1, layers=8), LayerCost(forward_ms=1, backward_ms=2)
    given_ = {"name": "test", "layout": layout, "microbatches": 8, "cost": cost}
    plain, named = Job(**given_), Job(**given_, schedule=schedule.value)
    permitted = Job(**given_, schedules=(schedule.value,))
    step_ms = simulate(plain, layout, schedule=schedule).step_ms
    assert simulate(plain, layout, schedule=schedule.value).step_ms == step_ms
    assert [make_plan(one, {}).step_ms for one in (named, permitted)] == [step_ms] * 2
    plan = Plan(version=0, layout=layout, quotas=(8,), schedule=schedule.value)
    assert (named.schedule, permitted.schedules, plan.schedule) == (schedule, (schedule,), schedule)
    assert type(named.schedule) is type(permitted.schedules[0]) is type(plan.schedule) is Schedule


@pytest.mark.parametrize("given_", [{"schedule": "zb"}, {"schedule": None}, {"schedules": ("zb",)}])
def test_a_schedule_that_there_is_not_is_refused(given_):
    layout = Layout.grid(dp=1, pp=2, tp=1, layers=2)
    with pytest.raises(ContractError, match=r"schedules?: must be one of 1f1b, eager_1f1b"):
        Job(name="test", layout=layout, microbatches=2, **given_)
    with pytest.raises(ContractError, match="schedule: must be one of"):
        simulate(Job(name="test", layout=layout, microbatches=2), layout, schedule="zb")
