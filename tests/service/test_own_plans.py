"""A plan that the job made by itself, the sidecar being away or too slow, is the one that holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from fakes import fake_adapters

from resihp.client import Client
from resihp.contracts import Layout, Plan, Replica, ServiceError, Stage, Status, to_json
from resihp.contracts.codec import WireFormat, encode
from service import Settings
from service.store.documents import JobMessage, MessageKind, PendingChanges
from service.worker.adapters import load_adapters
from service.worker.planning import Planner
from service.worker.session import JobSession
from tests.service.conftest import Http, batch_of, eventually, job_of


def without(rank: int, version: int) -> Plan:
    """The job's layout, in which the other member of the rank's group has the stage for itself."""
    replicas = (
        Replica(
            tuple(
                Stage(tuple(r for r in stage.ranks if r != rank), stage.layers)
                for stage in replica.stages
            )
        )
        for replica in job_of().layout.replicas
    )
    return Plan(version=version, layout=Layout(tuple(replicas)), quotas=job_of().quotas)


@pytest.fixture
def start() -> Iterator[Callable[[], JobSession]]:
    planner = Planner(fake_adapters(), time_limit_s=5.0)
    first = Plan(version=0, layout=job_of().layout, quotas=job_of().quotas)
    yield lambda: JobSession(job_of(), first, fake_adapters(), planner)
    planner.close()


def own(session: JobSession, plan: Plan, *lost: int) -> None:
    body = json.dumps({"plan": to_json(plan), "lost": lost, "step": 3}).encode()
    session.apply(JobMessage("50-0", MessageKind.OWN_PLAN, body))


def slow(session: JobSession, rank: int, *, version: int = 0) -> None:
    batch = batch_of(4, slow=(rank,), plan_version=version)
    session.apply(JobMessage("60-0", MessageKind.TELEMETRY, encode(batch, WireFormat.MSGPACK)))


def test_it_holds_at_once_and_the_next_plan_starts_from_it(start):
    session = start()
    own(session, without(6, 1), 6)
    status = session.status()
    assert (status["rollout"]["active"], status["planning"]["state"]) == (1, "taken_over")
    (dead,) = (v for v in status["verdicts"] if v["rank"] == 6)
    assert dead["status"] == Status.FAIL_STOP.value
    assert [plan.version for plan in session.changes.plans] == [1]
    assert "made by the job itself" in session.changes.plans[0].reason[-1]
    slow(session, 1, version=1)
    assert [plan.version for plan in session.changes.plans] == [1, 2]
    assert not {1, 6} & set(session.planning.newest.layout.ranks)


def test_what_the_job_did_not_know_is_planned_for_behind_it(start):
    """The sidecar had named a slow rank, whose plan the job has not seen."""
    session = start()
    slow(session, 3)
    own(session, without(6, 1), 6)
    assert [plan.version for plan in session.changes.plans] == [1, 1, 2]
    assert not {3, 6} & set(session.planning.newest.layout.ranks)


def test_it_replaces_a_plan_of_its_version_and_leaves_later_ones(start):
    session = start()
    slow(session, 3)
    session.apply(
        JobMessage("61-0", MessageKind.FAILURE, b'{"ranks": [6], "step": 4, "detail": "lost"}')
    )
    assert [plan.version for plan in session.changes.plans] == [1, 2]
    own(session, without(6, 1), 6)
    assert session.status()["rollout"] == {"newest": 2, "active": 1, "acks": {}}
    assert session.changes.plans[-1].layout == without(6, 1).layout


def test_a_later_plan_with_a_rank_that_the_job_has_lost_is_replaced(start):
    """Made while nothing was slow any more, so that no verdict but the loss asks for a plan."""
    session = start()
    slow(session, 3)
    slow(session, 1)
    body = encode(batch_of(5), WireFormat.MSGPACK)
    session.apply(JobMessage("61-0", MessageKind.TELEMETRY, body))
    assert [plan.version for plan in session.changes.plans] == [1, 2]
    assert 6 in session.planning.newest.layout.members
    own(session, without(6, 1), 6)
    assert [plan.version for plan in session.changes.plans] == [1, 2, 1, 3]
    assert 6 not in session.planning.newest.layout.members


def test_told_twice_it_is_taken_over_once(start):
    session = start()
    own(session, without(6, 1), 6)
    own(session, without(6, 1), 6)
    assert len(session.changes.plans) == 1
    other = start()
    other.resume(session.save())
    own(other, without(6, 1), 6)
    assert not other.changes.plans


def test_told_late_it_takes_back_no_later_plan(start):
    """A copy of the request that came after all ranks had taken on the sidecar's next plan."""
    session = start()
    own(session, without(6, 1), 6)
    slow(session, 1, version=1)
    for rank in session.planning.newest.layout.ranks:
        answer = {"version": 2, "rank": rank, "state": "applied"}
        session.apply(JobMessage("70-0", MessageKind.ACK, json.dumps(answer).encode()))
    before = session.status()
    assert before["rollout"]["active"] == 2
    session.changes = PendingChanges()
    own(session, without(6, 1), 6)
    assert session.status() == before
    assert not session.changes.events
    assert not session.changes.plans


