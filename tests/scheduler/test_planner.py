"""Plans conserve layers and microbatches, use no dead rank, are repeatable, and name what binds."""

import random
from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import (
    InfeasibleError,
    Job,
    LayerCost,
    Layout,
    Memory,
    ModelShape,
    Schedule,
)
from resihp.pipeline.orders import stage_order
from resihp.pipeline.replay import pass_durations, replay
from scheduler import make_plan, replan, simulate


def job(dp=2, pp=2, tp=2, layers=8, microbatches=8, units=8, **given_):
    given_.setdefault("cost", LayerCost(forward_ms=1.0, backward_ms=2.0))
    layout = Layout.grid(dp=dp, pp=pp, tp=tp, layers=layers, units=units)
    return Job(name="test", layout=layout, microbatches=microbatches, **given_)


def scatter(rng, job_, slow, dead):
    ranks = rng.sample(sorted(job_.layout.ranks), slow + dead)
    speeds = {rank: 1.0 / rng.uniform(1.2, 4.0) for rank in ranks[:slow]}
    return speeds | dict.fromkeys(ranks[slow:], 0.0)


def check_conserves(job_, plan, speeds):
    assert sum(plan.quotas) == job_.microbatches
    assert min(plan.quotas) >= 1
    assert not [rank for rank in plan.layout.ranks if speeds.get(rank, 1.0) <= 0.0]
    units = sum(job_.layout.replicas[0].stages[0].shares)
    for replica in plan.layout.replicas:
        assert replica.layers == job_.layout.layers
        for stage in replica.stages:
            assert stage.layers[1] > stage.layers[0]
            assert sum(stage.shares) == units
    assert plan.bound_ms <= plan.step_ms * (1 + 1e-9)


