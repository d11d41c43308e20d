"""The front of plans: as quick as the quickest plan, then slower by little and moving less."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resihp.contracts import InfeasibleError, Job, LayerCost, Layout, Memory, ModelShape, Schedule
from resihp.layout import Param, Parameters, least_numel
from scheduler import make_plan, migration_ms, model_preset, parse_job, plan_front, simulate

SHAPE = ModelShape(layers=16, hidden=512, heads=8, kv_heads=8, ffn=1024, vocab=1000)
BYTES_PER_PARAM = 14.0


def a_job(dp=4, pp=4, tp=2, microbatches=32, layers=16, **given_):
    given_.setdefault("cost", LayerCost(forward_ms=1.0, backward_ms=2.0, head_ms=0.5))
    return Job(
        name="test",
        layout=Layout.grid(dp=dp, pp=pp, tp=tp, layers=layers, units=8),
        microbatches=microbatches,
        model=replace(SHAPE, layers=layers),
        **given_,
    )


def some_faults(rng, job, slow, dead):
    ranks = rng.sample(sorted(job.layout.ranks), slow + dead)
    speeds = {rank: 1.0 / rng.uniform(1.2, 4.0) for rank in ranks[:slow]}
    return speeds | dict.fromkeys(ranks[slow:], 0.0)


def moved_bytes(job, old, new):
    """Bytes by the algebra of layouts, parameter by parameter."""
    shape, rows = job.model, job.model.kv_heads
    layers = tuple(
        (Param(f"layers.{i}", (rows, shape.layer_params), 0),) for i in range(shape.layers)
    )
    ends = [(Param(name, (rows, shape.embedding_params), 0),) for name in ("embedding", "head")]
    return least_numel(old, new, Parameters(layers, *ends)) / rows * BYTES_PER_PARAM


def check_plan(job, speeds, plan):
    assert sum(plan.quotas) == job.microbatches
    assert min(plan.quotas) >= 1
    assert not [rank for rank in plan.layout.ranks if speeds.get(rank, 1.0) <= 0.0]
    for replica in plan.layout.replicas:
        assert replica.layers == job.layout.layers
        for stage in replica.stages:
            assert stage.layer_count >= 1
            assert sum(stage.shares) == 8
    played = simulate(job, plan, speeds=speeds)
    assert played.step_ms == pytest.approx(plan.step_ms)
    if job.memory.budget_bytes is not None:
        assert max(played.peak_bytes.values()) <= job.memory.budget_bytes
    assert plan.bound_ms <= plan.step_ms * (1 + 1e-9)


def check_front(job, speeds, current, front):
    quickest = make_plan(job, speeds, current)
    for option in front:
        check_plan(job, speeds, option.plan)
        assert option.total_bytes == pytest.approx(moved_bytes(job, current, option.plan.layout))
        assert option.migration_ms == migration_ms(job, current, option.plan.layout)
        assert option.plan.step_ms <= quickest.step_ms * 1.01 * (1 + 1e-9)
    for one, other in pairwise(front):
        assert one.plan.step_ms < other.plan.step_ms
        assert one.total_bytes >= other.total_bytes
        assert one.most_bytes >= other.most_bytes * (1 - 1e-9)
        assert (one.total_bytes, one.most_bytes) > (other.total_bytes, other.most_bytes)
    assert front[0].plan.step_ms <= quickest.step_ms * (1 + 1e-9)
    todays_bytes = moved_bytes(job, current, quickest.layout)
    assert front[-1].total_bytes <= todays_bytes * (1 + 1e-9)
    todays_ms = migration_ms(job, current, quickest.layout)
    assert front[-1].migration_ms <= todays_ms * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    layers=st.integers(4, 20),
    per_replica=st.integers(1, 9),
    costs=st.tuples(st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 2.0])),
    schedules=st.sampled_from([(), (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B)]),
    twice=st.booleans(),
    seed=st.integers(0, 10**6),
)
@example(  # groups in place are more than the layers
    shape=(4, 4, 4),
    layers=4,
    per_replica=1,
    costs=(0.1, 0.0),
    schedules=(),
    twice=True,
    seed=1842,
)
def test_any_front_is_valid_and_falls(shape, layers, per_replica, costs, schedules, twice, seed):
    """From the initial layout, or from that of a plan for other faults."""
    dp, pp, tp = shape
    cost = LayerCost(forward_ms=1.0, backward_ms=2.1, fixed_ms=costs[0], head_ms=costs[1])
    job = a_job(dp, pp, tp, dp * per_replica, layers, cost=cost, schedules=schedules)
    rng, size = random.Random(seed), dp * pp * tp
    current = job.layout
    if twice and size > 1:
        current = make_plan(job, some_faults(rng, job, 1, size // 4)).layout
    slow = rng.randint(0, size // 2)
    speeds = some_faults(rng, job, slow, rng.randint(0, (size - slow) // 2))
    try:
        front = plan_front(job, speeds, current)
    except InfeasibleError:
        return
    check_front(job, speeds, current, front)


@settings(deadline=None, max_examples=15)
@given(
    share_of_need=st.floats(0.6, 2.0),
    sharded=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_memory_holds_every_plan_of_a_front(share_of_need, sharded, seed):
    need = (4 * SHAPE.layer_params + SHAPE.embedding_params) * 16 / 2
    need += 4 * 4 * 34 * 128 * 512 / 2
    memory = Memory(budget_bytes=int(need * share_of_need), sharded_optimizer=sharded)
    job = a_job(memory=memory, tokens_per_microbatch=128)
    rng = random.Random(seed)
    speeds = some_faults(rng, job, rng.randint(0, 6), rng.randint(0, 4))
    try:
        front = plan_front(job, speeds)
    except InfeasibleError:
        return
    check_front(job, speeds, job.layout, front)


@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 10**6))
def test_the_order_of_the_ranks_does_not_matter(seed):
    rng = random.Random(seed)
    job = a_job()
    speeds = some_faults(rng, job, 3, 2)
    shuffled = list(speeds.items())
    rng.shuffle(shuffled)
    assert plan_front(job, speeds) == plan_front(job, dict(shuffled))


LLAMA = parse_job(
    'name = "pretraining"\nmodel = "llama-3-8b"\nmicrobatches = 64\n'
    'tokens_per_microbatch = 8192\ndevice = "H100"\n'
    "[layout]\ndp = 4\npp = 4\ntp = 2\n[memory]\nbudget_bytes = 80_000_000_000\n"
)


@pytest.mark.parametrize("dead", [0, 3, 16, 31])
def test_one_lost_rank_of_32_leaves_most_of_the_state_where_it_is(dead):
    """In the layout that a job plans for itself: only the replica of the lost rank changes."""
    current = make_plan(LLAMA, {}).layout
    least = plan_front(LLAMA, {dead: 0.0}, current)[-1]
    kept = [replica for replica in least.plan.layout.replicas if replica in current.replicas]
    assert len(kept) == 3
    whole_bytes = model_preset("llama-3-8b").layer_params * 32 * BYTES_PER_PARAM
    assert least.total_bytes < 0.4 * whole_bytes


@pytest.mark.parametrize("dead", [0, 3, 16, 31])
def test_groups_in_place_are_tried_under_every_schedule(dead):
    """Under 1F1B an exchange of groups gains here, under eager 1F1B it loses 2%."""
    quickest = make_plan(LLAMA, {dead: 0.0})
    assert quickest.step_ms == pytest.approx(plan_front(LLAMA, {dead: 0.0})[0].plan.step_ms)
    assert {len(replica.stages) for replica in quickest.layout.replicas} == {4}


def test_where_quotas_are_enough_nothing_is_moved():
    job = a_job(
        dp=4,
        pp=1,
        tp=1,
        microbatches=400,
        layers=4,
        cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
    )
    option = plan_front(job, {1: 0.5})[-1]
    assert option.plan.layout == job.layout
    assert (option.total_bytes, option.migration_ms) == (0.0, 0.0)


@pytest.mark.parametrize("model", [None, SHAPE])
def test_without_a_model_or_with_several_chunks_the_quickest_plan_is_the_front(model):
    layout = Layout.grid(dp=2, pp=2, tp=1, layers=16, units=8, chunks=2 if model else 1)
    job = Job(
        name="test",
        layout=layout,
        microbatches=8,
        model=model,
        schedule=Schedule.INTERLEAVED if model else Schedule.ONE_F_ONE_B,
        chunks=2 if model else 1,
        cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
    )
    (option,) = plan_front(job, {1: 0.5})
    assert option.plan == make_plan(job, {1: 0.5})


def test_a_time_limit_still_gives_the_quickest_plan_found():
    ticks = iter(range(10**6))
    front = plan_front(
        a_job(), {1: 0.5, 6: 0.3}, time_limit_s=2.0, clock=lambda: float(next(ticks))
    )
    check_plan(a_job(), {1: 0.5, 6: 0.3}, front[0].plan)
