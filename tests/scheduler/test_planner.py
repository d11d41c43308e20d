"""Plans conserve layers and microbatches, use no dead rank, are repeatable, and name what binds."""

import itertools
import random
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resihp.contracts import (
    ContractError,
    InfeasibleError,
    Job,
    LayerCost,
    Layout,
    Links,
    Memory,
    ModelShape,
    Plan,
    RankAmount,
    Replica,
    Schedule,
    Stage,
    even_quotas,
    from_json,
    to_json,
)
from scheduler import make_plan, parse_job, plan_front, simulate
from scheduler.memory import fits

PLANNED = (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B, Schedule.ZERO_BUBBLE)


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
    schedules=st.sampled_from([(), *((s,) for s in PLANNED), PLANNED]),
    seed=st.integers(0, 10**6),
)
def test_any_job_under_any_faults(shape, layers, per_replica, fixed_ms, head_ms, schedules, seed):
    dp, pp, tp = shape
    cost = LayerCost(forward_ms=1.0, backward_ms=2.1, fixed_ms=fixed_ms, head_ms=head_ms)
    one = job(dp, pp, tp, layers, dp * per_replica, cost=cost, schedules=schedules)
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
    assert plan.schedule in (schedules or (one.schedule,))
    assert simulate(one, plan.layout, plan.quotas, speeds).step_ms == pytest.approx(plan.step_ms)
    ranks = set(plan.layout.ranks)
    if not any(speeds.get(rank, 1.0) == 0.0 for rank in one.layout.ranks):
        started = simulate(one, one.layout, one.quotas, speeds, schedule=plan.schedule).step_ms
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


@settings(deadline=None, max_examples=60)
@given(
    shape=st.tuples(st.integers(2, 3), st.integers(1, 2), st.integers(3, 6)),
    per_node=st.integers(2, 4),
    speeds=st.lists(st.sampled_from([1.0, 1.0, 0.5, 0.05]), min_size=36, max_size=36),
)
@example(shape=(2, 1, 3), per_node=2, speeds=[1.0, 1.0, 0.5, 1.0, 1.0, 0.5])
def test_groups_of_equal_speeds_cost_what_their_own_nodes_cost(shape, per_node, speeds):
    """Without its slow member, one group is in one node and another one is not."""
    dp, pp, tp = shape
    model = ModelShape(layers=2, hidden=64, heads=8, kv_heads=8, ffn=128, vocab=100)
    links = Links(ranks_per_node=per_node, inter_gbytes_per_s=0.001)
    known = {"model": model, "tokens_per_microbatch": 128, "links": links}
    one = job(dp, pp, tp, 2, 8, units=12, **known)
    speeds = dict(enumerate(speeds[: dp * pp * tp]))
    plan = make_plan(one, speeds)
    assert plan.step_ms == pytest.approx(simulate(one, plan, speeds=speeds).step_ms)


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


@pytest.mark.parametrize(("fixed_ms", "holds"), [(0.0, True), (0.5, False)])
def test_what_every_shard_costs_decides_whether_a_narrow_one_is_worth_it(fixed_ms, holds):
    cost = LayerCost(forward_ms=1.0, backward_ms=2.0, fixed_ms=fixed_ms)
    assert (1 in make_plan(job(cost=cost), {1: 0.3}).layout.ranks) is holds


def test_few_microbatches_get_layers_that_the_bound_proves_to_be_nearly_the_best():
    """First stages hold more, so that the last ones are through while these still run ahead."""
    one = job(dp=2, pp=8, tp=1, layers=80, microbatches=16, schedules=(Schedule.EAGER_1F1B,))
    plan = make_plan(one, {})
    assert plan.gap < 0.003  # single moves from one start end 2% above
    counts = [stage.layer_count for stage in plan.layout.replicas[0].stages]
    assert counts[0] > counts[-1]


@pytest.mark.parametrize(
    ("dp", "layers", "microbatches", "speeds"),
    [
        (2, 16, 4, {4: 0.3, 1: 0.3, 5: 0.0}),
        (3, 10, 3, {3: 0.3, 6: 0.7, 1: 0.0, 0: 0.5}),
    ],
)
def test_nothing_is_left_to_gain_by_planning_from_the_plan(dp, layers, microbatches, speeds):
    """With a microbatch or two a replica, one search ends 2% and 12% above these."""
    one = job(dp=dp, pp=3, tp=1, layers=layers, microbatches=microbatches)
    plan = make_plan(one, speeds)
    assert make_plan(one, speeds, plan.layout).step_ms == plan.step_ms