@settings(deadline=None, max_examples=150)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    layers=st.integers(4, 24),
    per_replica=st.integers(1, 9),
    fixed_ms=st.sampled_from([0.0, 0.1]),
    head_ms=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 10**6),
)
def test_any_job_under_any_faults(shape, layers, per_replica, fixed_ms, head_ms, seed):
    dp, pp, tp = shape
    cost = LayerCost(forward_ms=1.0, backward_ms=2.1, fixed_ms=fixed_ms, head_ms=head_ms)
    one = job(dp, pp, tp, layers, microbatches=dp * per_replica, cost=cost)
    rng = random.Random(seed)
    size = dp * pp * tp
    slow = rng.randint(0, size // 2)
    speeds = scatter(rng, one, slow, rng.randint(0, size - slow))
    if not any(speeds.get(rank, 1.0) for rank in one.layout.ranks):
        with pytest.raises(InfeasibleError, match="living rank"):
            make_plan(one, speeds)
        return
    plan = make_plan(one, speeds)
    check_conserves(one, plan, speeds)
    assert plan == make_plan(one, speeds)
    played = simulate(one, plan.layout, plan.quotas, speeds)
    assert played.step_ms == pytest.approx(plan.step_ms)
    ranks = set(plan.layout.ranks)
    if not any(speeds.get(rank, 1.0) == 0.0 for rank in one.layout.ranks):
        started = simulate(one, one.layout, one.quotas, speeds).step_ms
        assert plan.step_ms <= started * (1 + 1e-9)
    assert ranks <= set(one.layout.ranks)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_faults_come_and_go(seed):
    """From any layout that a plan made, a healthy fleet gets back the speed that it had."""
    rng = random.Random(seed)
    one = job(dp=3, pp=3, tp=2, layers=9, microbatches=12)
    plan = make_plan(one, {})
    for step in range(3):
        speeds = scatter(rng, one, rng.randint(0, 4), rng.randint(0, 4))
        plan = make_plan(one, speeds, plan.layout, version=step + 1)
        check_conserves(one, plan, speeds)
    back = make_plan(one, {}, plan.layout)
    assert back.step_ms <= make_plan(one, {}).step_ms * 1.0011


def brute_force(job_, speeds):
    """Least span over slots, idle stages, layers and quotas, by replay; tp is 1."""
    stages = [[r.stages[s].ranks[0] for r in job_.layout.replicas] for s in range(job_.layout.pp)]
    known = {}

    def span(chain, microbatches):
        if (chain, microbatches) not in known:
            orders = [
                stage_order(
                    Schedule.ONE_F_ONE_B, stage=s, stages=len(chain), microbatches=microbatches
                )
                for s in range(len(chain))
            ]
            ends = []
            for cuts in combinations(range(1, job_.layout.layers), len(chain) - 1):
                edges = (0, *cuts, job_.layout.layers)
                times = [(edges[i + 1] - edges[i]) / p for i, p in enumerate(chain)]
                durations = pass_durations(orders, [[t] for t in times], [[2.0 * t] for t in times])
                ends.append(replay(orders, durations).span)
            known[chain, microbatches] = min(ends, default=float("inf"))
        return known[chain, microbatches]

    best = float("inf")
    total = job_.microbatches
    for slots in product(*[permutations(column) for column in stages]):
        for kept in product((True, False), repeat=len(slots) * job_.layout.dp):
            chains = []
            for d in range(job_.layout.dp):
                members = [slots[s][d] for s in range(len(slots)) if kept[d * len(slots) + s]]
                chains.append(tuple(speeds[r] for r in members if speeds[r] > 0))
            chains = [chain for chain in chains if chain]
            if len(chains) == 1:
                best = min(best, span(chains[0], total))
            elif len(chains) == 2:
                ends = [
                    max(span(chains[0], m), span(chains[1], total - m)) for m in range(1, total)
                ]
                best = min([best, *ends])
    return best


@settings(deadline=None, max_examples=25)
@given(
    dp=st.integers(1, 2),
    pp=st.integers(1, 3),
    microbatches=st.integers(2, 6),
    layers=st.integers(3, 6),
    seed=st.integers(0, 10**6),
)
def test_a_small_job_gets_the_optimum(dp, pp, microbatches, layers, seed):
    rng = random.Random(seed)
    one = job(dp, pp, 1, layers, microbatches, units=1)
    speeds = {rank: rng.choice([1.0, 0.8, 0.5, 0.25, 0.1]) for rank in one.layout.ranks}
    assert make_plan(one, speeds).step_ms <= brute_force(one, speeds) * (1 + 1e-9)


def test_a_small_job_of_two_by_four_slots_gets_the_optimum():
    one = job(2, 4, 1, 5, 4, units=1)
    speeds = dict(enumerate([1.0, 0.5, 0.8, 1.0, 0.3, 1.0, 0.6, 0.9]))
    assert make_plan(one, speeds).step_ms <= brute_force(one, speeds) * (1 + 1e-9)


def test_a_slow_member_keeps_a_small_share():
    plan = make_plan(job(), {1: 0.5})
    stage = plan.layout.stage_at(plan.layout.place_of(1))
    assert dict(zip(stage.ranks, stage.shares, strict=True)) == {0: 5, 1: 3}


@pytest.mark.parametrize("seed", range(5))
def test_devices_far_from_the_fault_stay_where_they_are(seed):
    one = job(dp=8, pp=4, tp=2, layers=16, microbatches=128)
    speeds = scatter(random.Random(seed), one, 2, 1)
    plan = make_plan(one, speeds)
    before = {p.rank: (p.dp, p.pp) for p in one.layout.places()}
    stayed = [p for p in plan.layout.places() if before[p.rank] == (p.dp, p.pp)]
    assert len(stayed) >= 48  # of 64; every fault may make a few trades worth it


def test_a_member_that_hurts_is_left_out():
    assert 1 not in make_plan(job(), {1: 0.05}).layout.ranks


def test_a_dead_stage_leaves_a_shorter_replica():
    plan = make_plan(job(pp=3, layers=9), {4: 0.0, 5: 0.0})
    assert sorted(len(replica.stages) for replica in plan.layout.replicas) == [2, 3]


def test_nobody_left():
    with pytest.raises(InfeasibleError) as caught:
        make_plan(job(), dict.fromkeys(range(8), 0.0))
    assert caught.value.constraint == "ranks"


def test_fewer_microbatches_than_replicas():
    with pytest.raises(InfeasibleError) as caught:
        make_plan(job(dp=4, microbatches=3), {})
    assert caught.value.constraint == "microbatches"


SHAPE = ModelShape(layers=8, hidden=512, heads=8, kv_heads=8, ffn=1024, vocab=1000)


def with_memory(share_of_need):
    free = Job(
        name="test",
        layout=Layout.grid(dp=2, pp=2, tp=2, layers=8, units=8),
        microbatches=8,
        model=SHAPE,
        tokens_per_microbatch=128,
    )
    need = (4 * SHAPE.layer_params + SHAPE.embedding_params) * 16 / 2
    need += 4 * 2 * 34 * 128 * 512 / 2
    return Job(
        name=free.name,
        layout=free.layout,
        microbatches=8,
        model=SHAPE,
        tokens_per_microbatch=128,
        memory=Memory(budget_bytes=int(need * share_of_need)),
    )


def test_memory_that_no_plan_holds_names_the_device():
    with pytest.raises(InfeasibleError, match="rank 0 has memory for") as caught:
        make_plan(with_memory(0.7), {})
    assert caught.value.constraint == "memory"


def test_a_replica_that_no_longer_fits_is_dropped():
    plan = make_plan(with_memory(1.05), {0: 0.0, 1: 0.0})
    assert plan.layout.dp == 1
    assert plan.quotas == (8,)


def test_replan_leaves_a_good_plan_alone():
    one = job(dp=2, pp=2, tp=2, layers=8, microbatches=16)
    first = make_plan(one, {})
    assert replan(one, first, {}, step=5) is None
    assert replan(one, first, {3: 0.99}, step=5) is None
    second = replan(one, first, {3: 0.5}, step=5)
    assert second is not None
    assert (second.version, second.from_step) == (2, 6)
    assert replan(one, second, {3: 0.5}, step=9) is None


def test_where_moving_is_too_dear_only_quotas_change():
    one = Job(
        name="test",
        layout=Layout.grid(dp=2, pp=2, tp=1, layers=8, units=8),
        microbatches=16,
        model=SHAPE,
        cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
    )
    first = make_plan(one, {})
    free = replan(one, first, {2: 0.4}, step=1)
    assert free.layout != first.layout
    dear = replan(one, first, {2: 0.4}, step=1, horizon_steps=0)
    assert dear.layout == first.layout
    assert dear.quotas != first.quotas
    assert sum(dear.quotas) == 16
    assert dear.step_ms == pytest.approx(simulate(one, dear.layout, dear.quotas, {2: 0.4}).step_ms)
    assert free.step_ms < dear.step_ms
    assert replan(one, dear, {2: 0.4}, step=2, horizon_steps=0) is None


def test_replan_always_answers_a_death():
    one = job()
    plan = replan(one, make_plan(one, {}), {3: 0.0}, step=5)
    assert plan is not None
    assert 3 not in plan.layout.ranks


def test_a_time_limit_still_gives_a_plan():
    ticks = iter(range(10**6))
    plan = make_plan(
        job(dp=4, pp=4, tp=1, layers=32, microbatches=64),
        {1: 0.5, 6: 0.3},
        time_limit_s=2.0,
        clock=lambda: float(next(ticks)),
    )
    assert sum(plan.quotas) == 64
