"""One rank asks a plan source in a thread: no answer of it reaches the training loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from resihp.contracts import ContractError, Layout, Plan, Replica, ServiceError, Stage
from resihp.elastic.planning.quota_plans import QuotaPlanPoller, quotas_by_replica
from resihp.elastic.planning.sources import NoPlans

GRID = Layout.grid(dp=4, pp=1, tp=1, layers=1)


def plan(version: int, quotas: tuple[int, ...] = (5, 5, 4, 2), **options: Any) -> Plan:
    return Plan(version=version, layout=GRID, quotas=quotas, **options)


class Answering(NoPlans):
    """Gives the answers in order; `asked_all` is set when it is asked once more."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked_all = threading.Event()
        self.told: list[tuple[str, int]] = []
        self.was_told = threading.Event()

    def wait(self, after: int, seconds: float) -> Plan | None:
        if not self._answers:
            self.asked_all.set()
            return None
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        self.told.append(("applied", plan.version))
        self.was_told.set()
        raise RuntimeError("the sidecar has gone")

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        self.told.append(("refused", plan.version))


class Knowing(Answering):
    def slowdowns(self) -> Mapping[int, float]:
        return {3: 2.0}


class Unsure(Answering):
    def slowdowns(self) -> Mapping[int, float]:
        raise ServiceError("503")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resihp.elastic.planning.quota_plans._POLL_S", 0.001)
    monkeypatch.setattr("resihp.elastic.planning.quota_plans._PATIENCE_S", 0.001)


def asked(source: Answering) -> QuotaPlanPoller:
    """A poller that has been given all answers."""
    poller = QuotaPlanPoller(source, 0, lambda found: quotas_by_replica(found, 1, 16))
    poller.start(0)
    assert source.asked_all.wait(30)
    poller.close()
    return poller


def test_a_plan_that_comes_after_the_end_is_left_to_others() -> None:
    is_asked, is_closed = threading.Event(), threading.Event()

    class Slow(Answering):
        def wait(self, after: int, seconds: float) -> Plan | None:
            is_asked.set()
            assert is_closed.wait(30)
            return super().wait(after, seconds)

    def refuse(found: Plan) -> Mapping[int, int]:
        raise ContractError("plan", "is of another training")

    source = Slow(plan(1))
    poller = QuotaPlanPoller(source, 0, refuse)
    poller.start(0)
    assert is_asked.wait(30)
    (thread,) = [each for each in threading.enumerate() if each.name == "resihp-quotas"]
    poller.close()
    is_closed.set()
    thread.join(30)
    assert (source.told, poller.failures) == ([], 0)


def test_the_newest_plan_is_kept_and_an_old_one_or_the_same_again_is_not() -> None:
    poller = asked(Answering(plan(1), None, plan(3, (4, 4, 4, 4)), plan(3), plan(2)))
    found = poller.newest(0, step=0)
    assert found is not None
    assert (found.version, found.quotas) == (3, {0: 4, 1: 4, 2: 4, 3: 4})
    assert poller.newest(3, step=0) is None
    assert poller.failures == 0


def test_a_plan_for_later_waits() -> None:
    poller = asked(Answering(plan(1, from_step=10)))
    assert poller.newest(0, step=9) is None
    assert poller.newest(0, step=10) is not None


def test_failures_are_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    source = Answering(ServiceError("gone"), "nonsense", OSError("reset"), plan(1))
    with caplog.at_level(logging.WARNING, logger="resihp.elastic"):
        poller = asked(source)
    assert poller.newest(0, step=0) is not None
    assert poller.failures == 3
    assert len(caplog.records) == 1


def test_a_plan_that_cannot_be_used_is_refused_and_a_later_one_taken() -> None:
    other = Plan(version=1, layout=Layout.grid(dp=2, pp=2, tp=1, layers=2), quotas=(8, 8))
    source = Answering(other, plan(2, (5, 5, 4, 1)), plan(4))
    poller = asked(source)
    assert source.told == [("refused", 1), ("refused", 2)]
    found = poller.newest(0, step=0)
    assert found is not None
    assert (found.version, poller.failures) == (4, 2)


def test_slowdowns_come_with_the_plan_where_the_source_knows_them() -> None:
    for source, expected in ((Knowing, {3: 2.0}), (Unsure, {}), (Answering, {})):
        found = asked(source(plan(1))).newest(0, step=0)
        assert found is not None
        assert found.slowdowns == expected


def test_an_acknowledgement_that_fails_is_counted() -> None:
    source = Answering(plan(1))
    poller = asked(source)
    poller.acknowledge(plan(1), step=3)
    assert source.was_told.wait(30)
    assert source.told == [("applied", 1)]


def test_quotas_by_replica() -> None:
    turned = Layout(tuple(Replica((Stage((rank, rank + 1), (0, 1)),)) for rank in (2, 0)))
    assert quotas_by_replica(Plan(version=1, layout=turned, quotas=(3, 5)), 2, 8) == {1: 3, 0: 5}
    with pytest.raises(ContractError, match="sum to 8, not 9"):
        quotas_by_replica(Plan(version=1, layout=turned, quotas=(3, 5)), 2, 9)
    with pytest.raises(ContractError, match="its replicas stay"):
        quotas_by_replica(Plan(version=1, layout=turned, quotas=(3, 5)), 1, 8)
