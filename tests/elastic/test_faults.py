"""Ranks die or stop at every state of the state machine; the survivors end in one generation."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from resihp.elastic.state.phases import Phase
from tests.elastic.engine_job import (
    ALONE,
    BRISK,
    GRID,
    SHIFTED,
    UNEVEN,
    Case,
    Fault,
    Outcome,
    plan,
    run,
)

STEPS = 6
IN_A_STEP = (Phase.ACCUMULATING, Phase.REDUCING, Phase.UPDATING)
IN_A_SWITCH = (Phase.STREAMING, Phase.VOTING)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The undisturbed run."""
    return run(Case(ALONE, STEPS), tmp_path_factory.mktemp("alone"))


def assert_survived(outcome: Outcome, alone: Outcome, dead: set[int]) -> None:
    """Survivors finish, their replicas agree to the last bit, and the training is the same.

    Every step is reported, also one that the recovery has completed.
    """
    failed = {rank for rank, code in outcome.exit_codes.items() if code != 0}
    assert failed == dead, outcome.logs
    assert sorted(outcome.losses) == list(range(STEPS)), outcome.logs
    for step, loss in outcome.losses.items():
        assert loss == pytest.approx(alone.losses[step], abs=2e-5), outcome.logs
    assert outcome.full_state().keys() == alone.full_state().keys()


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        (Phase.ACCUMULATING, 0),
        (Phase.REDUCING, 3),
        (Phase.UPDATING, 6),
        *(pytest.param(p, r, marks=pytest.mark.soak) for p in IN_A_STEP for r in range(8)),
    ],
)
def test_killed_in_a_step(phase: Phase, rank: int, alone: Outcome, tmp_path: Path) -> None:
    completed = 2
    outcome = run(Case(GRID, STEPS, faults=(Fault(rank, phase, completed),)), tmp_path)
    assert_survived(outcome, alone, {rank})


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        (Phase.STREAMING, 0),
        (Phase.VOTING, 5),
        *(pytest.param(p, r, marks=pytest.mark.soak) for p in IN_A_SWITCH for r in range(8)),
    ],
)
def test_killed_in_a_switch(phase: Phase, rank: int, alone: Outcome, tmp_path: Path) -> None:
    """The switch keeps a replica whole whichever generation holds, so the survivors can go on."""
    plans = (plan(1, SHIFTED, quotas=(4, 2), from_step=2),)
    faults = tuple(Fault(rank, phase, completed) for completed in range(1, STEPS))
    outcome = run(Case(GRID, STEPS, plans, faults), tmp_path)
    assert_survived(outcome, alone, {rank})


@pytest.mark.parametrize(
    ("phase", "rank", "completed"),
    [
        (Phase.UPDATING, 0, 1),
        (Phase.ACCUMULATING, 5, 2),
        (Phase.REDUCING, 3, 3),
        *(
            pytest.param(p, r, c, marks=pytest.mark.soak)
            for p in (*IN_A_STEP, *IN_A_SWITCH)
            for r in (0, 3, 6)
            for c in (1, 2, 3)
        ),
    ],
)
def test_killed_while_a_copy_is_spread_over_steps(
    phase: Phase, rank: int, completed: int, alone: Outcome, tmp_path: Path
) -> None:
    """Three of them, from the second one on: what has been copied and updated is dropped."""
    plans = (plan(1, SHIFTED, quotas=(4, 2), from_step=2),)
    fault = Fault(rank, phase, completed)
    outcome = run(Case(GRID, STEPS, plans, (fault,), copy_steps=3), tmp_path)
    is_met = phase not in IN_A_SWITCH or completed == 3
    assert_survived(outcome, alone, {rank} if is_met else set())


def test_two_killed_at_once(alone: Outcome, tmp_path: Path) -> None:
    faults = (Fault(2, Phase.ACCUMULATING, 3), Fault(6, Phase.ACCUMULATING, 3))
    assert_survived(run(Case(GRID, STEPS, faults=faults), tmp_path), alone, {2, 6})


def test_killed_during_the_recovery_of_another(alone: Outcome, tmp_path: Path) -> None:
    faults = (Fault(2, Phase.REDUCING, 2), Fault(3, Phase.RECOVERING, 2))
    assert_survived(run(Case(GRID, STEPS, faults=faults), tmp_path), alone, {2, 3})


@pytest.mark.parametrize("stopped", [{7}, {0}, {0, 1, 4, 5}], ids=str)
def test_stopped_for_longer_than_the_heartbeat(
    stopped: set[int], alone: Outcome, tmp_path: Path
) -> None:
    """A stopped rank breaks no connection; the others give it up and go on without it.

    Each replica is on a host of its own: rank 0 watches the first one, and the last case is the
    loss of that whole host.
    """
    faults = tuple(Fault(rank, Phase.ACCUMULATING, 2, signal.SIGSTOP) for rank in stopped)
    hosts = (frozenset({0, 1, 4, 5}),)
    case = Case(GRID, STEPS, faults=faults, stopped=frozenset(stopped), timeouts=BRISK, hosts=hosts)
    outcome = run(case, tmp_path)
    assert_survived(outcome, alone, set())
    assert not stopped & set(outcome.exit_codes)


def test_what_no_survivor_holds_stops_the_job_with_its_name(tmp_path: Path) -> None:
    faults = (Fault(0, Phase.ACCUMULATING, 2), Fault(3, Phase.ACCUMULATING, 2))
    outcome = run(Case(UNEVEN, STEPS, faults=faults), tmp_path)
    assert all(code != 0 for code in outcome.exit_codes.values()), outcome.logs
    assert "no replica is whole" in outcome.logs
