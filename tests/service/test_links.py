"""Verdicts on links and groups over HTTP, and the events when one becomes slow or recovers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from resihp.client import Client
from resihp.contracts import (
    FaultRate,
    Job,
    LayerCost,
    Layout,
    Links,
    LinkVerdict,
    ModelShape,
    Op,
    Plan,
    Protection,
    Status,
    TelemetryBatch,
    to_json,
)
from resihp.contracts.codec import encode
from scheduler import replan
from service.store.documents import JobMessage, MessageKind, link_in_short
from service.worker.planning import Planner, PlanningState
from service.worker.session import JobSession
from tests.service.conftest import Http, batch_of, eventually, job_of
from tests.service.fakes import FakeDetector, fake_adapters
from tests.service.test_api import read_events

LINKS = ((0, 2), (1, 3), (4, 6), (5, 7))


def with_transfers(step: int, *times_ms: float) -> TelemetryBatch:
    """A step of healthy ranks in which the transfers of the links take so long."""
    count = len(times_ms)
    sent = TelemetryBatch(
        rank=[rank for rank, _ in LINKS[:count]],
        peer=[peer for _, peer in LINKS[:count]],
        step=[step] * count,
        microbatch=[0] * count,
        op=[Op.P2P] * count,
        compute_ms=times_ms,
        tokens=[0] * count,
    )
    return TelemetryBatch.concat([batch_of(step), sent])


def test_slow_links_are_read_counted_and_told_of(http: Http):
    http.register(job_of("links"))
    assert http.get("/v1/jobs/links/links") == {"job": "links", "links": [], "counts": {}}
    begun_s = time.time()
    for step, times in enumerate([(2, 2, 2, 2), (2, 5, 2, 3), (2, 5, 2, 3), (2, 2, 2, 2)]):
        http.send("links", with_transfers(step, *times))
        slow = sum(ms >= 4 for ms in times)
        counts = {"healthy": sum(ms < 3 for ms in times), "fail_slow": slow, "suspect": slow}
        counts = {status: count for status, count in counts.items() if count}
        found = eventually(
            lambda step=step, counts=counts: (
                http.get("/v1/jobs/links")["last_step"] == step
                and (links := http.get("/v1/jobs/links/links"))["counts"] == counts
                and links
            )
        )
        lines = http("GET", "/metrics").data.decode().splitlines()
        for status, count in counts.items():
            assert f'resihp_links{{job="links",status="{status}"}} {count}.0' in lines
        assert [(link["rank"], link["status"]) for link in found["links"]] == (
            [(1, "fail_slow"), (5, "suspect")] if slow else []
        )
        if slow:
            assert begun_s - 1 <= found["links"][0]["since_s"] <= time.time() + 1
            tag = http("GET", "/v1/jobs/links/links").headers["ETag"]
            again = http("GET", "/v1/jobs/links/links", headers={"If-None-Match": tag})
            assert again.status == 304
            (link, suspected) = Client(http.url).links("links")
            assert (link.ends, link.slowdown, suspected.status) == ((1, 3), 2.5, Status.SUSPECT)
    first = read_events(http, "links", "?replay=true", until="link")[-1]
    second = read_events(http, "links", until="link", **{"Last-Event-ID": first["id"]})[-1]
    told = [event["data"]["link"] for event in (first, second)]
    assert [(link["rank"], link["peer"], link["status"]) for link in told] == [
        (1, 3, "fail_slow"), (1, 3, "healthy"),
    ]  # fmt: skip
    assert told[1]["since_s"] > told[0]["since_s"]


def test_links_by_pages(http: Http):
    http.register(job_of("pages"))
    http.send("pages", with_transfers(0, 5, 5, 5, 5))
    whole = eventually(lambda: http.get("/v1/jobs/pages/links")["links"])
    first = http.get("/v1/jobs/pages/links?limit=3")
    rest = http.get(f"/v1/jobs/pages/links?limit=3&after={first['next']}")
    assert (first["next"], "next" in rest) == (3, False)
    assert [link["rank"] for link in whole] == [0, 1, 4, 5]
    assert first["links"] + rest["links"] == whole
    assert http("GET", "/v1/jobs/pages/links?limit=0").status == 422
    assert http("GET", "/v1/jobs/unknown/links").status == 404


@pytest.fixture
def start() -> Iterator[Callable[[], JobSession]]:
    planner = Planner(fake_adapters(), time_limit_s=5.0)
    first = Plan(version=0, layout=job_of().layout, quotas=job_of().quotas)
    yield lambda: JobSession(job_of(), first, fake_adapters(), planner)
    planner.close()


def send(session: JobSession, at_ms: int, batch: TelemetryBatch) -> None:
    session.apply(JobMessage(f"{at_ms}-0", MessageKind.TELEMETRY, encode(batch)))


def test_the_time_of_a_status_is_that_of_its_message_and_survives_the_worker(start):
    session = start()
    send(session, 5_000, with_transfers(0, 2, 5))
    send(session, 6_000, with_transfers(1, 2, 6))
    other = start()
    other.resume(session.save())
    for worker in (session, other):
        send(worker, 7_000, with_transfers(2, 2, 6))
        (link,) = worker.status()["links"]
        assert (link["slowdown"], link["since_s"]) == (3.0, 5.0)
    assert other.status() == session.status()
    assert [kind for kind, _ in other.changes.events if kind == "link"] == []


def test_a_slow_link_moves_a_stage_off_it_and_stays_slow_while_nothing_is_sent_over_it():
    model = ModelShape(layers=8, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=1000)
    one = Job(
        name="j", layout=Layout.grid(dp=2, pp=4, tp=1, layers=8), microbatches=8, model=model,
        tokens_per_microbatch=4096, cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
        links=Links(inter_gbytes_per_s=8.0), protection=Protection(faults=FaultRate(1e6)),
    )  # fmt: skip
    adapters = replace(fake_adapters(), replan=replan)
    planner = Planner(adapters, time_limit_s=60.0)
    first = Plan(version=0, layout=one.layout, quotas=one.quotas)
    session = JobSession(one, first, adapters, planner)
    for step, ms in enumerate((2, 2, 6)):
        send(session, 1_000 * step, with_transfers(step, ms))
        assert bool(session.changes.plans) == (ms == 6)
    (plan,) = session.changes.plans
    assert {0, 2} not in [set(pair) for r in plan.layout.replicas for pair in pairwise(r.ranks)]
    assert any("between ranks 0 and 2 take 3 times as long" in why for why in plan.reason)
    session.planning.activate(plan.version)
    planner.is_needed(session.planning, [], 0.0, links=[])
    assert [link.ends for link in session.planning.links] == [(0, 2)]
    session.planning.is_asked = False
    assert not planner.is_needed(session.planning, [], 0.0, links=[])
    planner.close()


def test_a_link_stays_slow_until_it_was_slow_under_the_new_plan_and_recovered():
    plan = Plan(version=0, layout=job_of().layout, quotas=job_of().quotas)
    slow = LinkVerdict(rank=0, peer=2, status=Status.FAIL_SLOW, slowdown=3.0)
    suspect = replace(slow, status=Status.SUSPECT)
    state = PlanningState({0: plan}, 0)
    assert state.slow_links([suspect]) == ()
    assert state.slow_links([slow]) == (slow,)
    state.links = (slow,)
    assert state.slow_links([]) == ()
    state.publish(replace(plan, version=1))
    state.activate(1)
    for verdicts in ([], [suspect], [slow]):
        assert state.slow_links(verdicts) == (slow,)
    assert state.slow_links([]) == ()


def link_events(session: JobSession) -> list[str]:
    told = [told["link"]["status"] for kind, told in session.changes.events if kind == "link"]
    session.changes.events.clear()
    return told


@pytest.mark.parametrize("why", ["plan", "restart", "state"])
def test_a_link_that_is_compared_anew_is_not_said_to_be_healthy(start, why, monkeypatch):
    """Under a new plan, after the job went back, or as the detector's state cannot be read."""
    session = start()
    send(session, 1_000, with_transfers(7, 2, 5))
    assert link_events(session) == ["fail_slow"]
    version = 0
    if why == "plan":
        plan, version = session.planning.active, 1
        own = {"plan": to_json(replace(plan, version=1)), "lost": [], "step": 7}
        session.apply(JobMessage("2000-0", MessageKind.OWN_PLAN, json.dumps(own).encode()))
    elif why == "state":
        saved = session.save() | {"detector": b"of another format"}
        session = start()
        session.resume(saved)
    else:
        take = FakeDetector.update

        def begin_anew(detector, batch):
            if batch.step.min() == 3:
                detector.counters["restarts"] += 1
                detector.transfers.clear()
            return take(detector, batch)

        monkeypatch.setattr(FakeDetector, "update", begin_anew)
    send(session, 3_000, replace(batch_of(3), plan_version=version))
    assert link_events(session) == []
    for step, ms in enumerate((5, 2), start=4):
        send(session, 1_000 * step, replace(with_transfers(step, 2, ms), plan_version=version))
    assert link_events(session) == ["fail_slow", "healthy"]


def test_an_event_names_the_first_ranks_of_a_large_group():
    group = tuple(range(100))
    link = LinkVerdict(rank=0, peer=-1, group=group, status=Status.FAIL_SLOW, slowdown=2.0)
    told = json.loads(json.dumps(link_in_short(link)))
    assert (told["group"], told["more"]) == (list(range(64)), 36)
