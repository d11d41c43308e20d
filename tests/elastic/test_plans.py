"""Plans that a job cannot or need not take on: it says so, goes on, and takes the next good one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from resihp.contracts import ContractError, Layout, Plan, Schedule
from resihp.elastic.models import Llama
from resihp.elastic.planning.publisher import PlanPublisher
from resihp.elastic.planning.sources import PlanSource
from resihp.elastic.process_groups.abortable import AbortableProcessGroup
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.proposals import ProposalBoard
from resihp.elastic.state.phases import Phase
from resihp.elastic.state.runtime_state import RuntimeState
from resihp.elastic.step import Setup
from resihp.elastic.step.schedule import check_plan
from resihp.layout import Range
from tests.elastic.engine_job import (
    MICROBATCHES,
    OPTIMIZER,
    SHAPE,
    TIMEOUTS,
    Case,
    batch,
    plan,
    run,
    small_setup,
)
from tests.elastic.scripted import Scripted

STEPS = 12
PARAMETERS = small_setup().model.parameters
FIRST = Layout.grid(dp=2, pp=1, tp=1, layers=4, units=4)
NEXT = Layout.grid(dp=1, pp=1, tp=2, layers=4, units=4)
BAD = {
    "holds 3 layers, the model has 4": plan(1, Layout.grid(dp=2, pp=1, tp=1, layers=3)),
    "holds 5 layers, the model has 4": plan(2, Layout.grid(dp=2, pp=1, tp=1, layers=5)),
    "sum to 8 microbatches, the job has 6": plan(3, FIRST, quotas=(6, 2)),
}


@pytest.mark.parametrize(("why", "bad"), BAD.items())
def test_what_would_train_something_else_is_named(why: str, bad: Plan) -> None:
    with pytest.raises(ContractError, match=why):
        check_plan(bad, PARAMETERS, MICROBATCHES)


def test_a_schedule_that_does_not_fit_is_named() -> None:
    quotas = (MICROBATCHES, 0)
    bad = Plan(version=1, layout=FIRST, quotas=quotas, schedule=Schedule.INTERLEAVED)
    with pytest.raises(ContractError, match="interleaved needs several model chunks"):
        check_plan(bad, PARAMETERS, MICROBATCHES)


class Stubborn(Scripted):
    """Offers each plan in turn, and the last one again and again, whatever it is asked for."""

    def wait(self, after: int, seconds: float) -> Plan | None:
        return super().wait(after, 0.0) or self._plans[-1]


@dataclass(frozen=True)
class Offering:
    """Makes a job's source of plans."""

    kind: Callable[..., Scripted]
    plans: tuple[Plan, ...]

    def __call__(self, folder: Path) -> Scripted:
        return self.kind(self.plans, (), ())


class Uncut(Llama):
    """Has a layer that its author did not think of cutting."""

    def build(
        self, part: str, ranges: Mapping[str, Range], group: AbortableProcessGroup
    ) -> nn.Module:
        if len(group) > 1:
            raise NotImplementedError(f"{part} cannot be cut")
        return super().build(part, ranges, group)


def uncut() -> Setup:
    """What trains it."""
    return Setup(Uncut(SHAPE), OPTIMIZER, batch)


def test_a_plan_that_the_model_cannot_be_built_for_is_tried_twice(tmp_path: Path) -> None:
    source = Offering(Scripted, (plan(1, NEXT), plan(2, FIRST, quotas=(4, 2))))
    outcome = run(Case(FIRST, STEPS, source=source, awaited=2, setup=uncut), tmp_path)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    refusals = outcome.logs.count("the generation of plan 1 cannot be built here")
    assert refusals == 2 * len(NEXT.ranks), outcome.logs
    assert "NotImplementedError: first cannot be cut" in outcome.logs
    assert outcome.logs.count("plan 1 is refused: its ") == 1
    assert [event["version"] for event in outcome.switches] == [0, 0, 2, 0, 0, 2], outcome.logs
    assert sorted(outcome.losses) == list(range(STEPS)), outcome.logs


class Hindered(Llama):
    """Cannot be cut the first time that a process tries."""

    is_hindered = True

    def build(
        self, part: str, ranges: Mapping[str, Range], group: AbortableProcessGroup
    ) -> nn.Module:
        if len(group) > 1 and self.is_hindered:
            self.is_hindered = False
            raise OSError("something else holds the device")
        return super().build(part, ranges, group)


def hindered() -> Setup:
    """What trains it."""
    return Setup(Hindered(SHAPE), OPTIMIZER, batch)


def test_a_plan_that_failed_for_a_passing_reason_is_taken_on_after_all(tmp_path: Path) -> None:
    source = Offering(Scripted, (plan(1, NEXT),))
    outcome = run(Case(FIRST, STEPS, source=source, awaited=1, setup=hindered), tmp_path)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    assert "something else holds the device" in outcome.logs
    assert "is refused" not in outcome.logs
    assert [event["version"] for event in outcome.switches] == [0, 1, 0, 1], outcome.logs
    assert sorted(outcome.losses) == list(range(STEPS)), outcome.logs


def test_a_model_that_cannot_be_built_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    outcome = run(Case(NEXT, STEPS, setup=uncut), tmp_path)
    assert set(outcome.exit_codes.values()) == {1}, outcome.logs
    for rank in NEXT.ranks:
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert log.splitlines()[-1] == "NotImplementedError: first cannot be cut"


def test_a_job_takes_the_first_plan_that_it_can_run_and_takes_it_once(tmp_path: Path) -> None:
    source = Offering(Stubborn, (*BAD.values(), plan(4, NEXT)))
    outcome = run(Case(FIRST, STEPS, source=source, awaited=4), tmp_path)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    assert all(why in outcome.logs for why in BAD), outcome.logs
    assert [event["version"] for event in outcome.switches] == [4, 4], outcome.logs
    assert sorted(outcome.losses) == list(range(STEPS)), outcome.logs
    assert all(torch.isfinite(t).all() for kept in outcome.full_state().values() for t in kept)


class Failing:
    """A source of plans whose first answer is an error of its own; then the given plan."""

    def __init__(self, offered: Plan) -> None:
        self.offered, self.asked = offered, 0

    def wait(self, after: int, seconds: float) -> Plan | None:
        self.asked += 1
        if self.asked == 1:
            raise ValueError("scripted: an answer that cannot be read")
        return self.offered


def test_an_error_of_the_source_ends_no_announcement(caplog: pytest.LogCaptureFixture) -> None:
    """It is told, and the next plan is proposed; so is the leave of a rank."""
    store = dist.HashStore()
    rendezvous = Rendezvous(lambda: store, 0, (0, 1), TIMEOUTS)
    offered = plan(1, FIRST)
    state = SimpleNamespace(phase=Phase.IDLE, generation=0, plan=plan(0, FIRST), completed=0)
    publisher = PlanPublisher(
        cast(PlanSource, Failing(offered)), rendezvous, cast(RuntimeState, state), lambda _: None
    )
    with caplog.at_level(logging.ERROR, logger="resihp.elastic"):
        publisher.start()
        store.wait([keys.proposal(0, 1)], timedelta(seconds=60))
        publisher.leave()
        store.wait([keys.LEAVING], timedelta(seconds=60))
        publisher.close()
    proposed = ProposalBoard(rendezvous).read(1)
    assert proposed is not None
    assert proposed.plan == offered
    assert "scripted: an answer that cannot be read" in caplog.text
