"""Slow links: their factors, plans that keep work off them, and the best plan of small jobs."""

from dataclasses import replace
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import (
    Action,
    Job,
    LayerCost,
    Layout,
    Links,
    LinkVerdict,
    ModelShape,
    Replica,
    Schedule,
    Stage,
    Status,
)
from resihp.layout import boundary_transfers
from scheduler import make_plan, plan_front, replan, simulate
from scheduler.link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns, boundaries_ms, is_in_use
from scheduler.makespan import pipeline_makespans
from scheduler.search import search
from scheduler.search.link_placement import _Judge
from scheduler.search.plan_bounds import least_makespan
from scheduler.search.tp_groups import GroupBuilder
from scheduler.step_time import ReplicaTimes

ONE_F_ONE_B = (Schedule.ONE_F_ONE_B,)


def job(dp=2, pp=2, tp=1, layers=8, microbatches=8, per_node=8, **given_):
    model = ModelShape(layers=layers, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=1000)
    given_.setdefault("schedules", ONE_F_ONE_B)
    return Job(
        name="test",
        layout=Layout.grid(dp=dp, pp=pp, tp=tp, layers=layers, units=8),
        microbatches=microbatches,
        model=model,
        tokens_per_microbatch=4096,
        cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
        links=Links(ranks_per_node=per_node, intra_gbytes_per_s=50.0, inter_gbytes_per_s=8.0),
        **given_,
    )


def link(one, other, factor=3.0, status=Status.FAIL_SLOW):
    return LinkVerdict(rank=one, peer=other, status=status, slowdown=factor)


def group(ranks, factor=3.0):
    return LinkVerdict(
        rank=ranks[0], peer=-1, group=tuple(ranks), status=Status.FAIL_SLOW, slowdown=factor
    )


def step_of(one, plan, links):
    return simulate(one, plan, links=links).step_ms


# Factors


@settings(deadline=None, max_examples=30)
@given(sender=st.integers(1, 6), receiver=st.integers(1, 6), data=st.data())
def test_a_boundary_has_the_links_that_the_runtime_uses(sender, receiver, data):
    here, there = Stage(tuple(range(sender)), (0, 4)), Stage(tuple(range(6, 6 + receiver)), (4, 8))
    pair = data.draw(st.sampled_from(here.ranks)), data.draw(st.sampled_from(there.ranks))
    used = {(moved.source, moved.target) for moved in boundary_transfers(here, there)}
    found = LinkSlowdowns.of(job(), [link(*pair)])
    assert (found.boundary(here.ranks, there.ranks) > 1.0) == (pair in used)
    assert is_in_use(Layout((Replica((here, there)),)), pair) == (pair in used)


def test_only_fail_slow_links_have_a_factor():
    found = LinkSlowdowns.of(
        job(), [link(2, 0), link(0, 1, status=Status.SUSPECT), link(1, 3, factor=1.0)]
    )
    assert found.between(0, 2) == found.between(2, 0) == 3.0
    assert found.between(0, 1) == found.between(1, 3) == 1.0
    assert not LinkSlowdowns.of(job(), [link(0, 1, status=Status.HEALTHY)])


def test_a_boundary_takes_its_slowest_link_and_a_group_that_within_it():
    found = LinkSlowdowns.of(job(dp=1, pp=2, tp=4), [link(1, 5, 2.0), link(0, 3, 4.0)])
    assert found.boundary((0, 1, 2, 3), (4, 5, 6, 7)) == 2.0
    assert found.boundary((0, 1, 2, 3), (5, 4, 6, 7)) == 1.0  # rank 1 transfers to rank 4
    assert found.boundary((0, 1), (6, 7, 4, 5)) == 2.0  # the second half of a larger group
    assert found.boundary((0, 1), (6, 5, 4, 7)) == 1.0
    assert found.collective((0, 1, 2, 3)) == 4.0
    assert found.collective((1, 2, 3)) == found.collective((0,)) == 1.0


def test_a_slow_group_makes_every_group_slow_that_holds_two_of_its_ranks():
    found = LinkSlowdowns.of(job(), [group((0, 1, 2, 3), 2.5)])
    assert found.collective((1, 2, 6, 7)) == found.between(0, 3) == 2.5
    assert found.collective((3, 4, 5)) == found.between(3, 4) == 1.0


def test_several_slow_links_of_two_nodes_count_for_all_their_links():
    one = job(dp=4, pp=2, per_node=4)
    single = LinkSlowdowns.of(one, [link(0, 4)])
    assert (single.between(0, 4), single.between(1, 5)) == (3.0, 1.0)
    several = LinkSlowdowns.of(one, [link(0, 4, 2.0), link(1, 5, 4.0)])
    assert several.between(2, 7) == several.collective((3, 6)) == 3.0
    assert several.between(1, 5) == 4.0
    assert several.between(0, 1) == several.between(0, 8) == 1.0
    inside = LinkSlowdowns.of(one, [link(0, 1), link(1, 2)])
    assert inside.between(2, 3) == 1.0


