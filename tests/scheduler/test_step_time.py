"""What microbatches of unequal work cost is part of what a plan predicts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import ContractError, Job, LayerCost, Layout, Schedule
from scheduler import make_plan, simulate
from scheduler.makespan import pipeline_makespans
from scheduler.simulator import stage_times

PLANNED = [Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B, Schedule.ZERO_BUBBLE]
JOB = Job(
    name="uneven",
    layout=Layout.grid(dp=4, pp=4, tp=2, layers=16, units=8),
    microbatches=48,
    cost=LayerCost(forward_ms=1.0, backward_ms=2.0, step_ms=3.0),
)


@settings(deadline=None, max_examples=100)
@given(
    schedule=st.sampled_from(PLANNED),
    cap=st.none() | st.integers(1, 6),
    quotas=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    seed=st.integers(0, 10**6),
)
def test_fast_spans_of_uneven_work_are_those_of_the_simulator(schedule, cap, quotas, seed):
    random = np.random.default_rng(seed)
    job = replace(JOB, microbatches=sum(quotas), quotas=tuple(quotas), max_in_flight=cap)
    speeds = dict(enumerate(random.uniform(0.3, 1.0, 32).tolist()))
    work = random.uniform(0.2, 3.0, (4, 12))
    times = [stage_times(job, replica, speeds) for replica in job.layout.replicas]
    fast = pipeline_makespans(
        [f for f, _ in times],
        [b for _, b in times],
        quotas,
        max_in_flight=cap,
        schedule=schedule,
        work=work,
    )
    loads = [row[:quota].tolist() for row, quota in zip(work, quotas, strict=True)]
    played = simulate(job, job.layout, quotas, speeds, loads, schedule=schedule)
    assert fast.max() + 3.0 == pytest.approx(played.step_ms)


@pytest.mark.parametrize("schedule", PLANNED)
@pytest.mark.parametrize("spread", [0.1, 0.3, 0.8])
def test_a_plan_predicts_the_mean_step_of_uneven_work(schedule, spread):
    random = np.random.default_rng(7)
    sample = random.lognormal(0.0, spread, 800)
    job, speeds = replace(JOB, schedule=schedule), {3: 0.5, 9: 0.0}
    plan = make_plan(job, speeds, work=sample[:400].tolist())
    fresh = sample[400:] / sample[400:].mean()
    steps = [
        simulate(
            job,
            plan.layout,
            plan.quotas,
            speeds,
            random.choice(fresh, 48).tolist(),
            schedule=schedule,
        ).step_ms
        for _ in range(100)
    ]
    assert plan.step_ms == pytest.approx(np.mean(steps), rel=0.05)
    assert plan.bound_ms <= make_plan(job, speeds).step_ms <= plan.step_ms


def test_equal_work_costs_nothing_more():
    assert make_plan(JOB, {3: 0.5}, work=[2.0] * 5) == make_plan(JOB, {3: 0.5})


@pytest.mark.parametrize("work", [[], [1.0, 0.0], [1.0, float("nan")], [[1.0, 2.0]]])
def test_work_that_is_none_is_refused(work):
    with pytest.raises(ContractError, match="work"):
        make_plan(JOB, {}, work=work)


def test_uneven_work_of_several_chunks_under_zero_bubble():
    """As torch's ZB-V and DualPipe-V have them."""
    layout = Layout.grid(dp=2, pp=2, tp=1, layers=4, chunks=2)
    job = Job(
        name="zbv",
        layout=layout,
        microbatches=8,
        schedule=Schedule.ZERO_BUBBLE,
        chunks=2,
        actions=("quotas",),
    )
    plan = make_plan(job, {1: 0.5}, work=[1.0, 2.0])
    assert plan.step_ms > make_plan(job, {1: 0.5}).step_ms
