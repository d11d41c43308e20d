"""The longest-path kernel against a plain event simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import ContractError
from resihp.pipeline.graph import Graph


@st.composite
def jobs(draw):
    size = draw(st.integers(1, 14))
    predecessors = [
        sorted(draw(st.sets(st.integers(0, op - 1), max_size=3))) if op else []
        for op in range(size)
    ]
    alone = list(range(size))
    groups = []
    for _ in range(draw(st.integers(0, 3))):
        # Neighbours in the order that do not wait for each other may form a group.
        at = draw(st.integers(0, size - 1))
        pair = [op for op in (at, at + 1) if op in alone]
        if pair and not (len(pair) == 2 and pair[0] in predecessors[pair[1]]):
            groups.append(pair)
            alone = [op for op in alone if op not in pair]
    synced = [i for i in range(len(groups)) if draw(st.booleans())]
    seed = draw(st.integers(0, 2**32 - 1))
    return predecessors, groups, synced, seed


def simulate(predecessors, groups, synced, duration):
    """One operation at a time, as soon as all that it needs is there."""
    size = len(duration)
    member = {op: g for g, group in enumerate(groups) for op in group}
    start = np.full(duration.shape, np.nan)
    end = np.full(duration.shape, np.nan)
    while np.isnan(end).any():
        for op in range(size):
            if np.isnan(start[op]).any() and not np.isnan(end[predecessors[op]]).any():
                start[op] = np.max([end[p] for p in predecessors[op]], axis=0, initial=0.0)
        for op in range(size):
            group = groups[member[op]] if op in member else [op]
            if np.isnan(start[group]).any():
                continue
            ready = start[group].max(axis=0)
            if member.get(op) in synced:
                ready = np.broadcast_to(ready.max(axis=0), ready.shape)
            end[op] = ready + duration[op]
    return start, end


@settings(deadline=None, max_examples=60)
@given(jobs())
def test_agrees_with_a_simulation_of_single_events(job):
    predecessors, groups, synced, seed = job
    duration = np.random.default_rng(seed).random((len(predecessors), 2, 3))
    start, end = Graph(predecessors, groups, synced).replay(duration)
    expected_start, expected_end = simulate(predecessors, groups, synced, duration)
    np.testing.assert_allclose(start, expected_start)
    np.testing.assert_allclose(end, expected_end)


@settings(deadline=None, max_examples=30)
@given(jobs(), st.floats(0.1, 10.0))
def test_longer_operations_never_end_a_step_sooner(job, factor):
    predecessors, groups, synced, seed = job
    rng = np.random.default_rng(seed)
    graph = Graph(predecessors, groups, synced)
    duration = rng.random((graph.size, 2, 1))
    longer = duration + factor * rng.random(duration.shape)
    assert (graph.replay(longer)[1] >= graph.replay(duration)[1]).all()
    np.testing.assert_allclose(
        graph.replay(factor * duration)[1], factor * graph.replay(duration)[1]
    )


def test_a_delay_holds_an_operation_back_after_all_is_ready():
    graph = Graph([[], [0]])
    duration = np.array([1.0, 2.0])[:, None, None]
    delay = np.array([0.5, 0.25])[:, None, None]
    start, end = graph.replay(duration, delay)
    assert start.ravel().tolist() == [0.5, 1.75]
    assert end.ravel().tolist() == [1.5, 3.75]


def test_operations_that_wait_for_each_other_are_refused():
    with pytest.raises(ContractError, match="circle"):
        Graph([[1], [0]])
    with pytest.raises(ContractError, match="circle"):
        Graph([[], [0]], groups=[[0, 1]])


def test_durations_must_have_three_axes():
    with pytest.raises(ContractError, match="shape"):
        Graph([[]]).replay(np.ones((1, 1)))
