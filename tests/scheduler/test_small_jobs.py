"""Plans of small jobs against all arrangements there are, timed one by one."""

import random
from dataclasses import replace
from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import (
    Job,
    LayerCost,
    Layout,
    Memory,
    ModelShape,
    Replica,
    Schedule,
    Stage,
)
from resihp.pipeline.orders import stage_order
from resihp.pipeline.replay import pass_durations, replay
from scheduler import make_plan, simulate

PLANNED = (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B, Schedule.ZERO_BUBBLE)


def job(dp, pp, layers, microbatches, schedules):
    return Job(
        name="test",
        layout=Layout.grid(dp=dp, pp=pp, tp=1, layers=layers),
        microbatches=microbatches,
        cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
        schedules=schedules,
    )


def brute_force(job_, speeds, schedule):
    """Least span over slots, idle stages, layers and quotas, by replay; tp is 1.

    A plan may be better still: it may put two groups of one column into the same replica.
    """
    stages = [[r.stages[s].ranks[0] for r in job_.layout.replicas] for s in range(job_.layout.pp)]
    known = {}

    def span(chain, microbatches):
        if (chain, microbatches) not in known:
            orders = [
                stage_order(schedule, stage=s, stages=len(chain), microbatches=microbatches)
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
    schedule=st.sampled_from(PLANNED),
    seed=st.integers(0, 10**6),
)
def test_a_small_job_gets_the_optimum(dp, pp, microbatches, layers, schedule, seed):
    rng = random.Random(seed)
    one = job(dp, pp, layers, microbatches, (schedule,))
    speeds = {rank: rng.choice([1.0, 0.8, 0.5, 0.25, 0.1]) for rank in one.layout.ranks}
    assert make_plan(one, speeds).step_ms <= brute_force(one, speeds, schedule) * (1 + 1e-9)


@pytest.mark.parametrize("schedule", PLANNED)
def test_a_small_job_of_two_by_four_slots_gets_the_optimum(schedule):
    one = job(2, 4, 5, 4, (schedule,))
    speeds = dict(enumerate([1.0, 0.5, 0.8, 1.0, 0.3, 1.0, 0.6, 0.9]))
    assert make_plan(one, speeds).step_ms <= brute_force(one, speeds, schedule) * (1 + 1e-9)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_a_small_job_gets_the_best_of_the_schedules_that_it_permits(seed):
    rng = random.Random(seed)
    one = job(2, 3, 5, 4, PLANNED)
    speeds = {rank: rng.choice([1.0, 0.8, 0.5, 0.25]) for rank in one.layout.ranks}
    best = min(brute_force(one, speeds, schedule) for schedule in PLANNED)
    assert make_plan(one, speeds).step_ms <= best * (1 + 1e-3)


def with_memory(job_, budget_bytes, layers):
    return replace(
        job_,
        model=ModelShape(layers=layers, hidden=64, heads=4, kv_heads=4, ffn=128, vocab=50),
        tokens_per_microbatch=128,
        memory=Memory(budget_bytes=budget_bytes, activation_bytes_per_layer=100_000),
    )


def test_a_schedule_that_does_not_fit_leaves_the_optimum_under_another_one():
    one = with_memory(job(2, 2, 2, 6, ()), 954_039, layers=2)
    speeds = {0: 0.5, 3: 0.1}
    alone = make_plan(replace(one, schedules=(Schedule.ONE_F_ONE_B,)), speeds)
    assert make_plan(one, speeds).step_ms <= alone.step_ms * (1 + 1e-9)


def test_equal_shares_are_taken_where_shares_by_speed_leave_memory_for_worse_layers():
    layout = Layout.grid(dp=1, pp=2, tp=2, layers=5, units=4)
    cost = LayerCost(forward_ms=1.0, backward_ms=1.0, fixed_ms=0.2, embedding_ms=0.7)
    one = with_memory(replace(job(1, 2, 5, 4, ()), layout=layout, cost=cost), 1_311_713, layers=5)
    speeds = {0: 0.1, 1: 0.1, 2: 0.7}
    stages = Stage((0, 1), (0, 2), (2, 2)), Stage((2, 3), (2, 5), (2, 2))
    timeline = simulate(one, Layout((Replica(stages),)), (4,), speeds)
    assert max(timeline.peak_bytes.values()) <= one.memory.budget_bytes
    assert make_plan(one, speeds).step_ms <= timeline.step_ms * (1 + 1e-9)


def test_a_group_that_only_lengthens_the_pipeline_of_its_one_microbatch_is_left_out():
    layout = Layout.grid(dp=4, pp=2, tp=2, layers=8, units=8)
    cost = LayerCost(forward_ms=1.0, backward_ms=2.0, fixed_ms=0.1)
    one = replace(job(4, 2, 8, 4, ()), layout=layout, cost=cost)
    alone = Replica((Stage((8, 9), (0, 8), (4, 4)),))
    shorter = Layout((alone, *layout.replicas[1:]))
    best_ms = simulate(one, shorter, (1, 1, 1, 1)).step_ms
    assert make_plan(one, {1: 0.0}).step_ms <= best_ms * (1 + 1e-9)