def test_narrow_floats_cost_no_precision():
    one, speeds = job(), {1: np.float32(0.3), 2: np.float64(0.5)}
    plan = make_plan(one, speeds)
    assert plan == make_plan(one, {rank: float(speed) for rank, speed in speeds.items()})
    assert simulate(one, plan, speeds=speeds).step_ms == pytest.approx(plan.step_ms, rel=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_costs_that_are_none_are_refused_by_name(value):
    with pytest.raises(ContractError, match="forward_ms"):
        LayerCost(forward_ms=value, backward_ms=2.0)


@pytest.mark.parametrize(
    "speeds", [5, {0: 1e-323}, {0: 1e300}, {2**31: 1.0}, {0: float("nan")}, {"0": 1.0}]
)
def test_speeds_that_are_none_are_refused_by_name(speeds):
    with pytest.raises(ContractError, match="speeds"):
        make_plan(job(), speeds)


@pytest.mark.parametrize("work", [5, ["1", "2"], ["much"], [[1.0], [1.0, 2.0]], [], [0.0]])
def test_work_that_is_not_numbers_is_refused_by_name(work):
    with pytest.raises(ContractError, match="work"):
        make_plan(job(), {}, work=work)


def test_a_member_that_hurts_is_left_out():
    assert 1 not in make_plan(job(), {1: 0.05}).layout.ranks


def test_a_dead_stage_leaves_a_shorter_replica():
    plan = make_plan(job(pp=3, layers=9), {4: 0.0, 5: 0.0})
    assert sorted(len(replica.stages) for replica in plan.layout.replicas) == [2, 3]


def test_nobody_left():
    with pytest.raises(InfeasibleError) as caught:
        make_plan(job(), dict.fromkeys(range(8), 0.0))
    assert caught.value.constraint == "ranks"


def test_of_more_replicas_than_microbatches_the_fastest_run():
    one = job(dp=4, pp=1, tp=1, microbatches=3)
    assert make_plan(one, {}).layout == one.layout
    for speed in (0.0, 0.5):
        plan = make_plan(one, {0: speed})
        assert [replica.ranks for replica in plan.layout.replicas] == [(1,), (2,), (3,)]
        assert plan.quotas == (1, 1, 1)


def test_healthy_ranks_that_are_left_out_are_named():
    plan = make_plan(job(dp=5, pp=1, tp=1, layers=1, microbatches=3), {0: 0.0})
    assert "rank 4 is healthy and left out" in plan.reason


SHAPE = ModelShape(layers=8, hidden=512, heads=8, kv_heads=8, ffn=1024, vocab=1000)


def with_memory(share_of_need, **given_):
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
        **given_,
    )


def test_memory_that_no_plan_holds_names_the_device():
    with pytest.raises(InfeasibleError, match="rank 0 has memory for") as caught:
        make_plan(with_memory(0.3), {})
    assert caught.value.constraint == "memory"


@pytest.mark.parametrize("speed", [0.45, 0.1])
@pytest.mark.parametrize("share_of_need", [1.01, 1.1])
def test_a_slow_rank_whose_memory_is_needed_stays(share_of_need, speed):
    """Shares by speed would not fit into the other ranks of its stage."""
    one = with_memory(share_of_need)
    one = replace(one, layout=Layout.grid(dp=1, pp=2, tp=2, layers=8, units=8), quotas=())
    now_ms = simulate(one, one.layout, (8,), {0: speed}).step_ms
    plan = make_plan(one, {0: speed})
    assert 0 in plan.layout.ranks
    assert plan.step_ms <= now_ms
    peak = simulate(one, plan, speeds={0: speed}).peak_bytes
    assert max(peak.values()) <= one.memory.budget_bytes


def test_the_last_replica_runs_on_as_it_is_with_a_slow_rank():
    one = with_memory(1.05)
    dead = dict.fromkeys(one.layout.replicas[1].ranks, 0.0)
    plan = make_plan(one, {**dead, 0: 0.45})
    assert plan.layout.ranks == one.layout.replicas[0].ranks


