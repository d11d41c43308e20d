"""Events of a job: what is kept, in which order, and from where a stream goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_api import problem_of, read_events
from test_planning import sessions

from service import Settings
from service.api import events as events_api
from service.store.documents import Commit, JobMessage, MessageKind, PendingChanges
from service.store.embedded_redis import socket_path
from service.store.worker_store import WorkerStore
from tests.service.conftest import Http, job_of, running

__all__ = ["sessions"]

KEPT = 100
STEPS = [{"step": step, "observed_ms": 1.0} for step in range(3)]


@pytest.fixture
def http(tmp_path: Path) -> Iterator[Http]:
    with running(Settings(data=tmp_path, redis_url=None, worker=False)) as http:
        yield http


@pytest.fixture
def commit(tmp_path: Path, http: Http) -> Iterator[object]:
    """Commits events, each given as (kind, number), to a job."""
    http.register(job_of())
    url = f"unix://{socket_path(tmp_path)}"
    store = WorkerStore(url, "w", keep_events=KEPT, keep_steps=KEPT)
    lease = store.acquire("j", ttl_s=60)
    assert lease is not None

    def commit(*events: tuple[str, object], steps=()) -> None:
        numbered = [(kind, {"number": number}) for kind, number in events]
        changes = PendingChanges(events=numbered, steps=list(steps))
        store.commit(lease, Commit(changes, {"session": b""}, {}, newest=0))

    yield commit
    store.close()


def test_steps_of_a_job_that_goes_back_count_once(http: Http, commit):
    """Those of the old run were returned after the newest of the new one."""

    def steps(query: str = "") -> list[tuple[int, float]]:
        answer = http.get(f"/v1/jobs/j/steps{query}")["steps"]
        return [(step["step"], step["observed_ms"]) for step in answer]

    old = [(step, 1.0) for step in range(60)]
    new = [(step, 2.0) for step in range(40, 43)]
    commit(steps=[{"step": step, "observed_ms": ms} for step, ms in (*old, *new)])
    assert steps() == [*old[:40], *new]
    assert steps("?after=38") == [*old[39:40], *new]
    assert steps("?limit=4") == [*old[39:40], *new]
    assert steps("?after=42") == steps("?after=50") == []
    commit(steps=STEPS)
    assert steps() == [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert steps("?after=2") == []


def seen(events: list[dict]) -> list[tuple[str, int | None]]:
    return [(event["event"], event["data"].get("number")) for event in events]


def test_what_ranks_cause_in_numbers_pushes_out_no_verdict_plan_or_incident(http: Http, commit):
    kept = [("verdict", 1), ("plan", 2), ("failure", 3), ("plan_applied", 4)]
    commit(*kept)
    for number in range(10):
        commit(*[("ack", number)] * KEPT, *[("error", number)] * KEPT, steps=STEPS)
    commit(("joiner", 5))
    events = seen(read_events(http, "j", "?replay=true", until="joiner"))
    assert [event for event in events if event[0] not in {"ack", "error"}] == [
        ("registered", None), *kept, ("joiner", 5),
    ]  # fmt: skip
    assert KEPT <= sum(kind in {"ack", "error"} for kind, _ in events) < 4 * KEPT


def test_a_stream_goes_on_after_any_event_of_any_kind(http: Http, commit):
    kinds = ["verdict", "plan", "ack", "failure", "plan_applied", "probe", "error"]
    for number in range(40):
        commit(*[(kinds[(number + offset) % 7], number) for offset in range(number % 5)])
    commit(("verdict", 41), ("joiner", 42))
    events = read_events(http, "j", "?replay=true", until="joiner")
    assert [event["data"]["number"] for event in events[1:]] == [
        *(number for number in range(40) for _ in range(number % 5)), 41, 42,
    ]  # fmt: skip
    assert len({event["id"] for event in events}) == len(events)
    for at in range(0, len(events) - 1, 7):
        again = read_events(http, "j", until="joiner", **{"Last-Event-ID": events[at]["id"]})
        assert again == events[at + 1 :]


def test_large_events_are_read_a_few_at_a_time(http: Http, commit, monkeypatch: pytest.MonkeyPatch):
    """Each stream that nobody reads holds what was read for it."""
    pages, read = [], events_api._read

    async def noting(*given):
        pages.append(await read(*given))
        return pages[-1]

    monkeypatch.setattr(events_api, "_read", noting)
    commit(*[("plan", "x" * 400_000)] * 8, ("joiner", 8))
    events = read_events(http, "j", "?replay=true", until="joiner")
    assert [event["data"]["kind"] for event in events[1:]] == ["plan"] * 8 + ["joiner"]
    assert max(len(page.text) for page in pages) < 1_300_000
    assert len(pages) >= 3


def test_a_registration_anew_is_seen_by_who_followed_the_job_before(http: Http, commit):
    commit(*[("verdict", number) for number in range(5)], ("joiner", 5))
    last = read_events(http, "j", "?replay=true", until="joiner")[-1]["id"]
    http.register(job_of(device="H100"))
    events = read_events(http, "j", until="registered", **{"Last-Event-ID": last})
    assert seen(events) == [("registered", None)]


def test_new_steps_come_with_the_events(http: Http, commit):
    start = read_events(http, "j", "?replay=true", until="registered")[0]["id"]
    commit(("verdict", 1), steps=STEPS)
    commit(("verdict", 2))
    events = read_events(http, "j", until="step", **{"Last-Event-ID": start})
    events += read_events(http, "j", until="step", **{"Last-Event-ID": events[-1]["id"]})
    assert seen(events) == [("verdict", 1), ("verdict", 2), ("step", None), ("step", None)]
    assert [event["data"]["step"] for event in events[2:]] == [0, 1]


@pytest.mark.parametrize(
    "cursor",
    [
        "x",
        "1-0",
        "1-0_2-0_3-0",
        f"{2**64}-0_0-0",
        f"{2**64 - 1}-{2**64 - 1}_0-0",
        f"0-0_0-{2**64}",
        f"{'9' * 5000}-0_0-0",
        "-1-0_0-0",
    ],
)
def test_a_cursor_of_no_stream_is_refused(http: Http, cursor: str):
    http.register(job_of())
    answer = http("GET", "/v1/jobs/j/events", headers={"Last-Event-ID": cursor})
    assert problem_of(answer, 422)["errors"][0]["field"] == "Last-Event-ID"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "plan?after=-2"),
        ("GET", f"plan?after={2**63}"),
        ("GET", "plan?after=0&wait=nan"),
        ("GET", "plan/-1"),
        ("GET", f"plan/{2**63}"),
        ("POST", f"plan/{2**63}/ack"),
        ("PUT", f"plan/{2**63}"),
    ],
)
def test_numbers_that_no_plan_has_are_refused(http: Http, method: str, path: str):
    http.register(job_of())
    body = {"rank": 0, "state": "applied"} if method == "POST" else {"plan": {}}
    problem_of(http(method, f"/v1/jobs/j/{path}", None if method == "GET" else body), 422)


def test_acknowledgements_are_counted_and_refusals_told_one_by_one(sessions):
    session = sessions()

    def tell(kind: MessageKind, **document: object) -> None:
        session.apply(JobMessage("1-0", kind, json.dumps(document).encode()))

    def answer(rank: int, state: str, pause_ms: float | None = None) -> None:
        tell(
            MessageKind.ACK, version=1, rank=rank, state=state, step=3, detail="", pause_ms=pause_ms
        )

    tell(MessageKind.FAILURE, ranks=[7], step=3, detail="")
    session.changes = PendingChanges()
    for rank in range(4):
        answer(rank, "applied", pause_ms=9.0 - rank)
    assert session.changes.events == [
        ("acks", {"version": 1, "ranks": 4, "of": 7, "pause_ms": 9.0}),
    ]
    session.changes = PendingChanges()
    answer(4, "refused")
    answer(5, "refused")
    answer(5, "applied")
    answer(6, "applied")
    answer(4, "applied", pause_ms=1.0)
    kinds = [kind for kind, _ in session.changes.events]
    assert kinds == ["ack", "ack", "acks", "plan_applied"]
    assert [event["rank"] for kind, event in session.changes.events if kind == "ack"] == [4, 5]
    assert session.changes.events[2][1] == {"version": 1, "ranks": 7, "of": 7, "pause_ms": 1.0}
