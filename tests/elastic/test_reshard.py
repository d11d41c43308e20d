"""What a change of layout does beside and between steps: filled while training, or not at all."""

from __future__ import annotations

import signal
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import Layout, Replica, Stage
from resihp.elastic.models import Llama
from resihp.elastic.reshard.buffers import ReshardBudget
from resihp.elastic.reshard.exchange import transfer_buckets
from resihp.elastic.state.phases import Phase
from resihp.layout import Move, Param, moves
from tests.elastic.engine_job import (
    ALONE,
    BRISK,
    GRID,
    SHAPE,
    SHIFTED,
    TIMEOUTS,
    Case,
    Fault,
    Outcome,
    TransferFault,
    plan,
    run,
)

STEPS = 8
PARAMETERS = Llama(SHAPE).parameters
SMALL = Layout((Replica((Stage((6,), (0, 3), (4,)), Stage((0, 3), (3, 4), (1, 3)))),))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The undisturbed single-process run."""
    return run(Case(ALONE, STEPS), tmp_path_factory.mktemp("alone"))


@st.composite
def some_moves(draw: st.DrawFn) -> list[Move]:
    moves = []
    for index in range(draw(st.integers(1, 6))):
        dim = draw(st.sampled_from([None, 0, 1]))
        shape = (draw(st.integers(1, 300)), draw(st.integers(1, 300)))
        param = Param(f"layers.0.p{index}", shape, dim)
        start = draw(st.integers(0, param.size - 1))
        stop = draw(st.integers(start + 1, param.size))
        source, target = draw(st.sampled_from([(0, 1), (1, 0), (2, 0)]))
        moves.append(Move(param, start, stop, source, target))
    return moves


@given(planned=some_moves(), copies=st.integers(1, 3), most=st.integers(1, 1 << 15))
def test_buckets_hold_every_row_once_and_stay_small(
    planned: list[Move], copies: int, most: int
) -> None:
    held: dict[tuple[str, int, int, int], list[int]] = defaultdict(list)
    for bucket in transfer_buckets(planned, copies, most):
        pieces = bucket.pieces
        assert bucket.numel <= most or len(pieces) == 1
        assert len({(piece.move.source, piece.move.target) for piece in pieces}) == 1
        for piece in pieces:
            move = piece.move
            key = (move.param.key, piece.copy, bucket.source, bucket.target)
            held[key] += range(move.start, move.stop)
    for move in planned:
        for copy in range(copies):
            key = (move.param.key, copy, move.source, move.target)
            assert sorted(held.pop(key)) == list(range(move.start, move.stop))
    assert not held


def assert_same_losses(outcome: Outcome, alone: Outcome) -> None:
    assert sorted(outcome.losses) == list(range(STEPS)), outcome.logs
    for step, loss in outcome.losses.items():
        assert loss == pytest.approx(alone.losses[step], abs=2e-5), outcome.logs


def test_idle_ranks_follow_new_quotas_and_come_back(alone: Outcome, tmp_path: Path) -> None:
    """Rank 0, which publishes the plans, is idle while the quotas of the others change."""
    without_zero = Layout(
        (
            Replica((Stage((1, 2), (0, 3), (2, 2)), Stage((3,), (3, 4), (4,)))),
            Replica((Stage((4,), (0, 4), (4,)),)),
        )
    )
    plans = (
        plan(1, without_zero, from_step=1),
        plan(2, without_zero, quotas=(4, 2), from_step=3),
        plan(3, GRID, from_step=5),
    )
    outcome = run(Case(GRID, STEPS, plans), tmp_path)
    assert_same_losses(outcome, alone)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    assert {s["version"] for s in outcome.switches if s["rank"] == 0} == {1, 2, 3}, outcome.logs
    assert {s["received"] for s in outcome.switches if s["version"] == 2} == {0}


@pytest.mark.parametrize("rank", [0, 5])
def test_killed_while_quotas_are_agreed_on(rank: int, alone: Outcome, tmp_path: Path) -> None:
    """The survivors may or may not have taken the quotas on; either way all of them did."""
    plans = (plan(1, GRID, quotas=(5, 1), from_step=2),)
    faults = tuple(Fault(rank, Phase.UPDATING, completed) for completed in (2, 3))
    outcome = run(Case(GRID, STEPS, plans, faults), tmp_path)
    assert_same_losses(outcome, alone)
    assert {r for r, code in outcome.exit_codes.items() if code != 0} == {rank}, outcome.logs


@pytest.mark.parametrize(
    ("rank", "with_signal", "attach"),
    [
        (0, signal.SIGKILL, True),
        (5, signal.SIGSTOP, True),
        (5, signal.SIGKILL, False),
        pytest.param(5, signal.SIGKILL, True, marks=pytest.mark.soak),
        pytest.param(0, signal.SIGSTOP, True, marks=pytest.mark.soak),
        pytest.param(0, signal.SIGKILL, False, marks=pytest.mark.soak),
        pytest.param(5, signal.SIGSTOP, False, marks=pytest.mark.soak),
    ],
)
def test_lost_while_the_next_world_is_filled(
    rank: int, with_signal: int, attach: bool, alone: Outcome, tmp_path: Path
) -> None:
    """A rank is lost in the background stream; the old generation holds, without it."""
    plans = (plan(1, SHIFTED, quotas=(4, 2), from_step=2),)
    stopped = frozenset({rank} if with_signal == signal.SIGSTOP else ())
    fault = TransferFault(rank, 3, with_signal)
    timeouts = BRISK if stopped else TIMEOUTS
    case = Case(GRID, STEPS, plans, transfer_fault=fault, stopped=stopped, timeouts=timeouts)
    case = replace(case, memory=replace(case.memory, attach=attach))
    assert_goes_on_without(rank, run(case, tmp_path), alone, stopped)


@pytest.mark.parametrize(
    ("rank", "attach", "number"),
    [
        (5, True, 1),
        (0, False, 2),
        pytest.param(0, True, 0, marks=pytest.mark.soak),
        pytest.param(5, False, 4, marks=pytest.mark.soak),
        pytest.param(3, True, 5, marks=pytest.mark.soak),
    ],
)
def test_killed_while_gradients_move(
    rank: int, attach: bool, number: int, alone: Outcome, tmp_path: Path
) -> None:
    """Of a step that may not be at its end: what has moved of it is dropped.

    If all survivors have its sums, they complete it in the recovery, and report it.
    """
    plans = (plan(1, SHIFTED, quotas=(4, 2), from_step=2),)
    fault = TransferFault(rank, number, of_gradients=True)
    case = Case(GRID, STEPS, plans, transfer_fault=fault)
    case = replace(case, memory=replace(case.memory, attach=attach))
    assert_goes_on_without(rank, run(case, tmp_path), alone)


def test_a_rank_is_killed_while_its_memory_is_read(alone: Outcome, tmp_path: Path) -> None:
    """It takes no part in the reading; who reads notices that its memory is gone."""
    plans = (plan(1, SHIFTED, quotas=(4, 2), from_step=2),)
    giver = next(m.source for m in moves(GRID, SHIFTED, PARAMETERS) if m.target == 4)
    case = Case(GRID, STEPS, plans, transfer_fault=TransferFault(4, 3, victim=giver))
    assert_goes_on_without(giver, run(case, tmp_path), alone)


def assert_goes_on_without(
    rank: int, outcome: Outcome, alone: Outcome, stopped: frozenset[int] = frozenset()
) -> None:
    assert_same_losses(outcome, alone)
    failed = {r for r, code in outcome.exit_codes.items() if code != 0}
    assert failed == {rank} - stopped, outcome.logs
    assert {tuple(s["lost"]) for s in outcome.switches} == {(rank,)}, outcome.logs


def test_without_reading_all_of_it_travels_through_sockets(tmp_path: Path) -> None:
    """The same bytes, and the same training to the last bit."""
    ranks, plans = tuple(range(8)), (plan(1, GRID, from_step=2), plan(2, SHIFTED, from_step=4))
    outcomes = []
    for attach in (True, False):
        memory = ReshardBudget(limit_bytes=16384, attach=attach)
        case = Case(SMALL, 6, plans, ranks=ranks, memory=memory)
        outcomes.append(run(case, tmp_path / str(attach)))
        at = {(s["version"], s["at"]) for s in outcomes[-1].switches}
        assert at == {(p.version, p.from_step) for p in plans}, outcomes[-1].logs
    read, sent = (sorted((s["at"], s["rank"], s["received"]) for s in o.switches) for o in outcomes)
    assert read == sent
    assert outcomes[0].losses == outcomes[1].losses
    others = outcomes[1].full_state()
    for key, tensors in outcomes[0].full_state().items():
        assert all(a.equal(b) for a, b in zip(tensors, others[key], strict=True)), key


def test_more_ranks_come_out_of_a_switch_than_go_in(alone: Outcome, tmp_path: Path) -> None:
    """Five idle ranks get their state and make the update of the step in which they come in."""
    plans = (plan(1, GRID, from_step=2),)
    outcome = run(Case(SMALL, STEPS, plans, ranks=tuple(range(8))), tmp_path)
    assert_same_losses(outcome, alone)
    before, after = outcome.full_state("before0"), outcome.full_state("after1")
    for key, tensors in before.items():
        assert all(a.equal(b) for a, b in zip(tensors, after[key], strict=True)), key
        if key not in ("scalars", "completed"):
            assert len(tensors) == 4, "parameter, two moments, and the gradient of the step"
