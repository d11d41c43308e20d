"""Options of replicas: how many microbatches they run, which are taken, and what is saved last."""

import math
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import Job, LayerCost, Layout, ModelShape, Schedule
from scheduler.cost_model import GroupCost
from scheduler.migration import StateBytes
from scheduler.search import search
from scheduler.search.layer_partition import single_moves
from scheduler.search.received_state import NearbyShares, ReceivedState
from scheduler.search.replica_options import ReplicaOptions, _cheapest
from scheduler.search.tp_groups import TPGroup

SHAPE = ModelShape(layers=40, hidden=512, heads=8, kv_heads=8, ffn=1024, vocab=1000)
COST = GroupCost(1.0, 2.0, 0.0, 0.0)


def options_of(seed, per_replica):
    """Options of the replicas of a job with two slow ranks, and the step that the search found."""
    job = Job(
        name="test",
        layout=Layout.grid(dp=2, pp=6, tp=2, layers=SHAPE.layers, units=8),
        microbatches=2 * per_replica,
        model=SHAPE,
        cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
        schedules=(Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B),
    )
    rng = random.Random(seed)
    speeds = {rank: 1.0 / rng.uniform(1.2, 4.0) for rank in rng.sample(range(24), 2)}
    found, *_ = search(job, job.layout, speeds, lambda: False)
    nearby, sizes = NearbyShares(job, job.layout, speeds), StateBytes.of(job)
    options = ReplicaOptions([found], job.layout, sizes, nearby, (1.0, 1.25), math.inf)
    return options, found.makespan_ms


def makespan(options, option, count, layers=None):
    batch = options._batch([option], [count])
    return float(batch.makespans(np.array([layers or option.layers], np.int64))[0])


@settings(deadline=None, max_examples=200)
@given(
    runs=st.lists(
        st.lists(st.tuples(st.integers(1, 6), st.integers(0, 50)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    needed=st.integers(1, 20),
)
def test_no_other_choice_runs_enough_with_fewer_bytes(runs, needed):
    entries = [[(count, float(size), 0, ()) for count, size in run] for run in runs]
    picked = _cheapest(entries, needed)
    enough = [
        sum(size for _, size in chosen)
        for chosen in product(*runs)
        if sum(count for count, _ in chosen) >= needed
    ]
    if picked is None:
        assert not enough
        return
    chosen = [run[at] for run, at in zip(runs, picked, strict=True)]
    assert sum(count for count, _ in chosen) >= needed
    assert sum(size for _, size in chosen) == min(enough)


def test_a_replica_without_options_leaves_no_choice():
    assert _cheapest([[(4, 0.0, 0, ())], []], 3) is None


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 10**6), per_replica=st.integers(4, 24), more=st.floats(0.0, 0.01))
def test_options_run_as_many_microbatches_as_end_within_the_limit(seed, per_replica, more):
    """Of those near the number that they were made for, of which makespans are predicted."""
    options, makespan_ms = options_of(seed, per_replica)
    limit_ms = makespan_ms * (1 + more)
    for index, count in options._counts(limit_ms).items():
        option = options._options[index]
        if not count or abs(count - option.quota) > 1:
            continue
        assert makespan(options, option, count) <= limit_ms * (1 + 1e-9)
        assert makespan(options, option, count + 1) > limit_ms * (1 - 1e-9)


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 10**6), per_replica=st.integers(4, 24))
def test_no_move_of_a_layer_is_left_that_saves_bytes_within_the_limit(seed, per_replica):
    options, makespan_ms = options_of(seed, per_replica)
    limit_ms = 1.01 * makespan_ms
    (arranged,) = options.within(limit_ms)
    assert arranged.makespan_ms <= limit_ms * (1 + 1e-9)
    for chain, quota, layers in zip(arranged.chains, arranged.quotas, arranged.layers, strict=True):
        option = options._options[0]._replace(chain=chain, layers=layers, quota=quota)
        assert makespan(options, option, quota) <= arranged.makespan_ms * (1 + 1e-9)
        chains = np.array([chain], np.int64)
        now = options.state.total(chains, np.array([layers], np.int64))[0]
        for step in single_moves(len(chain)):
            moved = np.array(layers) + step
            if moved.min() >= 1 and options.state.total(chains, moved[None])[0] < now * (1 - 1e-9):
                later_ms = makespan(options, option, quota, tuple(moved.tolist()))
                assert later_ms > limit_ms * (1 - 1e-9)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), room=st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_no_other_layers_within_a_limit_receive_less(seed, room):
    """Among all boundaries that are within two layers of those of the present layout."""
    rng = random.Random(seed)
    layout = Layout.grid(dp=2, pp=4, tp=3, layers=16, units=12)
    groups = [
        TPGroup(ranks=tuple(rng.sample(range(24), 2)), shares=(5, 7), column=stage, cost=COST)
        for stage in range(4)
    ]
    job = Job(name="test", layout=layout, microbatches=4, model=replace(SHAPE, layers=16))
    state = ReceivedState(layout, groups, StateBytes.of(job))
    chains, home = np.arange(4)[None], np.array([state.home(range(4), 16)], np.int64)
    limit = np.array(room, np.int64)
    found = state.fewest(chains, home, limit[None, None])[0]
    options = [
        edges
        for edges in product(*(range(at - 2, at + 3) for at in np.cumsum(home[0])[:3].tolist()))
        if np.all(np.diff([0, *edges, 16]) >= 1) and np.all(np.diff([0, *edges, 16]) <= limit)
    ]
    if not options:
        assert not found.any()
        return
    assert found.sum() == 16
    assert np.all(found <= limit)
    layers = np.array([np.diff([0, *edges, 16]) for edges in options])
    least = state.total(np.repeat(chains, len(layers), axis=0), layers).min()
    assert state.total(chains, found)[0] == pytest.approx(least)
