"""Distribution of microbatches over ranks: each once, nobody without, never worse than by count."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import ModelShape, even_quotas
from resihp.elastic.microbatches.balancing import (
    assign_by_count,
    assign_by_work,
    at_least_one,
    last_end,
    microbatch_flops,
    quotas_by_speed,
    speeds_of_quotas,
)

WORK = st.lists(st.floats(0.1, 100.0), min_size=1, max_size=40)
SPEEDS = st.lists(st.floats(0.05, 2.0), min_size=1, max_size=8)


@st.composite
def cases(draw: st.DrawFn, most: int = 40) -> tuple[list[float], list[float]]:
    """Work of microbatches and speeds of as many ranks at most, some of equal speed."""
    work = draw(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=most))
    speed = st.sampled_from([1.0, 1.0, 0.5, 0.67]) | st.floats(0.05, 2.0)
    size = min(len(work), 4 if most < 10 else 8)
    return work, draw(st.lists(speed, min_size=1, max_size=size))


@given(cases())
def test_each_microbatch_once_and_no_rank_without(case: tuple[list[float], list[float]]) -> None:
    work, speeds = case
    quotas = at_least_one(quotas_by_speed(len(work), speeds))
    assigned = assign_by_work(work, speeds, quotas)
    assert sorted(index for own in assigned for index in own) == list(range(len(work)))
    assert len(assigned) == len(speeds)
    assert all(assigned)
    by_count = last_end(assign_by_count(quotas), work, speeds)
    assert last_end(assigned, work, speeds) <= by_count
    assert assigned == assign_by_work(list(work), tuple(speeds), quotas)


@given(st.lists(st.floats(0.1, 100.0), max_size=12), SPEEDS)
def test_ranks_that_may_idle(work: list[float], speeds: list[float]) -> None:
    quotas = quotas_by_speed(len(work), speeds)
    assigned = assign_by_work(work, speeds, quotas, may_idle=True)
    assert sorted(index for own in assigned for index in own) == list(range(len(work)))
    assert len(assigned) == len(speeds)
    by_count = last_end(assign_by_count(quotas), work, speeds)
    assert last_end(assigned, work, speeds) <= by_count


@pytest.mark.parametrize("may_idle", [False, True])
@given(case=cases(most=7))
def test_last_end_is_near_the_best_of_all_assignments(
    may_idle: bool, case: tuple[list[float], list[float]]
) -> None:
    work, speeds = case
    ranks = range(len(speeds))
    best = min(
        last_end([[i for i, at in enumerate(places) if at == rank] for rank in ranks], work, speeds)
        for places in product(ranks, repeat=len(work))
        if may_idle or set(places) == set(ranks)
    )
    quotas = at_least_one(even_quotas(len(work), len(speeds)))
    found = last_end(assign_by_work(work, speeds, quotas, may_idle=may_idle), work, speeds)
    bound = 4 / 3 if len(set(speeds)) == 1 else 5 / 3
    assert found <= best * bound * (1 + 1e-9)


def test_an_exchange_betters_what_longest_first_leaves() -> None:
    """Longest first alone: 7 + 4 + 3 on one rank, 6 + 5 on... ends at 14; the best is 13."""
    work = [7.0, 6.0, 5.0, 4.0, 3.0]
    assigned = assign_by_work(work, [1.0, 1.0], even_quotas(5, 2))
    assert last_end(assigned, work, [1.0, 1.0]) == 13.0


@given(st.integers(1, 60), SPEEDS)
def test_quotas_by_speed_end_as_early_as_any(microbatches: int, speeds: list[float]) -> None:
    """No microbatch can move from the last rank to another that would then end earlier."""
    quotas = quotas_by_speed(microbatches, speeds)
    assert sum(quotas) == microbatches
    end = max(quota / speed for quota, speed in zip(quotas, speeds, strict=True))
    least = min((quota + 1) / speed for quota, speed in zip(quotas, speeds, strict=True))
    assert end <= least * (1 + 1e-9)


def test_a_rank_of_speed_zero_gets_nothing_unless_all_have_it() -> None:
    assert quotas_by_speed(6, [1.0, 0.0, 1.0]) == (3, 0, 3)
    assert quotas_by_speed(5, [0.0, 0.0]) == (3, 2)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_a_rank_without_microbatches_gets_one(quotas: list[int]) -> None:
    given_ = at_least_one(quotas)
    assert sum(given_) == sum(quotas)
    assert min(given_) >= 1 or sum(quotas) < len(quotas)


def test_quotas_as_even_as_they_go_imply_no_difference_in_speed() -> None:
    assert speeds_of_quotas((6, 5, 5)) == (1.0, 1.0, 1.0)
    assert speeds_of_quotas((6, 6, 4)) == (6.0, 6.0, 4.0)


MODEL = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256)


@pytest.mark.parametrize("model", [None, MODEL])
def test_flops_count_tokens_and_squared_lengths(model: ModelShape | None) -> None:
    one, two, joined = (microbatch_flops(each, model) for each in ([8], [8, 8], [16]))
    assert two == pytest.approx(2 * one)
    assert joined > two
    if model is not None:
        matrices = 2.0 * (model.layers * model.layer_params + model.embedding_params)
        assert one == pytest.approx(8 * matrices + 2.0 * 2 * 64 * 8**2)
