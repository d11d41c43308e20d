"""Plans of the sidecar: which of them restart a job, whatever the sidecar answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from resihp.contracts import Action, Layout, Plan, ServiceError, from_json
from resihp.launch.attempts import Attempt, NodeRanks
from resihp.launch.options import Command
from resihp.launch.restart_plans import (
    RestartPlanPoller,
    as_renumbered,
    job_of,
    left_out,
    refusal,
)

ATTEMPT = Attempt(
    0, 0, (NodeRanks("a", 0, 0, (0, 1), least=1), NodeRanks("b", 1, 2, (0, 1), least=2))
)


def plan_of(*ranks: int, version: int = 1, action: Action | None = Action.RESTART) -> Plan:
    layout = Layout.grid(dp=len(ranks), pp=1, tp=1, layers=1)
    stages = [
        replace(replica.stages[0], ranks=(rank,))
        for replica, rank in zip(layout.replicas, ranks, strict=True)
    ]
    replicas = tuple(
        replace(replica, stages=(stage,))
        for replica, stage in zip(layout.replicas, stages, strict=True)
    )
    quotas = (1,) * len(ranks)
    return Plan(version=version, layout=Layout(replicas), quotas=quotas, action=action)


@pytest.mark.parametrize(
    ("ranks", "least_nodes", "spares", "words"),
    [
        ((0, 2, 3), 2, 0, None),
        ((0, 1), 1, 0, None),
        ((0, 1), 2, 1, None),
        ((0, 1), 2, 0, "goes on with 2 nodes or more"),
        ((0, 1, 2), 2, 0, "node 1 goes on with 2 ranks or more"),
        ((2, 3), 1, 0, "node 0 goes on with 1 rank or more"),
        ((0, 1, 2, 3), 2, 0, "it leaves out no rank"),
        ((0, 4), 1, 0, "there is no rank 4"),
    ],
)
def test_a_plan_is_followed_as_far_as_the_options_permit(
    ranks: tuple[int, ...], least_nodes: int, spares: int, words: str | None
) -> None:
    why = refusal(plan_of(*ranks), ATTEMPT, least_nodes=least_nodes, spares=spares)
    if words is None:
        assert why is None
    else:
        assert why is not None
        assert words in why


def test_a_script_that_reads_plans_takes_one_of_the_same_ranks() -> None:
    assert refusal(plan_of(0, 1, 2, 3), ATTEMPT, least_nodes=2, reads_plans=True) is None


def test_a_plan_is_told_in_the_ranks_of_the_next_attempt() -> None:
    assert left_out(plan_of(3, 0, 2), ATTEMPT) == {"a": (1,)}
    told = from_json(Plan, json.loads(as_renumbered(plan_of(3, 0, 2))))
    assert told.layout.ranks == (2, 0, 1)


def test_the_job_has_the_name_under_which_its_ranks_register(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RESIHP_JOB", raising=False)
    assert job_of(Command("a/train.py", "script"), "none") == "train"
    assert job_of(Command("pack.train", "module"), "run/7") == "train-run-7"
    monkeypatch.setenv("RESIHP_JOB", "mine")
    assert job_of(Command("a/train.py", "script"), "7") == "mine"


class FakeSidecar:
    """Sidecar whose newest plan, or the error in its place, a test sets."""

    def __init__(self, newest: Plan | Exception | None) -> None:
        self.newest, self.asked = newest, 0
        self.answers: list[dict[str, Any]] = []
        self.problems: list[Exception] = []
        self._changed = threading.Condition()

    def set(self, newest: Plan | Exception | None) -> None:
        with self._changed:
            self.newest = newest
            self._changed.notify_all()

    def plan(self, job: str, *, after: int | None = None, wait: float = 0.0) -> Plan | None:
        with self._changed:
            self.asked += 1
            self._changed.wait_for(lambda: self._newer(after) is not None, min(wait, 0.05))
            return self._newer(after)

    def _newer(self, after: int | None) -> Plan | None:
        if isinstance(self.newest, Exception):
            raise self.newest
        is_new = self.newest is not None and (after is None or self.newest.version > after)
        return self.newest if is_new else None

    def acknowledge(self, job: str, version: int, **answer: Any) -> None:
        if self.problems:
            raise self.problems.pop(0)
        self.answers.append({"version": version, **answer})


def until(check: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def polled(newest: Plan | Exception | None) -> Iterator[tuple[RestartPlanPoller, FakeSidecar]]:
    sidecar = FakeSidecar(newest)
    poller = RestartPlanPoller(sidecar, "job")
    poller.begin(4)
    poller.start()
    try:
        yield poller, sidecar
    finally:
        poller.close()


def test_silence_and_nonsense_are_waited_out() -> None:
    with polled(ServiceError("unknown job", status=404)) as (poller, sidecar):
        for problem in (ServiceError("no answer"), TypeError("nonsense")):
            asked = sidecar.asked
            until(lambda asked=asked: sidecar.asked > asked)
            sidecar.set(problem)
        sidecar.set(plan_of(0, 1, 2))
        until(lambda: poller.pending() is not None)
        plan = poller.pending()
        assert plan is not None
        poller.refuse(plan, "not now")
        assert poller.pending() is None
        until(lambda: sidecar.answers)
    assert sidecar.answers == [
        {"version": 1, "rank": 0, "state": "refused", "detail": "not now", "pause_ms": None,
         "digest": plan.digest}
    ]  # fmt: skip


def test_a_plan_from_before_the_job_is_refused_and_a_later_one_taken() -> None:
    with polled(plan_of(0, 1)) as (poller, sidecar):
        until(lambda: poller.refuse_unusable() or sidecar.answers)
        assert sidecar.answers[0]["state"] == "refused"
        assert poller.pending() is None
        sidecar.set(plan_of(0, 1, 2, version=2))
        until(lambda: poller.pending() is not None)
        sidecar.set(plan_of(0, 2, 3, version=3))
        until(lambda: (plan := poller.pending()) is not None and plan.version == 3)


def test_a_plan_that_waits_ends_with_the_ranks_that_it_names() -> None:
    with polled(plan_of(0, 1, 2, 3, version=0, action=None)) as (poller, sidecar):
        until(lambda: sidecar.asked)
        sidecar.set(plan_of(0, 1, 2, version=1))
        until(lambda: poller.pending() is not None)
        poller.begin(4, same_ranks=True)
        assert poller.pending() is not None
        poller.begin(3)
        assert poller.pending() is None
        sidecar.set(plan_of(0, 2, version=2))  # still by the old numbers
        until(lambda: poller.refuse_unusable() or len(sidecar.answers) == 2)
        assert [answer["version"] for answer in sidecar.answers] == [1, 2]
        sidecar.set(plan_of(0, 1, 2, version=0, action=None))  # registered anew
        asked = sidecar.asked
        until(lambda: sidecar.asked > asked + 3)
        sidecar.set(plan_of(0, 1, version=1))
        until(lambda: poller.pending() is not None)


def test_all_ranks_of_a_plan_acknowledge_it_with_the_pause() -> None:
    with polled(plan_of(0, 1, 2, 3, version=0, action=None)) as (poller, sidecar):
        poller.applied(plan_of(0, 1, 3), 1500.0)
        until(lambda: len(sidecar.answers) == 3)
    assert {answer["rank"] for answer in sidecar.answers} == {0, 1, 3}
    assert {answer["pause_ms"] for answer in sidecar.answers} == {1500.0}


def test_answers_are_repeated_until_taken_or_refused_for_good() -> None:
    with polled(plan_of(0, 1, 2, 3, version=0, action=None)) as (poller, sidecar):
        sidecar.problems = [
            ServiceError("no answer"),
            ServiceError("busy", status=503),
            ServiceError("another digest", status=409),
        ]
        poller.applied(plan_of(0, 1, 3), 1500.0)
        until(lambda: len(sidecar.answers) == 2)
    assert [answer["rank"] for answer in sidecar.answers] == [1, 3]


def test_a_launcher_that_ends_sends_its_last_answers() -> None:
    sidecar = FakeSidecar(None)
    poller = RestartPlanPoller(sidecar, "job")
    poller.applied(plan_of(0, 1))
    poller.close()
    assert [answer["rank"] for answer in sidecar.answers] == [0, 1]
