"""Status documents: the verdicts on all devices in short, and only what differs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from test_telemetry_runs import JOB, contents, message, real_session

from detector import persistence
from resihp.contracts import Layout, Plan, from_json, to_json
from resihp.contracts.codec import encode
from resihp.contracts.verdict import Verdict
from resihp.testing.scenarios import steps_of
from service.store.documents import JobMessage, MessageKind, verdict_texts
from service.store.worker_store import Lease
from service.worker.owned_job import OwnedJob
from service.worker.session import JobSession


def session_with_steps() -> JobSession:
    session = real_session()
    steps = steps_of(JOB, (300, 700, 2000), steps=4, seed=1)
    session.apply(*(message(number, encode(step)) for number, step in enumerate(steps)))
    return session


def verdicts_in(status: Mapping[str, Any]) -> list[Verdict]:
    found = [(rank, from_json(Verdict, json.loads(text))) for rank, text in verdict_texts(status)]
    assert all(rank == verdict.rank for rank, verdict in found)
    return [verdict for _, verdict in found]


def test_the_documents_hold_the_verdict_on_each_device() -> None:
    session = session_with_steps()
    stored = json.loads(json.dumps(session.status()))
    assert stored["verdicts"] == []
    assert stored["devices"] == {"healthy": 16}
    found = verdicts_in(stored)
    for verdict, whole in zip(found, session._detector.verdicts(), strict=True):
        assert (verdict.rank, verdict.status, verdict.step) == (whole.rank, whole.status, 3)
        assert verdict.confidence == pytest.approx(whole.confidence, abs=0.01)
    assert verdicts_in({}) == []


def test_ranks_that_left_the_layout_keep_their_last_verdict() -> None:
    session = session_with_steps()
    left = JOB.layout.replicas[3].ranks
    fewer = Plan(version=1, layout=Layout(JOB.layout.replicas[:3]), quotas=(6, 5, 5), from_step=4)
    own = {"plan": to_json(fewer), "lost": [left[0]], "step": 3}
    session.apply(JobMessage("9-0", MessageKind.OWN_PLAN, json.dumps(own).encode()))
    assert not [event for event in session.changes.events if event[0] == "error"]
    again = real_session()
    again.resume(session.save())
    for each in (session, again):
        found = {verdict.rank: verdict.status for verdict in verdicts_in(each.status())}
        assert sorted(found) == list(range(16))
        assert [rank for rank, status in found.items() if status == "fail_stop"] == [left[0]]
        assert each.status()["devices"] == {"healthy": 15, "fail_stop": 1}


def test_a_document_is_written_once() -> None:
    session = session_with_steps()
    owned = OwnedJob(Lease("j", b"1:w", b"1"), session)
    assert owned.changed_status() == session.status()
    assert owned.changed_status() == {}
    body = b'{"ranks": [5], "step": 3, "detail": "lost", "reported_by": 0}'
    session.apply(JobMessage("9-0", MessageKind.FAILURE, body))
    assert {"healthy", "verdicts", "devices"} <= owned.changed_status().keys()


def test_a_job_in_which_nothing_changes_is_diagnosed_less_often() -> None:
    session, now_s = session_with_steps(), time.monotonic()
    owned = OwnedJob(Lease("j", b"1:w", b"1"), session)

    def is_due(diagnosed_s: float) -> bool:
        owned.diagnosed_s = now_s - diagnosed_s
        return owned.diagnosis_is_due(5.0, commit_every_s=1.0)

    owned.changed_s = now_s - 1.0
    assert is_due(7.0)
    owned.changed_s = now_s - 20.0
    assert not is_due(7.0)
    assert is_due(15.0)
    owned.changed_s = now_s - 3600.0
    assert is_due(40.0)
    body = b'{"ranks": [5], "step": 3, "detail": "lost", "reported_by": 0}'
    session.apply(JobMessage("9-0", MessageKind.FAILURE, body))
    owned.commit()
    owned.saved_bytes = 0
    assert is_due(7.0)


def test_a_job_whose_events_have_it_saved_all_the_time_is_diagnosed_all_the_same() -> None:
    now_s = time.monotonic()
    owned = OwnedJob(Lease("j", b"1:w", b"1"), session_with_steps(), changed_s=now_s)
    owned.committed_s, owned.diagnosed_s = now_s, now_s - 7.0
    assert owned.diagnosis_is_due(5.0, commit_every_s=1.0)
    owned.saved_bytes = 80 << 20
    assert not owned.diagnosis_is_due(5.0, commit_every_s=1.0), (
        "a large state is not written twice as often for it"
    )


def test_a_job_with_events_is_saved_sooner_than_one_that_only_goes_on() -> None:
    session = session_with_steps()
    owned = OwnedJob(Lease("j", b"1:w", b"1"), session)
    owned.commit()
    owned.saved_bytes, owned.committed_s = 0, time.monotonic() - 60.0
    assert not owned.commit_is_due(30.0), "nothing is new"
    session.changes.applied.append("9-0")
    assert owned.commit_is_due(30.0)
    assert not owned.commit_is_due(3_600.0)
    body = b'{"ranks": [5], "step": 3, "detail": "lost", "reported_by": 0}'
    session.apply(JobMessage("9-1", MessageKind.FAILURE, body))
    assert owned.commit_is_due(3_600.0)


def test_arrays_that_have_not_changed_are_not_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(persistence, "_LARGE_BYTES", 64)
    session = real_session()
    owned = OwnedJob(Lease("j", b"1:w", b"1"), session)
    saved: dict[str, bytes] = {}
    for number, step in enumerate(steps_of(JOB, (300, 700, 2000), steps=6, seed=1)):
        session.apply(message(number, encode(step)))
        commit = owned.commit()
        assert commit.dropped <= saved.keys()
        unchanged = saved.keys() & session.save().keys() - {"detector", "steps", "session"}
        assert unchanged.isdisjoint(commit.state)
        assert number == 0 or unchanged
        saved = {name: part for name, part in saved.items() if name not in commit.dropped}
        saved |= commit.state
        again = real_session()
        again.resume(saved)
        assert contents(again.save()) == contents(session.save()) == contents(saved)
    resumed = OwnedJob(Lease("j", b"2:w", b"1"), again, frozenset(saved))
    commit = resumed.commit()
    assert commit.state.keys() == {"detector", "steps", "session"}
    assert not commit.dropped
    del saved[next(name for name in saved if name.startswith(persistence.ARRAY))]
    broken = real_session()
    broken.resume(saved)
    ((kind, event),) = broken.changes.events
    assert (kind, event["during"]) == ("error", "resume")
