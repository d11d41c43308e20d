"""Ranks that agree on quotas: the same ones in the same step, whatever fails on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import ContractError, PeerLostError
from resihp.elastic.ddp.quota_agreement import QuotaAgreement, QuotaState

EVEN = QuotaState(0, 0, (2, 2, 2), (1.0, 1.0, 1.0))
FIRST, SECOND = (replace(EVEN, version=v, quotas=q) for v, q in ((1, (3, 2, 1)), (7, (1, 2, 3))))


class Reduction:
    """Maxima over all ranks, one a step; `failing` (rank, step) cannot read that of a step."""

    def __init__(self, ranks: int, failing: frozenset[tuple[int, int]] = frozenset()) -> None:
        self._failing = failing
        self._given: dict[int, dict[int, list[float]]] = {}
        self._ranks = ranks
        self._next = [0] * ranks

    def starter(self, rank: int) -> Callable[[list[float]], Callable[[], list[float]]]:
        def start(numbers: list[float]) -> Callable[[], list[float]]:
            step = self._next[rank]
            self._next[rank] += 1
            self._given.setdefault(step, {})[rank] = numbers

            def result() -> list[float]:
                given_ = self._given[step]
                if (rank, step) in self._failing or len(given_) < self._ranks:
                    raise RuntimeError("connection closed by peer")
                return [max(column) for column in zip(*given_.values(), strict=True)]

            return result

        return start


def agreements(reduction: Reduction, ranks: int = 3) -> list[QuotaAgreement]:
    return [QuotaAgreement(reduction.starter(rank), EVEN) for rank in range(ranks)]


def play(
    ranks: list[QuotaAgreement], offers: dict[int, QuotaState], steps: int
) -> list[list[tuple[int, ...] | None]]:
    """Quotas of each rank in each step; None once it has stopped."""
    told: list[list[tuple[int, ...] | None]] = []
    stopped: set[int] = set()
    for step in range(steps):
        now: list[tuple[int, ...] | None] = []
        for number, rank in enumerate(ranks):
            try:
                if number not in stopped:
                    rank.advance()
            except PeerLostError:
                stopped.add(number)
            now.append(None if number in stopped else rank.in_force.quotas)
        if step in offers and ranks[0].is_free:
            ranks[0].propose(offers[step])
        for number, rank in enumerate(ranks):
            if number not in stopped:
                rank.begin(check=step)
        told.append(now)
    return told


def test_quotas_hold_two_steps_after_the_proposal_on_all_ranks() -> None:
    told = play(agreements(Reduction(3)), {1: FIRST, 4: SECOND}, 8)
    assert told == [[EVEN.quotas] * 3] * 3 + [[FIRST.quotas] * 3] * 3 + [[SECOND.quotas] * 3] * 2


def test_a_second_proposal_waits_for_the_first() -> None:
    told = play(agreements(Reduction(3)), {1: FIRST, 2: SECOND}, 8)
    assert told[-1] == [FIRST.quotas] * 3


@given(st.frozensets(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=4))
def test_ranks_never_differ_whatever_fails(failing: frozenset[tuple[int, int]]) -> None:
    """A rank that fails takes part in no later maximum, which the others then cannot read."""
    ranks = agreements(Reduction(3, failing))
    for now in play(ranks, {0: FIRST, 2: SECOND, 4: FIRST}, 9):
        assert len({quotas for quotas in now if quotas is not None}) <= 1
    for rank in ranks:
        assert rank.failures <= 1


def test_a_rank_that_cannot_know_stops_and_one_that_can_goes_on() -> None:
    """Step 1 carries that all hold the proposal of step 0."""
    for step, stops in ((0, False), (1, True), (2, False)):
        ranks = agreements(Reduction(3, frozenset({(1, step)})))
        told = play(ranks, {0: FIRST}, 5)
        assert (told[-1][1] is None) is stops, step
        assert ranks[1].failures == 1


def test_ranks_with_different_assignments_are_an_error() -> None:
    first, second = agreements(Reduction(2), 2)
    first.begin(check=1)
    second.begin(check=2)
    with pytest.raises(ContractError, match="same numbers on every rank"):
        first.advance()


def test_what_was_begun_at_the_end_is_read_when_training_goes_on() -> None:
    ranks = agreements(Reduction(3, frozenset({(0, 1)})))
    play(ranks, {0: FIRST}, 1)
    for rank in ranks:
        rank.finish()
        assert not rank.advance()
        rank.begin(check=1)
    for rank in ranks:
        rank.finish()
    with pytest.raises(PeerLostError):
        ranks[0].advance()
    assert ranks[1].advance()