def test_five_replicas_that_do_not_fit_become_one():
    layers = 10
    budget_bytes = 2.5 * 16 * SHAPE.layer_params
    one = Job(
        name="five",
        layout=Layout.grid(dp=5, pp=1, tp=1, layers=layers, units=8),
        microbatches=10,
        model=replace(SHAPE, layers=layers, vocab=1),
        memory=Memory(budget_bytes=int(budget_bytes)),
    )
    assert [len(replica.stages) for replica in make_plan(one, {}).layout.replicas] == [5]


def cut_layout(replicas, edges):
    """Replicas of one rank a stage, with the same layers."""
    spans = list(enumerate(pairwise(edges)))
    return Layout(
        tuple(
            Replica(tuple(Stage((len(spans) * d + s,), span) for s, span in spans))
            for d in range(replicas)
        )
    )


def test_the_longest_pipeline_that_fits_leaves_a_group_out():
    """Of four stages, the first one would hold four microbatches in flight."""
    model = ModelShape(layers=4, hidden=64, heads=8, kv_heads=1, ffn=128, vocab=10)
    layer = 16 * model.layer_params
    memory = Memory(budget_bytes=int(4.2 * layer), activation_bytes_per_layer=layer)
    layout = cut_layout(2, (0, 1, 2, 4))
    one = Job(name="long", layout=layout, microbatches=8, model=model, memory=memory)
    plan = make_plan(one, {2: 0.0, 5: 0.0})
    assert [len(replica.stages) for replica in plan.layout.replicas] == [3]
    assert max(simulate(one, plan).peak_bytes.values()) <= memory.budget_bytes


