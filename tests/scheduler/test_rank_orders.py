"""Dead and slow ranks are gathered in few replicas where that shortens steps or moves less."""

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import Job, LayerCost, Layout, Memory, Schedule
from scheduler import make_plan, model_preset, plan_front, simulate
from scheduler.search import front, joint
from scheduler.search.rank_orders import _spread, gathered_orders

GRIDS = st.builds(
    Layout.grid,
    dp=st.integers(1, 4),
    pp=st.integers(1, 5),
    tp=st.integers(1, 3),
    layers=st.just(10),
)


def faults_of(layout):
    speed = st.sampled_from([0.0, 0.0, 0.3, 0.7])
    return st.dictionaries(st.sampled_from(sorted(layout.ranks)), speed, max_size=12)


@given(GRIDS.flatmap(lambda layout: st.tuples(st.just(layout), faults_of(layout))))
def test_ranks_are_gathered_one_in_a_stage(case):
    layout, speeds = case
    home = {place.rank: place for place in layout.places()}
    for order in gathered_orders(layout, speeds):
        moved = order.of(layout)
        assert sorted(moved.ranks) == sorted(layout.ranks)
        assert moved != layout
        assert [r.stages[0].shares for r in moved.replicas] == [
            r.stages[0].shares for r in layout.replicas
        ]
        assert all(home[place.rank].tp == place.tp for place in moved.places())
    dead = [rank for rank, speed in speeds.items() if speed == 0.0]
    gathered = [layout, *(order.of(layout) for order in gathered_orders(layout, speeds))]
    fewest = min(len({p.dp for p in moved.places() if p.rank in dead}) for moved in gathered)
    if len(dead) <= layout.pp * layout.dp and layout.tp == 1:
        assert fewest == -(-len(dead) // layout.pp)


@given(
    st.lists(
        st.lists(st.sampled_from([None, 0, 1, 2]), min_size=3, max_size=3), min_size=1, max_size=4
    ),
    st.integers(1, 3),
)
def test_as_many_as_wanted_are_gathered_in_a_stage(replica_of, most):
    """Replica of the slow rank at each stage and position, of which there is one or none."""
    layout = Layout.grid(dp=3, pp=len(replica_of), tp=3, layers=8)
    slow = {
        layout.replicas[d].stages[p].ranks[t]: 0.5
        for p, column in enumerate(replica_of)
        for t, d in enumerate(column)
        if d is not None
    }
    moved = [order.of(layout) for order in gathered_orders(layout, slow, (most,))] or [layout]
    held = Counter((p.pp, p.dp) for p in moved[-1].places() if p.rank in slow)
    for stage, column in enumerate(replica_of):
        count = sum(d is not None for d in column)
        assert sum(pp == stage for pp, _ in held) == -(-count // most)


def test_faults_of_a_stage_share_groups():
    layout = Layout.grid(dp=4, pp=2, tp=3, layers=8)
    ranks = {t: layout.replicas[d].stages[1].ranks[t] for d, t in [(0, 0), (2, 1), (3, 2)]}
    slow = {ranks[0]: 0.5, ranks[1]: 0.4, ranks[2]: 0.0}
    *_, pairs, triple = (order.of(layout) for order in gathered_orders(layout, slow, (1, 2, 3)))
    held = [
        sorted(Counter(p.dp for p in moved.places() if p.rank in slow).values())
        for moved in (pairs, triple)
    ]
    assert held == [[1, 2], [3]]


def test_slow_ranks_keep_their_stages():
    layout = Layout.grid(dp=4, pp=4, tp=2, layers=8)
    slow = {
        layout.replicas[d].stages[p].ranks[t]: 0.5 for d, p, t in [(0, 0, 1), (1, 2, 0), (3, 2, 1)]
    }
    (order,) = gathered_orders(layout, slow)
    moved = order.of(layout)
    home = {place.rank: place for place in layout.places()}
    assert all(home[place.rank].pp == place.pp for place in moved.places())
    assert Counter(p.dp for p in moved.places() if p.rank in slow) == {0: 2, 1: 1}


def test_healthy_ranks_and_single_faults_stay():
    layout = Layout.grid(dp=2, pp=2, tp=2, layers=4)
    assert gathered_orders(layout, {}) == []
    assert gathered_orders(layout, {3: 0.5, 4: 1.0}) == []
    assert gathered_orders(layout, {3: 0.0}) == []


@given(
    st.integers(1, 7).flatmap(
        lambda p: st.tuples(st.just(p), st.lists(st.integers(0, p - 1), max_size=p))
    )
)
def test_as_many_as_can_keep_their_stages(case):
    stages, columns = case
    taken = _spread(columns, stages)
    assert sorted(taken) == list(range(len(columns)))
    assert len(set(taken.values())) == len(columns)
    gaps = sorted(taken.values())
    steps = {(b - a) % stages or stages for a, b in zip(gaps, [*gaps[1:], *gaps[:1]], strict=True)}
    assert not steps or max(steps) - min(steps) <= 1
    same = [
        len(set(columns) & set(some))
        for some in combinations(range(stages), len(columns))
        if set(some)
        in [
            {(first + k * stages // len(columns)) % stages for k in range(len(columns))}
            for first in range(stages)
        ]
    ]
    kept = sum(taken[at] == column for at, column in enumerate(columns))
    assert kept == max(same, default=0)


def a_job():
    """70B, where a replica's loss of one rank in every stage is what moves least."""
    return Job(
        name="gathered",
        layout=Layout.grid(dp=8, pp=8, tp=4, layers=80, units=64),
        microbatches=256,
        cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
        model=replace(model_preset("llama-2-70b"), kv_heads=64),
        memory=Memory(budget_bytes=64_000_000_000, activation_bytes_per_layer=34 * 4096 * 8192),
    )


@pytest.mark.parametrize(
    ("columns", "step", "moved"), [([3] * 8, 0.98, 0.7), ([0, 0, 1, 1, 2, 2, 3, 3], 0.99, 0.45)]
)
def test_one_dead_rank_in_each_replica(columns, step, moved, monkeypatch):
    """Gathered, they leave more replicas whole, and stages that are all as slow."""
    job = a_job()
    dead = {job.layout.replicas[d].stages[p].ranks[1]: 0.0 for d, p in enumerate(columns)}
    plan, least = make_plan(job, dead), plan_front(job, dead)[-1]
    assert simulate(job, plan, speeds=dead).step_ms == pytest.approx(plan.step_ms)
    assert not set(dead) & set(least.plan.layout.ranks)
    for module in (joint, front):
        monkeypatch.setattr(module, "gathered_orders", lambda *_: [])
    apart, most = make_plan(job, dead), plan_front(job, dead)[-1]
    assert plan.step_ms < step * apart.step_ms
    assert least.total_bytes < moved * most.total_bytes


@pytest.mark.parametrize("seed", [0, 4])
def test_joined_replicas_and_full_groups_move_less(seed, monkeypatch):
    """Sixteen slow ranks of 256: their groups keep few layers, and few groups are concerned."""
    memory = Memory(
        budget_bytes=76_000_000_000,
        sharded_optimizer=True,
        activation_bytes_per_layer=34 * 4096 * 8192,
    )
    job = replace(a_job(), microbatches=512, quotas=(), memory=memory)
    rng = random.Random(seed)
    slow = {rank: 1.0 / rng.uniform(1.2, 4.0) for rank in rng.sample(range(256), 16)}
    least = plan_front(job, slow)[-1]
    depths = sorted(len(replica.stages) for replica in least.plan.layout.replicas)
    assert depths == [8] * 6 + [16]
    assert any("consists of stages of replicas" in reason for reason in least.plan.reason)
    assert any("work in other groups" in reason for reason in least.plan.reason)
    for name, without in (("_joined", lambda _: iter(())), ("_GATHERED", (1,))):
        with monkeypatch.context() as patch:
            patch.setattr(front, name, without)
            assert least.total_bytes < 0.75 * plan_front(job, slow)[-1].total_bytes


@pytest.mark.parametrize(
    ("dp", "pp", "speeds", "step_ms"),
    [(2, 4, {3: 0.5, 6: 0.3, 0: 0.3}, 55.0), (3, 3, {2: 0.0, 7: 0.5, 8: 0.5, 4: 0.3}, 72.0)],
)
def test_interleaved_stages_are_planned_from_every_layout_found(dp, pp, speeds, step_ms):
    """What is quickest with one chunk in a stage need not be with two."""
    job = Job(
        name="interleaved",
        layout=Layout.grid(dp=dp, pp=pp, tp=1, layers=12, chunks=2),
        microbatches=6,
        cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
        schedule=Schedule.INTERLEAVED,
        chunks=2,
    )
    assert make_plan(job, speeds).step_ms <= step_ms


def test_what_was_found_without_gathering_is_in_the_front_too():
    job = replace(a_job(), microbatches=64, quotas=())
    random = [(0, 0, 1), (1, 4, 0), (3, 4, 2), (3, 6, 1), (5, 2, 2), (6, 2, 1), (7, 7, 0)]
    speeds = {job.layout.replicas[d].stages[p].ranks[t]: 0.0 for d, p, t in random}
    found = joint.search(job, job.layout, speeds, lambda: False)
    arranged = [one.layout for one in found]
    assert len(found) == len(set(arranged)) == 3
    home = {place.rank: (place.dp, place.pp) for place in job.layout.places()}
    in_their_groups = [
        layout
        for layout in arranged
        if all(len({home[r] for r in s.ranks}) == 1 for rep in layout.replicas for s in rep.stages)
    ]
    assert in_their_groups
