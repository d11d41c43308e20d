"""What one rank asks the sidecar for plans, and what it says while that does not answer."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

from resihp.contracts import Action, InfeasibleError, Job, Plan, ServiceError
from resihp.elastic.planning.sources import LocalPlans, ServicePlans
from tests.elastic.engine_job import GRID, MICROBATCHES, SHAPE

JOB = Job(name="job", layout=GRID, microbatches=MICROBATCHES, model=SHAPE)


class Answers:
    """A client whose answers are given beforehand: an error, a plan, or nothing new."""

    def __init__(self, *answers: ServiceError | Plan | None) -> None:
        self._answers = list(answers)
        self.asked = 0

    def announce_joiners(self, job: str, *, ranks: Collection[int], step: int) -> None:
        """Accept them."""

    def plan(self, job: str, *, after: int, wait: float) -> Plan | None:
        self.asked += 1
        answer = self._answers.pop(0)
        if isinstance(answer, ServiceError):
            raise answer
        return answer


def test_each_silence_of_the_sidecar_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong token must not stay unseen until the first loss, nor fill the log."""
    refused = ServiceError("401: the token is missing or wrong")
    answers = Answers(refused, refused, None, None, refused)
    source = ServicePlans(answers, JOB, patience=timedelta(seconds=1))  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="resihp.elastic"):
        for _ in range(5):
            assert source.wait(0, 0.0) is None
    told = [(r.levelname, "401" in r.getMessage()) for r in caplog.records]
    assert told == [("WARNING", True), ("INFO", False), ("WARNING", True)]


def test_a_job_that_is_registered_in_time_is_no_reason_to_warn(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first records register it; the sidecar is asked for plans before."""
    unknown = ServiceError("Not Found: no job is registered as 'job'", status=404)
    source = ServicePlans(
        Answers(unknown, unknown, None, unknown, unknown),  # type: ignore[arg-type]
        JOB,
        patience=timedelta(seconds=1),
    )
    with caplog.at_level(logging.INFO, logger="resihp.elastic"):
        for _ in range(3):
            assert source.wait(0, 0.0) is None
        assert not caplog.records
        monkeypatch.setattr("resihp.elastic.planning.sources._REGISTRATION_S", 0.0)
        for _ in range(2):
            assert source.wait(0, 0.0) is None
    assert [(r.levelname, "no job" in r.getMessage()) for r in caplog.records] == [
        ("WARNING", True)
    ]


def test_a_job_that_keeps_its_layout_has_no_plan_after_a_loss() -> None:
    only_quotas = LocalPlans(replace(JOB, actions=(Action.QUOTAS,)))
    current = Plan(version=0, layout=GRID, quotas=JOB.quotas)
    with pytest.raises(InfeasibleError, match="quotas only"):
        only_quotas.after_loss(current, GRID.ranks[1:], step=3)
    assert (
        GRID.ranks[0]
        not in LocalPlans(JOB).after_loss(current, GRID.ranks[1:], step=3).layout.ranks
    )


def test_a_long_poll_that_is_answered_at_once_is_not_repeated_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a proxy may answer it that knows no long polls."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("resihp.elastic.planning.sources.time", clock)
    client = Answers(*[None] * 100)
    source = ServicePlans(client, JOB, patience=timedelta(seconds=2))  # type: ignore[arg-type]
    assert source.wait(0, 20.0) is None
    assert slept == [0.5]
    current = Plan(version=0, layout=GRID, quotas=JOB.quotas)
    assert source.joined(current, (9,), 0) is None
    assert client.asked < 20, "but until the patience is over"


def test_a_job_that_starts_again_from_an_earlier_step_does_not_wait_for_that_of_its_plan() -> None:
    """Records of plan 0 are ignored while the sidecar's plan is 1."""
    known = Plan(version=1, layout=GRID, quotas=JOB.quotas, from_step=102)
    source = ServicePlans(
        Answers(known, known),  # type: ignore[arg-type]
        JOB,
        patience=timedelta(seconds=1),
    )
    first = Plan(version=0, layout=GRID, quotas=JOB.quotas)
    for plan in (source.wait(0, 1.0), source.joined(first, (), 60)):
        assert plan == replace(known, from_step=0)


def test_the_sidecar_is_told_of_the_loss_before_the_joiner_that_takes_the_lost_number() -> None:
    """It was told of the joiner first, whose number was at work in the plan that it knew, and of
    the plan without it afterwards: the rank was neither lost nor ready to work."""
    silence = ServiceError("no answer")
    told: list[object] = []

    class Returning(Answers):
        """A sidecar that is away for the loss, and there when the joiner comes."""

        is_away = True

        def _tell(self, *what: object) -> None:
            if self.is_away:
                raise silence
            told.append(what)

        def report_failure(self, job: str, **_: object) -> None:
            self._tell("failure")

        def acknowledge(self, job: str, version: int, **_: object) -> None:
            self._tell("ack", version)

        def tell_plan(self, job: str, plan: Plan, *, lost: Collection[int]) -> None:
            self._tell("plan", plan.version, sorted(lost))

        def announce_joiners(self, job: str, *, ranks: Collection[int], step: int) -> None:
            self._tell("joiners", sorted(ranks))

        def plan(self, job: str, *, after: int, wait: float) -> Plan | None:
            return None

    lost, *survivors = GRID.ranks
    client = Returning()
    source = ServicePlans(client, JOB, patience=timedelta(seconds=0.01))  # type: ignore[arg-type]
    first = Plan(version=0, layout=GRID, quotas=JOB.quotas)
    own = source.after_loss(first, survivors, 3)
    source.applied(own, survivors[0], 3, 1.0)
    client.is_away = False
    assert source.joined(own, (lost,), 4) is None
    assert source.wait(own.version, 0.0) is None
    assert told == [("plan", own.version, [lost]), ("joiners", [lost])]
    source._reported = None  # as after another silence
    assert source.wait(own.version, 0.0) is None
    assert told[2:] == [("plan", own.version, [])], "it is no longer lost"
