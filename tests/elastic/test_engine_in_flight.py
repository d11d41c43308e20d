"""Replicas with their own numbers of microbatches in flight train to the same bit."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from resihp.contracts import ContractError, Job, Layout, Op, Plan, Schedule
from resihp.elastic import training
from resihp.elastic.rendezvous.environment import Environment
from resihp.elastic.step import Setup, engine
from resihp.elastic.step.schedule import check_schedule
from tests.elastic.test_models import MODELS, OPTIMIZER, batch
from tests.elastic.threads import train

STEPS, MICROBATCHES = 2, 8
PIPELINE = Layout.grid(dp=1, pp=3, tp=1, layers=4)


def in_flight(layout: Layout, counts: tuple[int, ...]) -> Layout:
    """The layout, each replica with these numbers."""
    return Layout(tuple(replace(replica, in_flight=counts) for replica in layout.replicas))


class HeldMost:
    """Recorder: most forwards without their backward of each rank, which is a thread."""

    def __init__(self) -> None:
        self._ops: dict[int, list[Op]] = defaultdict(list)

    def __call__(self, *, op: Op, **fields: Any) -> None:
        if op in (Op.FORWARD, Op.BACKWARD):
            self._ops[threading.get_ident()].append(op)

    def counts(self) -> list[int]:
        """Of all ranks, ascending."""
        return sorted(map(most_held, self._ops.values()))


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_in_flight_changes_no_bit(deterministic: bool) -> None:
    """Each stage holds as many as the plan says, and adds up the same gradients in order."""
    record = HeldMost()
    setup = Setup(MODELS["llama"], OPTIMIZER, batch, deterministic=deterministic)
    usual = train(setup, Plan(version=0, layout=PIPELINE, quotas=(MICROBATCHES,)), STEPS)
    plan = Plan(
        version=0,
        layout=in_flight(PIPELINE, (7, 3, 1)),
        quotas=(MICROBATCHES,),
        schedule=Schedule.EAGER_1F1B,
    )
    found = train(replace(setup, record=record), plan, STEPS)
    assert found.losses == usual.losses
    expected = usual.state
    for param, tensors in found.state.items():
        assert all(map(torch.equal, tensors, expected[param])), param.key
    assert record.counts() == [1, 3, 7]


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B])
def test_no_stage_holds_more_than_the_job_lets_it(schedule: Schedule) -> None:
    setup = Setup(MODELS["llama"], OPTIMIZER, batch)
    plan = Plan(version=0, layout=PIPELINE, quotas=(MICROBATCHES,), schedule=schedule)
    record = HeldMost()
    found = train(replace(setup, record=record, max_in_flight=2), plan, STEPS)
    assert found.losses == train(setup, plan, STEPS).losses
    assert record.counts() == [1, 2, 2]


INTERLEAVED = Layout.grid(dp=1, pp=2, tp=1, layers=4, chunks=2)


def test_a_plan_beyond_what_the_job_lets_stages_hold_is_refused() -> None:
    plan = Plan(version=0, layout=INTERLEAVED, quotas=(8,), schedule=Schedule.INTERLEAVED)
    check_schedule(plan, 3)
    with pytest.raises(ContractError, match="max_in_flight: must be 3 or more with 2 chunks"):
        check_schedule(plan, 2)


def test_what_is_left_of_a_step_keeps_to_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved stages would hold more with another number of microbatches than their quota."""
    monkeypatch.setattr(engine, "check_schedule", lambda plan, most: None)
    plan = Plan(version=0, layout=INTERLEAVED, quotas=(5,), schedule=Schedule.INTERLEAVED)
    setup = Setup(MODELS["llama"], OPTIMIZER, batch)
    record = HeldMost()
    found = train(replace(setup, record=record, max_in_flight=2), plan, STEPS)
    assert found.losses == pytest.approx(train(setup, plan, STEPS).losses, abs=2e-6)
    assert record.counts() == [3, 4]  # model chunks, two to a microbatch


def test_training_takes_it_from_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Setup] = []

    class Started(Exception):  # noqa: N818
        pass

    def start(setup: Setup, *arguments: Any, **options: Any) -> None:
        given.append(setup)
        raise Started

    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Environment, "rendezvous", lambda *arguments, **options: None)
    monkeypatch.setattr(training, "Trainer", start)
    job = Job(name="job", layout=PIPELINE, microbatches=MICROBATCHES, max_in_flight=2)
    with pytest.raises(Started):
        training.train(Setup(MODELS["llama"], OPTIMIZER, batch), job, STEPS)
    assert [setup.max_in_flight for setup in given] == [2]


def most_held(ops: list[Op]) -> int:
    """Most forwards without their backward."""
    held = most = 0
    for op in ops:
        held += 1 if op is Op.FORWARD else -1
        most = max(most, held)
    return most


def test_a_split_backward_takes_no_numbers_in_flight() -> None:
    layout = in_flight(PIPELINE, (7, 3, 1))
    plan = Plan(version=0, layout=layout, quotas=(8,), schedule=Schedule.ZERO_BUBBLE)
    with pytest.raises(ContractError, match="in_flight"):
        check_schedule(plan)
