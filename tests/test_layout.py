"""Shard ranges, moves and reductions, over layouts of any shape."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from resihp.contracts import Layout, Replica, Stage, StateLostError
from resihp.layout import (
    Param,
    Parameters,
    StateCopies,
    StateRanges,
    boundary_transfers,
    containing,
    gradient_reductions,
    holdings,
    least_numel,
    microbatch_ranges,
    moves,
    shards,
    split,
    state_blocks,
    state_ranges,
    writers,
)

UNITS, LAYERS, RANKS = 4, 4, 8
PARAMETERS = Parameters(
    tuple(
        (
            Param(f"layers.{i}.norm", (3,)),
            Param(f"layers.{i}.wq", (8, 3), 0, 2),
            Param(f"layers.{i}.wo", (3, 8), 1, 2),
            Param(f"layers.{i}.up", (11, 3), 0),
        )
        for i in range(LAYERS)
    ),
    (Param("first.table", (13, 3), 0),),
    (Param("last.head", (13, 3), 0),),
)
TIED = Parameters(PARAMETERS.layers, PARAMETERS.first, PARAMETERS.first)


@st.composite
def layouts(draw: st.DrawFn, ranks: tuple[int, ...] = tuple(range(RANKS))) -> Layout:
    """Any layout: uneven layers, degrees and shares, some ranks idle."""
    free = list(draw(st.permutations(ranks)))
    replicas: list[Replica] = []
    for _ in range(draw(st.integers(1, 3))):
        stages, layer = [], 0
        while layer < LAYERS and free:
            stop = draw(st.integers(layer + 1, LAYERS))
            degree = draw(st.integers(1, min(3, len(free))))
            cuts = sorted(draw(st.permutations(range(1, UNITS)))[: degree - 1])
            shares = tuple(int(n) for n in np.diff([0, *cuts, UNITS]))
            stages.append(Stage(tuple(free[:degree]), (layer, stop), shares))
            free, layer = free[degree:], stop
        if layer == LAYERS:
            replicas.append(Replica(tuple(stages)))
    if not replicas:
        replicas = [Replica((Stage((ranks[0],), (0, LAYERS), (UNITS,)),))]
    return Layout(tuple(replicas))


@st.composite
def chunked(draw: st.DrawFn) -> Layout:
    """A layout whose stages hold several model chunks, some of them without layers."""
    free = list(draw(st.permutations(range(RANKS))))
    replicas = []
    for _ in range(draw(st.integers(1, 2))):
        stages, chunks = 2, draw(st.integers(2, 3))
        inner = draw(st.lists(st.integers(0, LAYERS), min_size=2 * chunks - 1, max_size=5))
        edges = [0, *sorted(inner[: stages * chunks - 1]), LAYERS]
        spans = list(pairwise(edges))
        held = [(free.pop(),), (free.pop(), free.pop())]
        shares = ((UNITS,), (1, UNITS - 1))
        replicas.append(
            Replica(
                tuple(
                    Stage(held[s], spans[s], shares[s], tuple(spans[s + stages :: stages]))
                    for s in range(stages)
                )
            )
        )
    return Layout(tuple(replicas))


any_layout = st.one_of(layouts(), chunked())


@given(st.integers(1, 40), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_split_covers_every_row_once_at_unit_edges(
    blocks: int, shares: list[int], unit: int
) -> None:
    ranges = split(blocks * unit, shares, unit=unit)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == blocks * unit
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert all(start % unit == 0 for start, _ in ranges)
    exact = [blocks * share / sum(shares) for share in shares]
    sizes = [(stop - start) / unit for start, stop in ranges]
    assert all(abs(size - due) <= 1 for size, due in zip(sizes, exact, strict=True))


@given(any_layout)
@settings(deadline=None, max_examples=60)
def test_each_replica_holds_every_element_exactly_once(layout: Layout) -> None:
    for replica in layout.replicas:
        held = holdings(Layout((replica,)), PARAMETERS)
        for param in (*PARAMETERS.first, *PARAMETERS.layers[1], *PARAMETERS.last):
            counts = np.zeros(param.size, int)
            for ranges in held.values():
                if param in ranges:
                    counts[slice(*ranges[param])] += 1
            if param.dim is None:
                assert counts.min() >= 1
            else:
                assert (counts == 1).all()


@given(any_layout, any_layout, st.sets(st.integers(0, RANKS - 1), max_size=3))
@settings(deadline=None, max_examples=150)
def test_moves_bring_every_rank_exactly_what_it_lacks(
    old: Layout, new: Layout, lost: set[int]
) -> None:
    new_ranks = set(new.ranks)
    if new_ranks & lost:
        return
    before = {r: h for r, h in holdings(old, PARAMETERS).items() if r not in lost}
    try:
        planned = moves(old, new, PARAMETERS, lost=lost)
    except StateLostError:
        assert _something_is_gone(before)
        return
    assert sum(move.numel for move in planned) == least_numel(old, new, PARAMETERS, lost=lost)
    for rank, held in holdings(new, PARAMETERS).items():
        for param, (start, stop) in held.items():
            have = np.zeros(param.size, int)
            own = before.get(rank, {}).get(param)
            if own:
                have[slice(*own)] += 1
            for move in planned:
                if move.target == rank and move.param == param:
                    source = before[move.source][param]
                    assert source[0] <= move.start < move.stop <= source[1]
                    have[move.start : move.stop] += 1
            assert (have[start:stop] == 1).all()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_BLOCK_NUMEL", 6)


@given(any_layout, st.integers(1, 3), st.sampled_from([PARAMETERS, TIED]))
@settings(deadline=None, max_examples=100)
def test_the_optimizer_state_of_each_row_is_on_as_many_ranks_as_asked(
    layout: Layout, copies: int, parameters: Parameters
) -> None:
    """Each holds the parameter; ranges do not overlap; no rank has much more than the others."""
    held = holdings(layout, parameters)
    state = state_ranges(layout, parameters, StateCopies(copies))
    assert set(state) == set(layout.ranks)
    counts = {param: np.zeros(param.size, int) for param in parameters.all}
    for rank, ranges in state.items():
        for param, spans in ranges.items():
            assert all(a[1] < b[0] for a, b in pairwise(spans))
            assert held[rank][param][0] <= spans[0][0] < spans[-1][1] <= held[rank][param][1]
            for span in spans:
                counts[param][slice(*span)] += 1
    for reduction in gradient_reductions(layout, parameters):
        for param, (start, stop) in reduction.pieces:
            assert (counts[param][start:stop] == min(copies, len(reduction.ranks))).all()
    for ranks, blocks in state_blocks(layout, parameters, StateCopies(copies)).items():
        loads = [sum(block.numel for block in blocks if rank in block.ranks) for rank in ranks]
        assert max(loads) <= sum(loads) / len(ranks) + 2 * max(block.numel for block in blocks)


@given(
    any_layout,
    any_layout,
    st.sets(st.integers(0, RANKS - 1), max_size=2),
    st.builds(StateCopies, st.integers(1, 3), st.sampled_from([1, 4])),
)
@settings(deadline=None, max_examples=150)
def test_moves_of_sharded_state_bring_every_rank_exactly_what_it_lacks(
    old: Layout, new: Layout, lost: set[int], copies: StateCopies
) -> None:
    if set(new.ranks) & lost:
        return
    before = {r: h for r, h in state_ranges(old, PARAMETERS, copies).items() if r not in lost}
    try:
        planned = moves(old, new, PARAMETERS, lost=lost, copies=copies)
    except StateLostError:
        assert _rows(before) != _rows(state_ranges(old, PARAMETERS, copies))
        return
    least = least_numel(old, new, PARAMETERS, lost=lost, copies=copies)
    assert sum(move.numel for move in planned) == least
    for move in planned:
        containing(before[move.source], move.param, (move.start, move.stop))
    brought = {rank: _rows({rank: ranges}) for rank, ranges in before.items()}
    for move in planned:
        rows = {(move.param, row) for row in range(move.start, move.stop)}
        assert not rows & brought.setdefault(move.target, set())
        brought[move.target] |= rows
    for rank, ranges in state_ranges(new, PARAMETERS, copies).items():
        assert _rows({rank: ranges}) <= brought.get(rank, set())


def test_copies_of_one_range_are_on_two_nodes() -> None:
    rows = tuple((Param(f"layers.{i}.w", (512, 4), 0),) for i in range(LAYERS))
    layout = Layout.grid(dp=6, pp=1, tp=1, layers=LAYERS)
    for ranks_per_node in (2, 3):
        copies = StateCopies(2, ranks_per_node)
        (blocks,) = state_blocks(layout, Parameters(rows), copies).values()
        assert all(len({rank // ranks_per_node for rank in b.ranks}) == 2 for b in blocks)
        loads = [sum(b.numel for b in blocks if rank in b.ranks) for rank in layout.ranks]
        assert max(loads) < 1.1 * sum(loads) / len(loads)


def _rows(held: Mapping[int, StateRanges]) -> set[tuple[Param, int]]:
    return {
        (param, row)
        for ranges in held.values()
        for param, spans in ranges.items()
        for span in spans
        for row in range(*span)
    }


@pytest.mark.parametrize("dp", [3, 4, 8])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_loss_moves_hardly_more_than_what_was_lost(dp: int, copies: int) -> None:
    """With a copy of each range nothing is lost; nearly all that others hold stays where it is."""
    rows = [Param(f"layers.{i}.w", (512, 4), 0) for i in range(LAYERS)]
    parameters = Parameters(tuple((row,) for row in rows))
    old = Layout.grid(dp=dp, pp=1, tp=1, layers=LAYERS)
    new = Layout(old.replicas[1:])
    lost = () if copies == 1 else (0,)
    moved = sum(
        move.numel for move in moves(old, new, parameters, lost=lost, copies=StateCopies(copies))
    )
    share = copies * sum(row.size * row.row_numel for row in rows) / dp
    assert 0.9 * share < moved < 1.5 * share


def _something_is_gone(held: dict[int, dict[Param, tuple[int, int]]]) -> bool:
    everything = (*PARAMETERS.first, *(p for ps in PARAMETERS.layers for p in ps), *PARAMETERS.last)
    for param in everything:
        counts = np.zeros(param.size, int)
        for ranges in held.values():
            if param in ranges:
                counts[slice(*ranges[param])] += 1
        if (counts == 0).any():
            return True
    return False


def test_moving_to_the_same_layout_moves_nothing() -> None:
    layout = Layout.grid(dp=2, pp=2, tp=2, layers=LAYERS, units=UNITS)
    assert moves(layout, layout, PARAMETERS) == ()


def test_senders_share_the_load() -> None:
    old = Layout.grid(dp=2, pp=1, tp=1, layers=LAYERS, units=UNITS)
    third = Replica((Stage((2,), (0, LAYERS), (UNITS,)),))
    planned = moves(old, Layout((*old.replicas, third)), PARAMETERS)
    sent = [sum(m.numel for m in planned if m.source == rank) for rank in (0, 1)]
    assert abs(sent[0] - sent[1]) <= max(move.numel for move in planned)


@given(any_layout, any_layout, st.sampled_from([PARAMETERS, TIED]))
@settings(deadline=None, max_examples=60)
def test_each_range_comes_from_the_holder_that_has_sent_least(
    old: Layout, new: Layout, parameters: Parameters
) -> None:
    held, sent = holdings(old, parameters), dict.fromkeys(old.ranks, 0)
    for move in moves(old, new, parameters):
        nothing = (move.stop, move.start)
        spans = {rank: held[rank].get(move.param, nothing) for rank in old.ranks}
        able = [r for r, (a, b) in spans.items() if a <= move.start and move.stop <= b]
        assert move.source == min(able, key=lambda rank: (sent[rank], rank))
        sent[move.source] += move.numel


def test_state_held_by_no_survivor_is_named() -> None:
    old = Layout.grid(dp=1, pp=2, tp=1, layers=LAYERS, units=UNITS)
    new = Layout((Replica((Stage((0,), (0, LAYERS), (UNITS,)),)),))
    with pytest.raises(StateLostError, match=r"last\.head\[0:13\].*9 ranges"):
        moves(old, new, PARAMETERS, lost=[1])


@given(any_layout)
@settings(deadline=None, max_examples=60)
def test_every_gradient_is_summed_over_all_replicas_once(layout: Layout) -> None:
    held = holdings(layout, PARAMETERS)
    counts = {p: np.zeros(p.size, int) for p in (*PARAMETERS.first, *PARAMETERS.layers[2])}
    for reduction in gradient_reductions(layout, PARAMETERS):
        assert len(reduction.ranks) == layout.dp
        for param, span in reduction.pieces:
            for rank in reduction.ranks:
                start, stop = held[rank][param]
                assert start <= span[0] < span[1] <= stop
            if param in counts:
                counts[param][slice(*span)] += 1
    assert all((count == 1).all() for count in counts.values())


@given(any_layout)
@settings(deadline=None, max_examples=60)
def test_every_copy_of_a_tied_parameter_takes_part_in_its_sum_once(layout: Layout) -> None:
    (table,) = TIED.first
    copies = sum(1 if len(replica.stages) == 1 else 2 for replica in layout.replicas)
    counts = np.zeros(table.size, int)
    for reduction in gradient_reductions(layout, TIED):
        for param, span in reduction.pieces:
            if param == table:
                assert len(set(reduction.ranks)) == len(reduction.ranks) == copies
                counts[slice(*span)] += 1
    assert (counts == 1).all()


@given(any_layout, any_layout)
@settings(deadline=None, max_examples=60)
def test_a_tied_parameter_moves_once_to_a_rank_that_lacks_it(old: Layout, new: Layout) -> None:
    planned = moves(old, new, TIED)
    assert sum(move.numel for move in planned) == least_numel(old, new, TIED)


@given(
    any_layout,
    st.sampled_from([PARAMETERS, TIED]),
    st.sampled_from([None, *map(StateCopies, (1, 2, 3))]),
)
@settings(deadline=None, max_examples=60)
def test_the_state_is_written_exactly_once_by_ranks_that_hold_it(
    layout: Layout, parameters: Parameters, copies: StateCopies | None
) -> None:
    held = state_ranges(layout, parameters, copies)
    written = writers(layout, parameters, copies)
    assert set(written) == set(layout.ranks)
    rows: list[tuple[Param, int]] = []
    for rank, spans in written.items():
        for param, (start, stop) in spans:
            containing(held[rank], param, (start, stop))
            rows += [(param, row) for row in range(start, stop)]
    assert len(rows) == len(set(rows)) == sum(param.size for param in parameters.all)


@given(st.integers(1, 5), st.integers(1, 5))
def test_a_boundary_uses_every_sender_and_reaches_every_receiver(a: int, b: int) -> None:
    sender, receiver = Stage(tuple(range(a)), (0, 1)), Stage(tuple(range(a, a + b)), (1, 2))
    transfers = boundary_transfers(sender, receiver)
    assert [t.chunk for t in transfers] == list(range(max(a, b)))
    assert {t.source for t in transfers} == set(sender.ranks)
    assert {t.target for t in transfers} == set(receiver.ranks)


def test_quotas_cut_the_step_into_consecutive_microbatches() -> None:
    layout = Layout.grid(dp=3, pp=1, tp=1, layers=1)
    assert microbatch_ranges(layout, (3, 0, 5)) == {0: range(3), 1: range(3, 3), 2: range(3, 8)}