def test_a_rank_that_stopped_has_evidence_where_none_was_given():
    adapters = replace(load_adapters(Settings()), executor=fake_adapters().executor)
    first = Plan(version=0, layout=job_of().layout, quotas=job_of().quotas)
    planner = Planner(adapters, time_limit_s=5.0)
    session = JobSession(job_of(), first, adapters, planner)
    own(session, without(6, 1), 6)
    failure = b'{"ranks": [3], "step": 4, "detail": ""}'
    session.apply(JobMessage("61-0", MessageKind.FAILURE, failure))
    told = [event["verdict"] for kind, event in session.changes.events if kind == "verdict"]
    assert [verdict["rank"] for verdict in told] == [6, 3]
    assert all(sentence for verdict in told for sentence in verdict["evidence"])
    planner.close()


def test_refused_for_a_joiner_that_is_gone_the_next_plan_does_without(start):
    asked: list[dict[int, float]] = []

    def noting(job, current, speeds, **more):
        asked.append(dict(speeds))
        return fake_adapters().replan(job, current, speeds, **more)

    planner = Planner(replace(fake_adapters(), replan=noting), time_limit_s=5.0)
    first = Plan(version=0, layout=job_of().layout, quotas=job_of().quotas)
    session = JobSession(job_of(), first, fake_adapters(), planner)
    session.apply(JobMessage("90-0", MessageKind.JOINER, b'{"ranks": [8], "step": 0}'))
    slow(session, 3)
    assert asked[-1][8] == 1.0
    refusal = {
        "version": session.planning.newest.version,
        "rank": 0,
        "state": "refused",
        "detail": "gone",
    }
    session.apply(JobMessage("91-0", MessageKind.ACK, json.dumps(refusal).encode()))
    assert 8 not in asked[-1]
    planner.close()


def test_over_the_wire(http: Http):
    client = Client(http.url)
    client.register(job_of("own"))
    mine = without(6, 1)
    client.tell_plan("own", mine, lost=[6])
    told = eventually(lambda: client.plan("own", after=0, wait=5.0))
    assert (told.layout, told.version) == (mine.layout, 1)
    eventually(lambda: http.statuses("own").get(6) == "fail_stop")
    client.acknowledge("own", 1, rank=0, digest=mine.digest)
    with pytest.raises(ServiceError) as refused:
        client.acknowledge("own", 1, rank=0, digest=without(5, 1).digest)
    assert refused.value.status == 409
    client.acknowledge("own", 0, rank=0, digest=mine.digest)  # of the first plan none is kept
    client.close()


def test_plan_0_is_that_of_the_registration(http: Http):
    http.register(job_of("first"))
    first = http.get("/v1/jobs/first/plan/0")
    same = {name: value for name, value in first.items() if name != "gap"}
    assert http("PUT", "/v1/jobs/first/plan/0", {"plan": first}).json() == {"accepted": True}
    assert http("PUT", "/v1/jobs/first/plan/0", {"plan": same | {"reason": []}}).status == 202
    other = http("PUT", "/v1/jobs/first/plan/0", {"plan": to_json(without(6, 0)), "lost": [6]})
    assert (other.status, other.json()["type"]) == (409, "urn:resihp:problem:another-plan")
    assert "registered with; PUT a plan of the job's own under a higher" in other.json()["detail"]
    assert http("PUT", "/v1/jobs/first/plan/1", {"plan": to_json(without(6, 1))}).status == 202
    eventually(lambda: http.get("/v1/jobs/first/plan")["version"] == 1)
    assert http.get("/v1/jobs/first/plan/0") == first


@pytest.mark.parametrize(
    ("version", "plan", "field"),
    [
        (2, without(6, 1), "plan.version"),
        (2**31 - 1, without(6, 2**31 - 1), "plan.version"),  # versions after it are refused
        (1, replace(without(6, 1), quotas=(9, 9)), "plan.quotas"),
        (1, replace(without(6, 1), layout=Layout.grid(dp=2, pp=2, tp=2, layers=8)), "plan.layout"),
    ],
)
def test_a_plan_that_is_none_of_this_job_is_refused(http: Http, version, plan, field):
    http.register(job_of("strange"))
    answer = http("PUT", f"/v1/jobs/strange/plan/{version}", {"plan": to_json(plan)})
    assert (answer.status, answer.json()["errors"][0]["field"]) == (422, field)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"quotas": [4, "4"]}, "plan.quotas[1]"),
        ({"layout": {}}, "plan.layout.replicas"),
        ({"step_ms": -1}, "plan.step_ms"),
        ({"reason": ["x" * 65_537]}, "plan.reason"),
        ({"reason": ["x"] * 1_025}, "plan.reason"),
        ({"step_ms": 1e308, "bound_ms": 1e-300}, "plan.bound_ms"),  # a gap beyond all numbers
    ],
)
def test_what_is_wrong_in_a_plan_is_named_with_its_place_in_the_body(http: Http, changes, field):
    http.register(job_of("strange"))
    body = {"plan": to_json(without(6, 1)) | changes}
    answer = http("PUT", "/v1/jobs/strange/plan/1", body)
    assert (answer.status, answer.json()["errors"][0]["field"]) == (422, field)


def test_of_a_job_that_nobody_knows(http: Http):
    answer = http("PUT", "/v1/jobs/nobody/plan/1", {"plan": to_json(without(6, 1))})
    assert answer.status == 404
