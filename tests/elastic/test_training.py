"""The runtime trains the same model in every layout, and moves its state to the last bit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from resihp.contracts import ContractError, Job, Layout, Replica, Stage
from resihp.elastic import train
from resihp.elastic.models import from_pretrained
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.step import Setup
from resihp.elastic.trainer import Trainer
from resihp.testing.local_ranks import LocalRanks
from tests.elastic.engine_job import (
    ALONE,
    GRID,
    MICROBATCHES,
    SHAPE,
    TIMEOUTS,
    UNEVEN,
    Case,
    Outcome,
    plan,
    run,
    small_setup,
)
from tests.elastic.scripted import Scripted

STEPS = 10


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The undisturbed single-process run that every layout must follow."""
    return run(Case(ALONE, STEPS), tmp_path_factory.mktemp("alone"))


def assert_same_training(outcome: Outcome, alone: Outcome) -> None:
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    assert sorted(outcome.losses) == list(range(STEPS))
    for step, loss in outcome.losses.items():
        assert loss == pytest.approx(alone.losses[step], abs=2e-5)
    assert outcome.losses[STEPS - 1] < outcome.losses[0]
    reference = alone.full_state()
    for key, tensors in outcome.full_state().items():
        for tensor, expected in zip(tensors, reference[key], strict=True):
            torch.testing.assert_close(tensor, expected, rtol=2e-2, atol=2e-4)


DEEP = Layout(
    (
        Replica(tuple(Stage((i,), (i, i + 1), (4,)) for i in range(4))),
        Replica((Stage((4, 5, 6), (0, 4), (2, 1, 1)),)),
    )
)


@pytest.mark.parametrize("layout", [GRID, UNEVEN, DEEP], ids=["grid", "uneven", "deep"])
def test_every_layout_trains_alike(layout: Layout, alone: Outcome, tmp_path: Path) -> None:
    outcome = run(Case(layout, STEPS, exported=True), tmp_path)
    assert_same_training(outcome, alone)
    exported, state = from_pretrained(tmp_path / "exported"), outcome.full_state()
    for param in exported.parameters.all:
        assert torch.equal(exported.initial(param, (0, param.size)), state[param.key][0])


def test_a_chain_of_live_switches_is_exact(alone: Outcome, tmp_path: Path) -> None:
    """Uneven, deeper with an idle rank, fewer replicas with five idle, and back to the start."""
    small = Layout((Replica((Stage((6,), (0, 3), (4,)), Stage((0, 3), (3, 4), (1, 3)))),))
    plans = (
        plan(1, UNEVEN, quotas=(5, 1), from_step=1),
        plan(2, DEEP, from_step=3),
        plan(3, small, from_step=5),
        plan(4, GRID, from_step=7),
    )
    outcome = run(Case(GRID, STEPS, plans, ranks=tuple(range(8))), tmp_path)
    assert_same_training(outcome, alone)
    assert sorted({s["version"] for s in outcome.switches}) == [1, 2, 3, 4], outcome.logs
    assert all(s["extra"] <= 16384 for s in outcome.switches), "most of it went to files"
    assert any(s["spilled"] > 0 for s in outcome.switches)
    for generation in range(4):
        before, after = (
            outcome.full_state(f"before{generation}"),
            outcome.full_state(f"after{generation + 1}"),
        )
        for key, tensors in before.items():
            for tensor, moved in zip(tensors, after[key], strict=True):
                assert torch.equal(tensor, moved), f"{key} changed in switch {generation + 1}"


def test_quotas_alone_change_without_moving_anything(alone: Outcome, tmp_path: Path) -> None:
    plans = (plan(1, GRID, quotas=(5, 1), from_step=2),)
    assert_same_training(run(Case(GRID, STEPS, plans), tmp_path), alone)


def deterministic_on_rank_1() -> Setup:
    return replace(small_setup(), deterministic=os.environ["RANK"] == "1")


def test_ranks_that_are_started_with_different_arguments_end(tmp_path: Path) -> None:
    twice = Layout.grid(dp=2, pp=1, tp=1, layers=4, units=4)
    outcome = run(Case(twice, STEPS, setup=deterministic_on_rank_1), tmp_path, timeout_s=120)
    assert all(code != 0 for code in outcome.exit_codes.values()), outcome.logs
    assert "ContractError: deterministic: is " in outcome.logs
    assert not outcome.losses


def test_a_layout_on_ranks_that_are_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    elsewhere = Layout((Replica((Stage((5,), (0, 4), (4,)),)),))
    with pytest.raises(ContractError, match="is 1: there is no rank 5, which the layout needs"):
        train(small_setup(), Job(name="job", layout=elsewhere, microbatches=1), 1)


def train_twice(rank: int, host: str, port: int) -> None:
    names = {"RANK": rank, "WORLD_SIZE": 1, "MASTER_ADDR": host, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "1"
    job = Job(name="job", layout=ALONE, microbatches=MICROBATCHES, model=SHAPE)
    for _ in range(2):
        assert train(small_setup(), job, 1, timeouts=TIMEOUTS).completed == 1


def test_a_second_job_of_a_process_is_refused_where_the_launcher_knows_the_first(
    tmp_path: Path,
) -> None:
    """It waited for ever or, with other steps, was told that the ranks differ in them."""
    with LocalRanks("twice", tmp_path) as ranks:
        ranks.start([0], train_twice)
        assert ranks.wait(120) != {0: 0}
        assert "ContractError: job: that of this process has ended" in ranks.logs()


def test_a_number_of_steps_below_zero_is_refused() -> None:
    rendezvous = Rendezvous(HashStore, 0, (0,), TIMEOUTS)
    trainer = Trainer(small_setup(), plan(0, ALONE), rendezvous, Scripted((), (), ()))
    for start in (trainer.run, trainer.join):
        with pytest.raises(ContractError, match="steps: must be 0 or more, not -3"):
            start(-3)