@settings(deadline=None, max_examples=60)
@given(
    dp=st.integers(1, 3),
    pp=st.integers(1, 4),
    microbatches=st.integers(3, 8),
    budget=st.sampled_from([2.1, 3.1, 4.1, 5.1, 6.5, 8.0]),
    schedule=st.sampled_from(PLANNED),
)
@example(dp=3, pp=2, microbatches=7, budget=3.5, schedule=Schedule.EAGER_1F1B)
@example(dp=3, pp=3, microbatches=4, budget=4.1, schedule=Schedule.ZERO_BUBBLE)
def test_no_job_is_refused_that_fewer_stages_would_hold(dp, pp, microbatches, budget, schedule):
    layers = 6
    model = ModelShape(layers=layers, hidden=64, heads=8, kv_heads=1, ffn=128, vocab=10)
    layer = 16 * model.layer_params
    one = Job(
        name="shorter",
        layout=Layout.grid(dp=dp, pp=pp, tp=1, layers=layers),
        microbatches=microbatches,
        model=model,
        memory=Memory(budget_bytes=int(budget * layer), activation_bytes_per_layer=layer // 2),
        schedules=(schedule,),
    )
    try:
        plan = make_plan(one, {})
    except InfeasibleError as error:
        refused = error.detail
    else:
        assert fits(one, plan.layout, plan.quotas, plan.schedule)
        return
    assert "hold 6 of 6" not in refused
    shapes = product(range(1, dp + 1), range(1, layers + 1))
    for replicas, stages in ((d, s) for d, s in shapes if d * s <= dp * pp):
        quotas = even_quotas(microbatches, replicas)
        for cuts in combinations(range(1, layers), stages - 1):
            assert not fits(one, cut_layout(replicas, (0, *cuts, layers)), quotas, schedule)


def test_where_no_replica_fits_two_become_one_of_twice_the_stages():
    one = with_memory(0.7)
    plan = make_plan(one, {})
    assert [len(replica.stages) for replica in plan.layout.replicas] == [4]
    assert (
        max(simulate(one, plan.layout, plan.quotas).peak_bytes.values()) <= one.memory.budget_bytes
    )


@settings(deadline=None, max_examples=60)
@given(
    share_of_need=st.floats(0.3, 2.0),
    sharded=st.booleans(),
    schedules=st.sampled_from([(), PLANNED]),
    seed=st.integers(0, 10**6),
)
def test_plans_hold_what_they_must(share_of_need, sharded, schedules, seed):
    """Also the optimizer state of replicas that are left out, where the replicas share it."""
    one = with_memory(share_of_need, schedules=schedules)
    one = replace(one, memory=replace(one.memory, sharded_optimizer=sharded))
    rng = random.Random(seed)
    speeds = scatter(rng, one, rng.randint(0, 3), rng.randint(0, 4))
    try:
        plan = make_plan(one, speeds)
    except InfeasibleError:
        return
    check_conserves(one, plan, speeds)
    played = simulate(one, plan.layout, plan.quotas, speeds)
    assert max(played.peak_bytes.values()) <= one.memory.budget_bytes
    assert played.step_ms == pytest.approx(plan.step_ms)


def test_a_plan_takes_its_predicted_time_however_it_is_played():
    one, speeds = with_memory(3.0), {0: 0.8}
    plan = make_plan(one, speeds)
    assert plan.schedule is not one.schedule
    for played in (
        simulate(one, plan, speeds=speeds),
        simulate(one, plan.layout, plan.quotas, speeds),
        simulate(one, plan.layout, plan.quotas, speeds, schedule=plan.schedule),
        simulate(one, from_json(Plan, to_json(plan)), speeds=speeds),
    ):
        assert played.step_ms == pytest.approx(plan.step_ms)
    own = simulate(one, plan, speeds=speeds, schedule=one.schedule).step_ms
    assert own > plan.step_ms
    restarted = replace(one, layout=plan.layout, quotas=plan.quotas)
    assert simulate(restarted, restarted.layout, speeds=speeds).step_ms == own


@pytest.mark.parametrize(("share_of_need", "schedule"), [(1.01, 0), (3.0, 1)])
def test_memory_decides_which_schedule_is_taken(share_of_need, schedule):
    permitted = PLANNED[:2]
    one = with_memory(share_of_need, schedules=permitted)
    plan = make_plan(one, {0: 0.8})
    assert plan.schedule is permitted[schedule]
    peak = simulate(one, plan.layout, plan.quotas, {0: 0.8}, schedule=plan.schedule).peak_bytes
    assert max(peak.values()) <= one.memory.budget_bytes


def test_the_order_of_unequal_replicas_changes_no_step():
    """Shares in units of the first stage would leave the replica of two ranks one of them."""
    narrow, wide = Replica((Stage((0,), (0, 4)),)), Replica((Stage((1, 2), (0, 4)),))
    for replicas in ((narrow, wide), (wide, narrow)):
        one = Job(name="unequal", layout=Layout(replicas), microbatches=9)
        plan = make_plan(one, {2: 0.9}, Layout(replicas))
        assert set(plan.layout.ranks) == {0, 1, 2}
        assert plan.step_ms == make_plan(one, {1: 0.9}).step_ms


def test_ranks_beyond_the_kv_heads_stay():
    shape = replace(SHAPE, heads=8, kv_heads=2)
    layout = Layout.grid(dp=2, pp=2, tp=4, layers=8)
    one = Job(name="few", layout=layout, model=shape, microbatches=8, tokens_per_microbatch=512)
    assert make_plan(one, {}).layout == layout
    assert set(make_plan(one, {0: 0.9}).layout.ranks) == set(layout.ranks)


def test_plans_for_interleaved_stages_are_refused():
    with pytest.raises(ContractError, match="schedules"):
        job(schedules=(Schedule.INTERLEAVED,))


def test_a_stage_without_layers_stays_where_that_is_fastest():
    edges = ((0, 5), (5, 10), (10, 10))
    layout = Layout((Replica(tuple(Stage((rank,), span) for rank, span in enumerate(edges))),))
    cost = LayerCost(forward_ms=1.0, backward_ms=2.0, head_ms=5.0)
    one = Job(name="head", layout=layout, microbatches=32, cost=cost)
    now_ms = simulate(one, layout).step_ms
    plan, front = make_plan(one, {}), plan_front(one, {})
    assert (plan.layout, plan.step_ms, plan.reason[0][:11]) == (layout, now_ms, "all devices")
    assert [option.plan for option in front] == [plan]


@pytest.mark.parametrize("speed", [1.0, 0.5])
def test_the_bound_holds_for_stages_without_layers(speed):
    layout = Layout.grid(dp=1, pp=4, tp=1, layers=2)
    one = Job(name="short", layout=layout, microbatches=8, actions=("quotas",))
    other = Layout(
        (
            Replica(
                tuple(
                    Stage((rank,), span)
                    for rank, span in enumerate(((0, 0), (0, 1), (1, 2), (2, 2)))
                )
            ),
        )
    )
    plan = make_plan(one, {0: speed})
    assert plan.bound_ms <= simulate(one, other, (8,), {0: speed}).step_ms
    assert plan.bound_ms <= plan.step_ms


def test_a_running_layout_that_fits_is_kept_where_no_other_does():
    """Embedding and head fill ranks that hold no layers, and the search leaves no stage empty."""
    spans = ((0, 0), (0, 1), (1, 2), (2, 2))
    stages = tuple(Stage((rank,), span) for rank, span in enumerate(spans))
    ends = RankAmount(split=200)
    memory = Memory(
        budget_bytes=900,
        bytes_per_param=4,
        optimizer_bytes_per_param=0,
        layer_params=RankAmount(split=150),
        first_params=ends,
        last_params=ends,
    )
    one = Job(name="full", layout=Layout((Replica(stages),)), microbatches=4, memory=memory)
    plan = make_plan(one, {1: 0.5}, version=3, from_step=8)
    assert (plan.layout, plan.version, plan.from_step) == (one.layout, 3, 8)
    assert plan.step_ms == pytest.approx(simulate(one, plan, speeds={1: 0.5}).step_ms)
    assert [option.plan for option in plan_front(one, {1: 0.5}, version=3, from_step=8)] == [plan]
    with pytest.raises(InfeasibleError):
        make_plan(one, {1: 0.0})


def tight(microbatches, pp, tp):
    """Job of two replicas whose memory is that of its layout."""
    text = f'name = "tight"\nmodel = "llama-2-7b"\nmicrobatches = {microbatches}\n'
    text += f"tokens_per_microbatch = 4096\n[layout]\ndp = 2\npp = {pp}\ntp = {tp}\n"
    one = parse_job(text)
    budget_bytes = int(max(simulate(one, one.layout).peak_bytes.values())) + 1
    return replace(one, memory=Memory(budget_bytes=budget_bytes))


def test_a_replica_is_kept_whole_where_that_is_faster_than_without_it():
    one, speeds = tight(16, 4, 2), {0: 0.9}
    plan = make_plan(one, speeds)
    assert plan.layout == one.layout
    assert plan_front(one, speeds)[0].plan.step_ms == plan.step_ms


def test_the_best_of_all_arrangements_of_small_jobs_takes_the_place_of_no_better_one():
    """Here that is one under 1F1B, and eager forwards take four stages of all groups further."""
    one = tight(32, 2, 4)
    plan = make_plan(one, {0: 0.45})
    assert plan.schedule is Schedule.EAGER_1F1B
    assert (
        plan.step_ms
        <= make_plan(replace(one, schedules=(Schedule.ONE_F_ONE_B,)), {0: 0.45}).step_ms
    )


def small(dp, pp, layers, microbatches, **memory):
    """Job of groups of one rank, with layers of 100 parameters."""
    held = Memory(bytes_per_param=4, layer_params=RankAmount(split=100), **memory)
    layers_each = {"dp": dp, "pp": pp, "tp": 1, "layers": layers, "units": 1}
    return job(**layers_each, microbatches=microbatches, memory=held)


def test_a_rank_that_comes_back_lengthens_no_replica_that_no_longer_fits_then():
    model = ModelShape(
        layers=3, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=1000, tied_embeddings=True
    )
    tight = job(
        dp=3,
        pp=3,
        tp=1,
        layers=3,
        microbatches=7,
        units=2,
        cost=None,
        model=model,
        tokens_per_microbatch=4096,
        max_in_flight=5,
        links=Links(ranks_per_node=1, intra_gbytes_per_s=0.1, latency_ms=0.0),
        memory=Memory(
            budget_bytes=13_876_978,
            bytes_per_param=0.0,
            optimizer_bytes_per_param=12.0,
            update_bytes_per_param=4.0,
        ),
    )
    spans = ((0, 1), (1, 2), (2, 3))
    held = [[(0, 3, 6), spans], [(1, 5, 7), spans], [(2, 4), ((0, 1), (1, 3))]]
    without_8 = Layout(
        tuple(
            Replica(tuple(Stage((r,), span, (2,)) for r, span in zip(*rows, strict=True)))
            for rows in held
        )
    )
    least = make_plan(tight, {8: 0.0}, without_8).step_ms
    assert make_plan(tight, {}, without_8).step_ms <= least
    assert plan_front(tight, {9: 1.0, 10: 0.5}, without_8)[0].plan.step_ms <= least


def test_gradients_of_a_second_replica_need_memory():
    """One replica of all ranks fits; of two, each would hold more layers and its sums."""
    memory = {"optimizer_bytes_per_param": 0, "reduce_bytes_per_param": 4, "budget_bytes": 1500}
    one = small(2, 2, 6, 16, **memory)
    plan = make_plan(one, {}, Layout(one.layout.replicas[:1]))
    assert fits(one, plan.layout, plan.quotas, plan.schedule)
    assert (plan.layout.dp, plan.step_ms) == (1, 104.0)


@pytest.mark.parametrize(
    ("microbatches", "speeds", "quotas"),
    [(4, {5: 0.2}, (3, 1)), (16, {1: 0.04, 3: 0.04, 5: 0.04, 7: 0.04}, (15, 1))],
)
def test_a_slow_replica_stays_where_its_optimizer_state_fits_nowhere_else(
    microbatches, speeds, quotas
):
    memory = {"optimizer_bytes_per_param": 12, "sharded_optimizer": True, "budget_bytes": 1100}
    one = small(2, 4, 4, microbatches, **memory)
    staying_ms = simulate(one, one.layout, quotas, speeds).step_ms
    assert fits(one, one.layout, quotas, one.schedule)
    for plan in (make_plan(one, speeds), plan_front(one, speeds)[0].plan):
        assert fits(one, plan.layout, plan.quotas, plan.schedule)
        assert plan.step_ms <= staying_ms


def test_a_replica_that_no_longer_fits_is_dropped():
    plan = make_plan(with_memory(1.05), {0: 0.0, 1: 0.0})
    assert plan.layout.dp == 1
    assert plan.quotas == (8,)


def test_many_slow_replicas_are_left_out_within_few_steps_of_the_search():
    reads = itertools.count()
    one = job(dp=256, pp=1, tp=1, layers=4, microbatches=512)
    slow = range(0, 256, 4)
    plan = make_plan(
        one, dict.fromkeys(slow, 0.02), time_limit_s=100.0, clock=lambda: float(next(reads))
    )
    assert not set(slow) & set(plan.layout.ranks)
    assert plan.step_ms == plan.bound_ms == 36.0


def test_replicas_of_one_microbatch_stay_where_nothing_is_gained_without_them():
    plan = make_plan(job(dp=32, pp=2, tp=1, layers=4, microbatches=48), {0: 0.0})
    assert (plan.layout.dp, len(plan.layout.ranks)) == (32, 63)


def test_a_time_limit_still_gives_a_plan():
    ticks = iter(range(10**6))
    plan = make_plan(
        job(dp=4, pp=4, tp=1, layers=32, microbatches=64),
        {1: 0.5, 6: 0.3},
        time_limit_s=2.0,
        clock=lambda: float(next(ticks)),
    )
    assert sum(plan.quotas) == 64


@pytest.mark.parametrize(
    ("given_", "schedule"),
    [
        ({"share_of_need": 3.0}, Schedule.EAGER_1F1B),
        ({"share_of_need": 1.01}, Schedule.ONE_F_ONE_B),
        ({"share_of_need": 3.0, "schedules": (Schedule.ONE_F_ONE_B,)}, Schedule.ONE_F_ONE_B),
        ({"share_of_need": 3.0, "schedule": Schedule.ZERO_BUBBLE}, Schedule.ZERO_BUBBLE),
    ],
)
def test_a_job_that_tells_its_memory_gets_eager_plans_where_they_fit(given_, schedule):
    assert make_plan(with_memory(**given_), {0: 0.8}).schedule is schedule


def test_a_job_that_tells_nothing_of_memory_keeps_its_schedule():
    one = with_memory(3.0)
    untold = replace(one, memory=Memory())
    assert make_plan(untold, {0: 0.8}).schedule is Schedule.ONE_F_ONE_B


@pytest.mark.filterwarnings("error")
def test_where_one_replica_cannot_run_alone_the_plan_comes_without_a_warning():
    model = ModelShape(layers=11, hidden=256, heads=4, kv_heads=1, ffn=1000, vocab=50257)
    job = Job(
        name="tight",
        layout=Layout.grid(dp=2, pp=5, tp=1, layers=11),
        microbatches=2,
        model=model,
        tokens_per_microbatch=2048,
        memory=Memory(budget_bytes=287_899_648),
    )
    plan = make_plan(job, {0: 1e-6, 9: 0.001, 6: 0.01})
    assert plan.bound_ms <= plan.step_ms
