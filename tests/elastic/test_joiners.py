"""Ranks come and go while the job runs: standbys, warnings, and deaths on the way."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from resihp.contracts import JoinRefusedError, Layout, Replica
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.arguments import check_arguments
from resihp.elastic.rendezvous.joiners import Invitation, Joiners
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.state.phases import Phase
from resihp.elastic.step import Setup
from resihp.elastic.trainer import Trainer
from tests.elastic.engine_job import (
    ALONE,
    GRID,
    SHIFTED,
    TIMEOUTS,
    Case,
    Fault,
    Outcome,
    plan,
    run,
    small_setup,
)
from tests.elastic.scripted import Scripted

STEPS = 8
FIRST = Layout((GRID.replicas[0],))


def _with_eight(replica: Replica, *, instead_of: int) -> Replica:
    stages = (
        replace(stage, ranks=tuple(8 if rank == instead_of else rank for rank in stage.ranks))
        for stage in replica.stages
    )
    return Replica(tuple(stages))


REPLACED = Layout((_with_eight(GRID.replicas[0], instead_of=1),))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The undisturbed single-process run."""
    return run(Case(ALONE, STEPS), tmp_path_factory.mktemp("alone"), timeout_s=300)


def assert_same_losses(outcome: Outcome, alone: Outcome) -> None:
    assert sorted(outcome.losses) == list(range(STEPS)), outcome.logs
    for step, loss in outcome.losses.items():
        assert loss == pytest.approx(alone.losses[step], abs=1e-3), outcome.logs


def test_a_standby_takes_the_place_of_a_slow_rank(alone: Outcome, tmp_path: Path) -> None:
    case = Case(FIRST, STEPS, joiners=(8,), welcome=(plan(1, REPLACED),), awaited=1)
    outcome = run(case, tmp_path, timeout_s=300)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    assert_same_losses(outcome, alone)
    assert {s["version"] for s in outcome.switches} == {1}, outcome.logs
    assert 8 in outcome.shards
    assert 1 not in outcome.shards


def test_a_joiner_does_not_count_the_steps_of_others_as_time_of_its_copy(
    alone: Outcome, tmp_path: Path
) -> None:
    """By it a rank judges how long a hand-over takes."""
    case = Case(FIRST, STEPS, joiners=(8,), welcome=(plan(1, REPLACED),), awaited=1)
    outcome = run(replace(case, copy_steps=2, step_s=2.0), tmp_path, timeout_s=300)
    assert_same_losses(outcome, alone)
    (own,) = (s for s in outcome.switches if s["rank"] == 8)
    assert own["copy_steps"] == 2, outcome.logs
    assert own["copy_ms"] < 1000.0


def deterministic_on_rank_8() -> Setup:
    return replace(small_setup(), deterministic=os.environ["RANK"] == "8")


def test_a_joiner_with_other_arguments_ends_alone(alone: Outcome, tmp_path: Path) -> None:
    case = Case(FIRST, STEPS, joiners=(8,), setup=deterministic_on_rank_8)
    outcome = run(case, tmp_path, timeout_s=300)
    assert {r for r, code in outcome.exit_codes.items() if code != 0} == {8}, outcome.logs
    told = "JoinRefusedError: deterministic: is True in this process, and False in the job"
    assert told in outcome.logs
    assert_same_losses(outcome, alone)


@pytest.mark.parametrize(
    "name", ["steps", "model", "optimizer", "recompute", "compute_dtype", "bucket_bytes"]
)
def test_arguments_of_a_joiner_are_those_of_the_job(name: str) -> None:
    """But for the plan, which is that of its invitation."""
    store = dist.HashStore()
    rendezvous = Rendezvous(lambda: store, 0, (0,), TIMEOUTS)
    trainer = Trainer(small_setup(), plan(0, FIRST), rendezvous, Scripted((), (), ()))
    given = trainer._arguments()
    check_arguments(rendezvous.stores, 0, given)
    store.set(keys.model(), "a model")
    left = iter([False, True])
    joiners = Joiners(store)

    def join(**others: str) -> Invitation | None:
        return joiners.await_invitation(
            8, "a model", lambda: next(left), arguments=given | {"plan": "another", **others}
        )

    assert join() is None
    assert store.add(keys.announced(8), 0) == 1
    with pytest.raises(JoinRefusedError, match=f"{name}: is another in this process"):
        join(**{name: "another"})
    assert store.add(keys.announced(8), 0) == 1


def test_a_joiner_that_dies_while_it_joins_stops_nobody(alone: Outcome, tmp_path: Path) -> None:
    """Killed when it is invited: the others find that it is not there and go on as they were."""
    case = Case(FIRST, STEPS, joiners=(8,), welcome=(plan(1, REPLACED),), joiner_dies=True)
    outcome = run(case, tmp_path, timeout_s=300)
    assert {r for r, code in outcome.exit_codes.items() if code != 0} == {8}, outcome.logs
    assert "ranks [8] are dead or do not answer" in outcome.logs
    assert_same_losses(outcome, alone)