# Step times


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), schedule=st.sampled_from(list(Schedule)))
def test_a_step_of_any_links_is_that_of_the_simulation(seed, schedule):
    rng = np.random.default_rng(seed)
    dp, pp, tp = (int(n) for n in rng.integers(1, 4, 3))
    chunks = 2 if schedule is Schedule.INTERLEAVED else 1
    pp = max(pp, chunks)
    microbatches = dp * pp * 2
    layout = Layout.grid(dp=dp, pp=pp, tp=tp, layers=12, units=8, chunks=chunks)
    one = replace(
        job(dp, pp, tp, 12, microbatches), layout=layout, chunks=chunks, schedule=schedule,
        schedules=(),
    )  # fmt: skip
    links = some_links(rng, layout.ranks)
    slow = LinkSlowdowns.of(one, links)
    times = ReplicaTimes(one, layout.replicas, schedule, {}, slow)
    expected = simulate(one, layout, one.quotas, schedule=schedule, links=links).step_ms
    assert times.step_ms(one.quotas) == pytest.approx(expected)
    assert expected >= simulate(one, layout, one.quotas, schedule=schedule).step_ms * (1 - 1e-9)


def test_equal_transfers_between_stages_are_one_time_for_all():
    rng = np.random.default_rng(0)
    forward, backward = rng.uniform(1, 3, (2, 5, 4))
    counts = [3, 9, 1, 4, 7]
    same = pipeline_makespans(forward, backward, counts, p2p=np.full((5, 3), 0.4))
    assert same == pytest.approx(pipeline_makespans(forward, backward, counts, p2p=0.4))


def some_links(rng, ranks):
    ranks = sorted(ranks)
    if len(ranks) < 2:
        return []
    pairs = [tuple(int(r) for r in rng.choice(ranks, 2, replace=False)) for _ in range(3)]
    found = [link(*pair, float(rng.uniform(1.2, 4.0))) for pair in pairs]
    if rng.random() < 0.5:
        members = rng.choice(ranks, min(3, len(ranks)), replace=False)
        found.append(group([int(r) for r in members], float(rng.uniform(1.2, 4.0))))
    return found


# Plans


@settings(deadline=None, max_examples=20)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 4])),
    per_node=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 10**6),
)
def test_plans_for_any_links_and_speeds(shape, per_node, seed):
    rng = np.random.default_rng(seed)
    dp, pp, tp = shape
    one = job(dp, pp, tp, 8, 4 * dp, per_node)
    speeds = {int(r): 0.5 for r in rng.choice(one.layout.ranks, rng.integers(0, 2), replace=False)}
    links = some_links(rng, one.layout.ranks)
    before = make_plan(one, speeds)
    plan = make_plan(one, speeds, before.layout, links=links)
    assert plan == make_plan(one, speeds, before.layout, links=links)
    assert set(plan.layout.ranks) <= set(one.layout.ranks)
    assert sum(plan.quotas) == one.microbatches
    assert min(plan.quotas) >= 1
    assert {replica.layers for replica in plan.layout.replicas} == {8}
    assert {sum(s.shares) for r in plan.layout.replicas for s in r.stages} == {8}
    assert plan.bound_ms <= plan.step_ms * (1 + 1e-9)
    played = simulate(one, plan, speeds=speeds, links=links)
    assert plan.step_ms == pytest.approx(played.step_ms)
    kept = simulate(one, before, speeds=speeds, links=links).step_ms
    assert plan.step_ms <= kept * (1 + 1e-9)
    without = simulate(one, plan, speeds=speeds).step_ms
    assert plan.step_ms >= without * (1 - 1e-9)  # slow links make nothing faster


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), status=st.sampled_from([Status.SUSPECT, Status.HEALTHY]))
def test_without_slow_links_the_plan_is_the_same(seed, status):
    rng = np.random.default_rng(seed)
    one = job(2, 2, 2)
    speeds = {int(rng.integers(8)): float(rng.uniform(0.3, 0.9))}
    heard = [link(0, 4, status=status)]
    assert make_plan(one, speeds, links=heard) == make_plan(one, speeds)
    assert plan_front(one, speeds, links=heard) == plan_front(one, speeds)


def partitions(layers, stages):
    for cut in combinations(range(1, layers), stages - 1):
        yield tuple(pairwise((0, *cut, layers)))


def best_of_all(one, links, *, dp, pp):
    """Step time of the best placement of four ranks, of layers and of quotas."""
    slow = LinkSlowdowns.of(one, links)
    replicas = [
        Replica(tuple(Stage((rank,), span, (8,)) for rank, span in zip(chain, spans, strict=True)))
        for chain in permutations(range(dp * pp), pp)
        for spans in partitions(one.layout.layers, pp)
    ]
    times = ReplicaTimes(one, replicas, Schedule.ONE_F_ONE_B, {}, slow)
    if dp == 1:
        return min(times.makespans([one.microbatches] * len(replicas)))
    ends = np.array([times.makespans([m] * len(replicas)) for m in range(1, one.microbatches)])
    chains = {}
    for row, replica in enumerate(replicas):
        held = chains.setdefault(frozenset(replica.ranks), ends[:, row])
        chains[frozenset(replica.ranks)] = np.minimum(held, ends[:, row])
    return min(
        np.maximum(chains[a], chains[b][::-1]).min()
        for a, b in combinations(chains, 2)
        if not a & b
    )


