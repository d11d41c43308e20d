"""Shard ranges, moves and reductions, over layouts of any shape."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from resihp.contracts import Layout, Replica, Stage, StateLostError
from resihp.layout import (
    Param,
    Parameters,
    boundary_transfers,
    gradient_reductions,
    holdings,
    least_numel,
    microbatch_ranges,
    moves,
    split,
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


@given(any_layout, st.sampled_from([PARAMETERS, TIED]))
@settings(deadline=None, max_examples=60)
def test_the_state_is_written_exactly_once_by_ranks_that_hold_it(
    layout: Layout, parameters: Parameters
) -> None:
    held, written = holdings(layout, parameters), writers(layout, parameters)
    assert set(written) == set(layout.ranks)
    rows: list[tuple[Param, int]] = []
    for rank, spans in written.items():
        for param, (start, stop) in spans:
            assert held[rank][param][0] <= start < stop <= held[rank][param][1]
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
