"""Jobs of interleaved stages are planned, changed and priced with all chunks that they hold."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resihp.contracts import (
    Action,
    ContractError,
    InfeasibleError,
    Job,
    LayerCost,
    Layout,
    Links,
    Memory,
    ModelShape,
    Plan,
    Replica,
    Schedule,
    Stage,
    even_quotas,
)
from resihp.layout import Param, Parameters, least_numel
from scheduler import make_plan, replan, simulate
from scheduler.migration import received_bytes
from scheduler.policies import POLICIES, policy_outcome
from scheduler.switching_rule import best_in_place

SHAPE = ModelShape(layers=8, hidden=64, heads=8, kv_heads=8, ffn=128, vocab=512)


def job(dp=2, pp=2, tp=1, layers=8, chunks=2, microbatches=12, **given_):
    given_.setdefault("cost", LayerCost(forward_ms=1.0, backward_ms=2.0))
    return Job(
        name="test",
        layout=Layout.grid(dp=dp, pp=pp, tp=tp, layers=layers, units=8, chunks=chunks),
        microbatches=microbatches,
        schedule=Schedule.INTERLEAVED,
        chunks=chunks,
        **given_,
    )


@settings(deadline=None, max_examples=80)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(2, 4), st.integers(1, 2)),
    layers=st.integers(8, 24),
    chunks=st.integers(2, 3),
    per_replica=st.integers(1, 9),
    head_ms=st.sampled_from([0.0, 2.0]),
    cap=st.none() | st.integers(1, 12),
    seed=st.integers(0, 10**6),
)
def test_any_interleaved_job_under_any_faults(
    shape, layers, chunks, per_replica, head_ms, cap, seed
):
    dp, pp, tp = shape
    cost = LayerCost(forward_ms=1.0, backward_ms=2.1, head_ms=head_ms)
    one = job(dp, pp, tp, layers, chunks, dp * per_replica, cost=cost, max_in_flight=cap)
    rng = random.Random(seed)
    ranks = rng.sample(one.layout.ranks, rng.randint(0, dp * pp * tp))
    speeds = {rank: rng.choice([0.0, 0.3, 0.6, 0.9, 1.0]) for rank in ranks}
    try:
        plan = make_plan(one, speeds)
    except InfeasibleError:
        assert not any(speeds.get(rank, 1.0) for rank in one.layout.ranks)
        return
    assert sum(plan.quotas) == one.microbatches
    assert all(speeds.get(rank, 1.0) > 0.0 for rank in plan.layout.ranks)
    assert plan.layout.layers == layers
    assert plan.bound_ms <= plan.step_ms * (1 + 1e-9)
    assert simulate(one, plan.layout, plan.quotas, speeds).step_ms == pytest.approx(plan.step_ms)
    assert plan == make_plan(one, speeds)
    chunked = any(replica.chunks > 1 for replica in plan.layout.replicas)
    assert chunked == (plan.schedule is Schedule.INTERLEAVED)
    flat = make_plan(replace(one, schedules=(Schedule.ONE_F_ONE_B,)), speeds)
    assert plan.step_ms <= flat.step_ms * 1.0011
    change = replan(one, plan, speeds, step=1).plan
    assert change is None or change.step_ms < plan.step_ms


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(4, 9)),
    actions=st.sampled_from([(Action.QUOTAS,), (Action.RESTART,), (Action.LAYOUT,)]),
    more=st.integers(0, 5),
    cap=st.none() | st.integers(2, 8),
    slow=st.sampled_from([0.3, 0.5, 1.0]),
)
@example(shape=(2, 3, 9), actions=(Action.QUOTAS,), more=4, cap=None, slow=0.5)
@example(shape=(2, 3, 9), actions=(Action.RESTART,), more=4, cap=2, slow=1.0)
def test_stages_of_one_range_are_timed_as_they_are_simulated(shape, actions, more, cap, slow):
    """Such stages are divided evenly into the chunks of the job."""
    dp, pp, layers = shape
    one = Job(
        name="test",
        layout=Layout.grid(dp=dp, pp=pp, tp=1, layers=layers),
        microbatches=dp + more,
        schedule=Schedule.INTERLEAVED,
        chunks=2,
        max_in_flight=cap,
        actions=actions,
    )
    speeds = {0: slow}
    try:
        plan = make_plan(one, speeds)
    except ContractError:
        assert cap is not None
        assert actions == (Action.QUOTAS,)
        return
    assert plan.step_ms == pytest.approx(simulate(one, plan, speeds=speeds).step_ms)
    assert plan.bound_ms <= plan.step_ms
    sampled = make_plan(one, speeds, work=[1.0, 1.0])
    assert sampled.step_ms == pytest.approx(plan.step_ms)


def test_without_a_fault_nothing_changes():
    one = job(dp=4, pp=4, layers=32, microbatches=64)
    plan = make_plan(one, {})
    assert plan.layout == one.layout
    assert plan.schedule is Schedule.INTERLEAVED
    assert plan.reason == ("all devices are healthy: nothing to change",)


def test_replicas_without_the_fault_stay_as_they_are():
    one = job(dp=4, pp=4, tp=2, layers=32, microbatches=64)
    plan = make_plan(one, {0: 0.0, 1: 0.0})
    assert plan.schedule is Schedule.INTERLEAVED
    kept = set(plan.layout.replicas) & set(one.layout.replicas)
    assert len(kept) == 3
    (other,) = set(plan.layout.replicas) - kept
    assert (len(other.stages), other.chunks) == (3, 2)


@pytest.mark.parametrize("speeds", [{}, {0: 0.8}])
def test_a_running_plan_whose_stages_hold_one_range_is_timed_with_the_chunks_of_the_job(speeds):
    one = replace(job(pp=4, layers=16), layout=Layout.grid(dp=2, pp=4, tp=1, layers=16))
    running = Plan(version=0, layout=one.layout, quotas=one.quotas, schedule=one.schedule)
    now_ms = simulate(one, running, speeds=speeds).step_ms
    best = replan(one, running, speeds, step=1).best
    assert now_ms == pytest.approx(best_in_place(one, running, speeds)[0])
    assert best is None or best.plan.step_ms + best.saved_ms == pytest.approx(now_ms)


def test_a_replica_of_one_stage_runs_beside_interleaved_ones():
    one = job(microbatches=6)
    plan = make_plan(one, {2: 0.0})
    assert sorted(replica.chunks for replica in plan.layout.replicas) == [1, 2]
    assert plan.schedule is Schedule.INTERLEAVED
    assert simulate(one, plan, speeds={2: 0.0}).step_ms == pytest.approx(plan.step_ms)


@pytest.mark.parametrize(
    ("given_", "speeds", "told"),
    [
        ({"max_in_flight": 2}, {}, "too small for several model chunks"),
        (
            {"max_in_flight": 2, "memory": Memory(budget_bytes=10**9)},
            {2: 0.5},
            "too small for several model chunks",
        ),
        ({"dp": 1}, {0: 0.0}, "no replica has several stages"),
    ],
)
def test_a_plan_says_why_stages_hold_one_chunk(given_, speeds, told):
    plan = make_plan(job(**given_), speeds)
    assert plan.schedule is Schedule.ONE_F_ONE_B
    assert told in " ".join(plan.reason)


def test_quotas_that_cannot_run_and_others_without_memory_leave_the_search_its_plan():
    model = replace(SHAPE, layers=4, vocab=50)
    memory = Memory(budget_bytes=3_500_000, activation_bytes_per_layer=1_000_000)
    given_ = {"model": model, "memory": memory, "max_in_flight": 2}
    one = job(layers=4, microbatches=4, quotas=(3, 1), **given_)
    plan = make_plan(one, {})
    assert plan.schedule is Schedule.ONE_F_ONE_B
    assert max(simulate(one, plan).peak_bytes.values()) <= memory.budget_bytes


def test_chunks_have_to_fit_into_memory():
    free = job(model=SHAPE, tokens_per_microbatch=64, cost=None)
    peak = max(simulate(free, free.layout).peak_bytes.values())
    for share, schedule in ((1.001, Schedule.INTERLEAVED), (0.999, Schedule.ONE_F_ONE_B)):
        tight = replace(free, memory=Memory(budget_bytes=int(peak * share)))
        plan = make_plan(tight, {})
        assert plan.schedule is schedule
        assert max(simulate(tight, plan).peak_bytes.values()) <= tight.memory.budget_bytes


def every_layout(groups, layers, chunks):
    """Of one replica, its layers spread evenly over the chunks of a stage."""
    for cuts in combinations(range(1, layers), len(groups) - 1):
        counts = [stop - start for start, stop in zip((0, *cuts), (*cuts, layers), strict=True)]
        parts = [even_quotas(count, chunks) for count in counts]
        edges = [0]
        for chunk in range(chunks):
            for part in parts:
                edges.append(edges[-1] + part[chunk])
        spans = list(pairwise(edges))
        yield Layout(
            (
                Replica(
                    tuple(
                        Stage((rank,), spans[s], (8,), tuple(spans[s + len(groups) :: len(groups)]))
                        for s, rank in enumerate(groups)
                    )
                ),
            )
        )


@settings(deadline=None, max_examples=30)
@given(
    pp=st.integers(2, 4),
    layers=st.integers(6, 9),
    chunks=st.integers(2, 3),
    microbatches=st.integers(2, 9),
    seed=st.integers(0, 10**6),
)
def test_no_way_to_spread_the_layers_beats_the_bound(pp, layers, chunks, microbatches, seed):
    one = job(1, pp, 1, layers, chunks, microbatches)
    rng = random.Random(seed)
    speeds = {rank: rng.choice([1.0, 0.8, 0.6]) for rank in range(pp)}
    plan = make_plan(one, speeds)
    if plan.schedule is Schedule.INTERLEAVED and plan.layout.pp == pp:
        options = every_layout(range(pp), layers, chunks)
        best = min(simulate(one, layout, (microbatches,), speeds).step_ms for layout in options)
        assert plan.bound_ms <= best * (1 + 1e-9)
        assert plan.step_ms <= best * 1.15


def test_passes_take_as_long_as_the_layers_of_their_chunk():
    one = job(dp=1, microbatches=1)
    stages = Stage((0,), (0, 3), (8,), ((4, 5),)), Stage((1,), (3, 4), (8,), ((5, 8),))
    timeline = simulate(one, Layout((Replica(stages),)))
    took = {(p.stage, p.item.chunk, p.item.op.name): p.end_ms - p.start_ms for p in timeline.passes}
    assert took[0, 0, "FORWARD"] == 3.0
    assert took[0, 1, "BACKWARD"] == 2.0
    assert took[1, 1, "BACKWARD"] == 6.0
    assert timeline.step_ms == 24.0


def test_a_schedule_for_one_chunk_cannot_play_several():
    with pytest.raises(ContractError, match="schedule"):
        simulate(job(), job().layout, schedule=Schedule.ZERO_BUBBLE)


@settings(deadline=None, max_examples=40)
@given(slow=st.dictionaries(st.integers(0, 3), st.sampled_from([0.0, 0.2, 0.5, 0.8]), max_size=3))
def test_moves_of_chunks_are_those_of_the_algebra_of_layouts(slow):
    one = job(model=SHAPE, memory=Memory(bytes_per_param=8.0, optimizer_bytes_per_param=8.0))
    rows = SHAPE.kv_heads
    layers = tuple(
        (Param(f"layers.{i}", (rows, SHAPE.layer_params), 0),) for i in range(SHAPE.layers)
    )
    ends = [(Param(name, (rows, SHAPE.embedding_params), 0),) for name in ("embedding", "head")]
    parameters = Parameters(layers, *ends)
    flat = Layout.grid(dp=2, pp=2, tp=1, layers=8, units=8)
    for new in (make_plan(one, slow).layout, flat):
        numel = least_numel(one.layout, new, parameters) / rows
        assert sum(received_bytes(one, one.layout, new).values()) == pytest.approx(numel * 12.0)


def test_where_moving_is_too_dear_quotas_change_and_chunks_stay():
    one = job(model=SHAPE, links=Links(inter_gbytes_per_s=1e-6))
    current = make_plan(one, {})
    change = replan(one, current, {2: 0.4}, step=1).plan
    assert change.layout == current.layout
    assert change.quotas != current.quotas
    assert change.schedule is Schedule.INTERLEAVED
    assert simulate(one, change, speeds={2: 0.4}).step_ms == pytest.approx(change.step_ms)
    assert change.bound_ms <= change.step_ms


def test_unequal_work_is_part_of_the_prediction():
    rng = random.Random(0)
    plan = make_plan(job(), {0: 0.5}, work=[rng.uniform(0.2, 3.0) for _ in range(100)])
    assert plan.step_ms > make_plan(job(), {0: 0.5}).step_ms


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_counts_all_chunks(name):
    one = job(dp=2, pp=2, tp=2, microbatches=16)
    outcome = policy_outcome(name, one, {1: 0.5})
    started = simulate(one, one.layout, one.quotas, {1: 0.5}).step_ms
    assert outcome.step_ms <= started * 1.6
    if outcome.layout is not None:
        assert outcome.layout.layers == 8
        played = simulate(
            one, outcome.layout, outcome.quotas, {1: 0.5}, schedule=outcome.schedule
        ).step_ms
        assert outcome.step_ms == pytest.approx(played)
    if name not in ("joint-any", "recycle"):  # which split the backward
        assert policy_outcome("joint", one, {1: 0.5}).step_ms <= outcome.step_ms * 1.0011