@pytest.mark.parametrize(("dp", "pp"), [(2, 2), (1, 4)])
@pytest.mark.parametrize("factor", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("seed", range(4))
def test_plans_of_four_ranks_are_the_best(dp, pp, factor, seed):
    rng = np.random.default_rng(seed)
    one = job(dp, pp, microbatches=6)
    pairs = list(combinations(range(4), 2))
    links = [link(*pairs[i], factor) for i in rng.choice(len(pairs), 1 + seed % 3, replace=False)]
    plan = make_plan(one, {}, links=links)
    assert plan.step_ms <= best_of_all(one, links, dp=dp, pp=pp) * 1.02


def test_a_stage_moves_off_a_slow_link_and_the_reason_names_it():
    one = job(1, 4)
    links = [link(1, 2)]
    plan = make_plan(one, {}, links=links)
    assert plan.step_ms == pytest.approx(make_plan(one, {}).step_ms)
    assert {1, 2} not in [set(pair) for pair in pairwise(plan.layout.replicas[0].ranks)]
    assert "transfers between ranks 1 and 2 take 3 times as long: none goes that way" in plan.reason
    assert any("instead of stage" in sentence for sentence in plan.reason)


def test_two_replicas_exchange_a_rank_for_a_slow_link():
    one = job(2, 2)
    plan = make_plan(one, {}, links=[link(0, 2)])
    assert plan.step_ms == pytest.approx(make_plan(one, {}).step_ms)


def test_a_slow_link_in_a_tensor_parallel_group_leads_to_another_grouping():
    one = job(2, 2, 2)
    links = [link(0, 1, 10.0)]
    kept = simulate(one, one.layout, links=links).step_ms
    plan = make_plan(one, {}, links=links)
    assert not any({0, 1} <= set(s.ranks) for r in plan.layout.replicas for s in r.stages)
    assert plan.step_ms < kept
    assert plan.step_ms == pytest.approx(make_plan(one, {}).step_ms, rel=0.01)


def test_quotas_leave_a_slow_link_in_a_job_that_takes_no_layout():
    one = job(2, 2, microbatches=16, actions=(Action.QUOTAS,))
    plan = make_plan(one, {}, links=[link(0, 2, 20.0)])
    assert plan.layout == one.layout
    assert plan.quotas[0] < plan.quotas[1]


def test_a_running_job_gets_a_plan_for_a_slow_link():
    one = job(1, 4, microbatches=4)
    current = make_plan(one, {}, version=3)
    assert replan(one, current, {}, step=10, horizon_steps=10_000).plan is None
    decision = replan(one, current, {}, step=10, horizon_steps=10_000, links=[link(1, 2)])
    assert decision.plan is not None
    assert decision.plan.version == 4
    assert step_of(one, decision.plan, [link(1, 2)]) < step_of(one, current, [link(1, 2)])


def test_members_whose_collectives_never_end_are_a_group_all_the_same():
    one = replace(job(dp=1, pp=1, tp=4), links=Links(latency_ms=1e15))
    slow = LinkSlowdowns.of(one, [group((0, 1, 2, 3), 1e294)])
    made = GroupBuilder(one, {}, 8, slow)((0, 1, 2, 3), 0)
    assert made is not None
    assert made.ranks == (0, 1, 2, 3)


def test_a_bound_ends_where_microbatches_take_no_time_beside_a_transfer():
    def endless_ms(rows, counts):
        assert counts.max() < 100
        return np.full(len(rows), 1e30)

    assert least_makespan([(np.array([2, 2]), endless_ms)]) == 1e30


def test_healthy_links_are_false():
    assert not ALL_LINKS_HEALTHY
    assert ALL_LINKS_HEALTHY.collective((0, 1)) == ALL_LINKS_HEALTHY.between(0, 1) == 1.0


def test_the_boundaries_of_all_replicas_take_few_looks_at_the_stages(monkeypatch):
    many = job(dp=40, pp=2)
    looks, degree = [], Stage.tp.fget
    monkeypatch.setattr(Stage, "tp", property(lambda stage: looks.append(1) or degree(stage)))
    slow = LinkSlowdowns.of(many, [link(0, 40, 3.0)])
    for replica in many.layout.replicas:
        boundaries_ms(many, replica, slow)
    assert len(looks) <= 2 * 80


def test_exchanges_for_slow_links_end_with_the_time(monkeypatch):
    judged, gains = [], _Judge.gains

    def counted(judge, orders):
        judged.extend(orders)
        return gains(judge, orders)

    monkeypatch.setattr(_Judge, "gains", counted)
    monkeypatch.setattr("scheduler.search.link_placement._BATCH", 1)
    slow = LinkSlowdowns.of(job(), [link(0, 2, 30.0)])
    found = search(job(), job().layout, {}, lambda: len(judged) >= 3, slow)
    assert len(judged) == 3
    assert found[0].layout.layers == 8
