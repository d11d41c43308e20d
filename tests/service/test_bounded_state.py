"""State, status and events of a job stay bounded, whatever ranks are named in what is sent."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from test_telemetry_runs import JOB, real_session, session_of

from detector import ProbeKind, ProbeRequest
from resihp.contracts import Job, Layout, Plan, Replica, Stage, to_json
from service.store.documents import JobMessage, MessageKind, dumps
from service.worker import planning, session
from service.worker.probes import OpenProbes
from service.worker.session import JobSession
from tests.service.conftest import job_of

FOREIGN = 1_000


def tell(session: JobSession, kind: MessageKind, document: dict[str, Any]) -> None:
    session.apply(JobMessage("1-0", kind, json.dumps(document).encode()))


def tell_of_foreign_ranks(session: JobSession, number: int) -> None:
    """One message of each kind, about ranks that none named before."""
    first = FOREIGN * (number + 1)
    ranks = list(range(first, first + 50))
    version = session.planning.newest.version
    for rank in ranks:
        for state in ("applied", "refused"):
            ack = {"version": version, "rank": rank, "state": state, "pause_ms": 1.0}
            tell(session, MessageKind.ACK, ack)
    beats = [{"ranks": [rank], "process": "p", "sequence": 1} for rank in ranks]
    tell(session, MessageKind.HEARTBEAT, {"heartbeats": beats})
    tell(session, MessageKind.JOINER, {"ranks": ranks, "step": 1})
    tell(session, MessageKind.FAILURE, {"ranks": ranks, "step": 1, "detail": "gone"})
    tell(session, MessageKind.JOINER, {"ranks": ranks, "step": 1})
    layout = Layout.grid(dp=4, pp=2, tp=2, layers=8)
    moved = Layout(
        tuple(
            Replica(tuple(Stage(tuple(first + r for r in s.ranks), s.layers) for s in each.stages))
            for each in layout.replicas
        )
    )
    plan = Plan(version=version + 1, layout=moved, quotas=JOB.quotas)
    tell(session, MessageKind.OWN_PLAN, {"plan": to_json(plan), "lost": ranks, "step": 1})
    session.tick(1.0, 0.0)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits, which a test reaches soon."""
    monkeypatch.setattr(planning, "_MOST_RANKS", 100)
    monkeypatch.setattr(session, "_MOST_DEPARTED", 100)


@pytest.mark.usefixtures("few")
def test_a_state_does_not_grow_with_the_ranks_that_are_named():
    session = real_session()

    def size_after(rounds: range) -> tuple[int, int]:
        for number in rounds:
            tell_of_foreign_ranks(session, number)
        session.changes.events = []
        return sum(map(len, session.save().values())), len(dumps(session.status()))

    early, late = size_after(range(20)), size_after(range(20, 60))
    assert late[0] < 1.05 * early[0]
    assert late[1] < 1.05 * early[1]


def test_an_answer_of_a_rank_that_neither_plan_has_is_none():
    session = session_of(job_of())
    tell(session, MessageKind.FAILURE, {"ranks": [7], "step": 1, "detail": ""})
    assert session.planning.newest.version == 1
    session.changes.events = []
    for state in ("applied", "refused"):
        ack = {"version": 1, "rank": 99, "state": state, "pause_ms": None}
        tell(session, MessageKind.ACK, ack)
    assert session.planning.acks == {}
    assert session.changes.events == []
    for rank, state in ((0, "applied"), (1, "applied"), (7, "refused")):
        ack = {"version": 1, "rank": rank, "state": state, "pause_ms": None}
        tell(session, MessageKind.ACK, ack)
    assert session.status()["rollout"]["acks"] == {"applied": 2, "refused": 1}


def test_events_name_few_ranks_and_no_layout():
    ranks = list(range(8_192))
    session = session_of(job_of())
    for kind in (MessageKind.FAILURE, MessageKind.JOINER):
        tell(session, kind, {"ranks": ranks, "step": 1, "detail": "d" * 4096})
    tell(session, MessageKind.PROBE, {"probe": 1, "rank": 0, "ms": None, "d": "d" * 4096})
    told = dict(session.changes.events)
    for kind in ("failure", "joiner"):
        assert told[kind]["ranks"] == ranks[:64]
        assert told[kind]["more"] == 8_192 - 64
    assert len(told["error"]["detail"]) <= 1_000
    session = session_of(job_of())
    tell(session, MessageKind.FAILURE, {"ranks": [7], "step": 1, "detail": ""})
    told = dict(session.changes.events)
    assert told["failure"] == {"ranks": [7], "step": 1, "detail": ""}
    plan = told["plan"]["plan"]
    assert plan["version"] == 1
    assert "layout" not in plan


def test_an_event_names_few_ranks_of_an_advice():
    job = Job(
        name="j", layout=Layout.grid(dp=4, pp=8, tp=32, layers=8), microbatches=32, actions=()
    )
    session = session_of(job)
    tell(session, MessageKind.FAILURE, {"ranks": [5], "step": 1, "detail": ""})
    full = session.status()["planning"]["advice"]
    assert (full["ranks"], len(full["others"])) == ([5], 255)  # with all of its replica
    (told,) = (event["advice"] for kind, event in session.changes.events if kind == "planning")
    assert (told["ranks"], told["others"], told["more"]) == ([5], full["others"][:64], 191)
    assert told["summary"] == full["summary"]


def test_plans_that_no_rank_takes_on_are_kept_up_to_a_few():
    session = session_of(job_of())
    first = session.planning.active
    for version in range(1, 60):
        session.planning.publish(replace(first, version=version))
    assert sorted(session.planning.plans) == [0, *range(44, 60)]
    assert session.planning.activate(50)
    assert sorted(session.planning.plans) == list(range(50, 60))


def test_an_answer_to_a_probe_by_another_rank_is_none():
    probes = OpenProbes()
    probes.ask([ProbeRequest(rank=1, reference=2, kind=ProbeKind.GEMM)], 0.0)
    for rank in range(100, 200):
        assert probes.answer("1", rank, 1.0) is None
        assert probes.answer("1", rank, None) is None
    assert probes.by_number[1].answers == {}
    assert probes.answer("1", 1, 3.0) is None
    assert probes.answer("1", 2, 1.0) is not None