def test_a_joiner_that_is_invited_while_others_recover_waits_for_the_next_world(
    alone: Outcome, tmp_path: Path
) -> None:
    """A rank dies at the moment of the invitation; the joiner is fenced out, and asks again."""
    with_eight = Layout((GRID.replicas[0], _with_eight(GRID.replicas[1], instead_of=7)))
    welcome = (plan(1, with_eight), plan(101, REPLACED))
    faults = (Fault(8, Phase.IDLE, 0, victim="6"),)
    case = Case(GRID, STEPS, faults=faults, joiners=(8,), welcome=welcome, awaited=101)
    outcome = run(case, tmp_path, timeout_s=300)
    assert {r for r, code in outcome.exit_codes.items() if code != 0} == {6}, outcome.logs
    assert_same_losses(outcome, alone)
    assert 8 in outcome.shards, outcome.logs


def test_a_rank_that_is_told_to_leave_hands_over_and_ends(alone: Outcome, tmp_path: Path) -> None:
    """After SIGTERM a rank ends by itself, and nobody is lost: two minutes are enough."""
    case = Case(GRID, STEPS, warned=((5, signal.SIGTERM, 3),), window_s=120.0, awaited=100)
    outcome = run(case, tmp_path, timeout_s=300)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    assert_same_losses(outcome, alone)
    assert {tuple(s["lost"]) for s in outcome.switches} == {()}, outcome.logs
    assert 5 not in outcome.shards


def test_a_rank_without_time_for_a_hand_over_is_lost_between_two_steps(
    alone: Outcome, tmp_path: Path
) -> None:
    """Half a second is not enough: it asks for no plan, and ends before the next step."""
    case = Case(GRID, STEPS, warned=((5, signal.SIGTERM, 3),), window_s=0.5)
    outcome = run(case, tmp_path, timeout_s=300)
    assert {r for r, code in outcome.exit_codes.items() if code != 0} == {5}, outcome.logs
    assert "too soon for a hand-over" in outcome.logs
    assert_same_losses(outcome, alone)
    assert {tuple(s["lost"]) for s in outcome.switches} == {(5,)}, outcome.logs


def test_a_notice_ends_a_copy_that_is_spread_over_steps(alone: Outcome, tmp_path: Path) -> None:
    """Soon instead of after six; then the rank hands over as at other times."""
    plans = (plan(1, SHIFTED, quotas=(4, 2), from_step=2),)
    warned = ((5, signal.SIGTERM, 1),)
    case = Case(GRID, STEPS, plans, warned=warned, window_s=120.0, copy_steps=6, awaited=101)
    outcome = run(case, tmp_path, timeout_s=300)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    assert_same_losses(outcome, alone)
    found = {(s["version"], s["copy_steps"], tuple(s["lost"])) for s in outcome.switches}
    assert found == {(1, 4, ()), (101, 1, ())}, outcome.logs
    assert 5 not in outcome.shards


def test_a_rank_without_time_for_the_rest_of_a_copy_is_lost_between_two_steps(
    alone: Outcome, tmp_path: Path
) -> None:
    plans = (plan(1, SHIFTED, quotas=(4, 2), from_step=2),)
    warned = ((5, signal.SIGTERM, 2),)
    case = Case(GRID, STEPS, plans, warned=warned, window_s=0.5, copy_steps=5)
    outcome = run(case, tmp_path, timeout_s=300)
    assert {r for r, code in outcome.exit_codes.items() if code != 0} == {5}, outcome.logs
    assert "too soon for a hand-over" in outcome.logs
    assert_same_losses(outcome, alone)
    assert {(s["version"], tuple(s["lost"])) for s in outcome.switches} == {(100, (5,))}


def test_training_outlives_the_store(alone: Outcome, tmp_path: Path) -> None:
    case = Case(FIRST, STEPS, store_dies_at=2, step_s=0.1)
    outcome = run(case, tmp_path, timeout_s=300)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    assert_same_losses(outcome, alone)
    assert "the store is gone; training goes on" in outcome.logs


def test_a_loss_without_the_store_is_a_clear_stop(tmp_path: Path) -> None:
    case = Case(FIRST, STEPS, store_dies_at=2, step_s=0.1, warned=((4, signal.SIGKILL, 6),))
    outcome = run(case, tmp_path, timeout_s=300)
    assert all(code != 0 for code in outcome.exit_codes.values()), outcome.logs
    assert "survivors cannot agree: the store is gone" in outcome.logs


def test_a_joiner_that_waits_long_looks_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append)
    monkeypatch.setattr("resihp.elastic.rendezvous.joiners.time", clock)
    joiners = Joiners(dist.HashStore())
    assert joiners.await_invitation(1, "a model", lambda: sum(slept) > 600.0) is None
    assert slept[0] < 0.05
    assert len(slept) < 11 * 600
