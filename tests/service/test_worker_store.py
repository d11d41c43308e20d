"""Commits of a worker against a real Redis: whole or not at all, whoever renews the lease."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from fakes import fake_adapters

from resihp.contracts import Plan
from service import Settings
from service.errors import LeaseLostError
from service.store.documents import Commit, PendingChanges
from service.store.embedded_redis import EmbeddedRedis, socket_path
from service.store.schema import APIS, GROUP, URGENT, WORKERS, JobKeys, Subject
from service.store.worker_store import Lease, WorkerStore
from service.worker import loop
from tests.service.conftest import Http, batch_of, eventually, job_of, running

TTL_S, BYTES = 60, 8 << 20


@pytest.fixture
def http(tmp_path: Path) -> Iterator[Http]:
    with running(Settings(data=tmp_path, redis_url=None, worker=False)) as http:
        yield http


@pytest.fixture
def store(tmp_path: Path, http: Http) -> Iterator[WorkerStore]:
    http.register(job_of("j"))
    store = WorkerStore(f"unix://{socket_path(tmp_path)}", "w", keep_events=9, keep_steps=9)
    yield store
    store.close()


@pytest.fixture
def raw(tmp_path: Path, http: Http) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=str(socket_path(tmp_path)), protocol=2) as raw:
        yield raw


def commit_of(number: int) -> Commit:
    changes = PendingChanges(events=[("verdict", {"number": number})])
    state = {"detector": b"%d" % number}
    return Commit(changes, state, {"last_step": number}, newest=0)


def acquired(store: WorkerStore) -> Lease:
    lease = store.acquire("j", ttl_s=TTL_S)
    assert lease is not None
    return lease


def test_a_lease_renewed_all_the_time_ends_no_commit(store: WorkerStore):
    lease, stop, renewals = acquired(store), threading.Event(), []

    def renew() -> None:
        while not stop.is_set():
            renewals.append(store.renew(lease, ttl_s=TTL_S))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        for number in range(50):
            store.commit(lease, commit_of(number))
    finally:
        stop.set()
        thread.join()
    assert all(renewals)
    _, _, saved = store.load("j")
    assert saved["detector"] == b"49"


def test_parts_of_a_state_are_dropped_with_the_commit_that_names_them(store: WorkerStore):
    lease, none = acquired(store), PendingChanges()
    arrays = {f"array:{number}": b"" for number in range(3_000)}
    store.commit(lease, Commit(none, {"detector": b"1", **arrays}, {}, newest=0))
    dropped = arrays.keys() - {"array:7"}
    store.commit(lease, Commit(none, {"detector": b"2"}, {}, newest=0, dropped=dropped))
    _, _, saved = store.load("j")
    assert saved == {"detector": b"2", "array:7": b""}


def test_a_lost_lease_writes_nothing(http: Http, store: WorkerStore, raw: redis.Redis):
    lease = acquired(store)
    store.commit(lease, commit_of(1))

    def written() -> list[bytes]:
        return [raw.dump(key) for key in JobKeys("j").owned()]

    lost = [replace(lease, token=b"9:another"), replace(lease, generation=b"9")]
    before = written()
    for other in lost:
        with pytest.raises(LeaseLostError):
            store.commit(other, commit_of(2))
        with pytest.raises(LeaseLostError):
            store.publish(other, {"last_step": 2}, [{"step": 2}], "2-0")
    assert written() == before
    store.renew(lease, ttl_s=0)
    acquired(store)  # by the same worker, under another token
    with pytest.raises(LeaseLostError):
        store.commit(lease, commit_of(2))
    http.register(job_of("j", device="H100"))
    with pytest.raises(LeaseLostError):
        store.commit(lease, commit_of(2))
    assert http.get("/v1/jobs/j")["last_step"] == -1


def test_nothing_is_built_on_a_commit_that_redis_has_lost(
    http: Http, store: WorkerStore, raw: redis.Redis
):
    """Redis came back with its data of a moment ago, the lease among them, unnoticed by a worker
    that was busy: the next commit names a newest plan and leaves out parts of the state."""
    lease, keys = acquired(store), JobKeys("j")
    store.commit(lease, commit_of(1))
    before = {key: raw.dump(key) for key in (keys.meta, keys.plans, keys.digests, keys.state)}
    _, first, _ = store.load("j")
    plans = PendingChanges(plans=[replace(first, version=1)])
    store.commit(lease, Commit(plans, {"array:1": b"1"}, {}, newest=1))
    for key, dumped in before.items():
        raw.delete(key)
        if dumped is not None:
            raw.restore(key, 0, dumped)
    following = Commit(PendingChanges(), {"detector": b"3"}, {}, newest=1)
    with pytest.raises(LeaseLostError):
        store.commit(lease, following)
    with pytest.raises(LeaseLostError):
        store.publish(lease, {"last_step": 2}, [{"step": 2}], "2-0")
    assert http.get("/v1/jobs/j/plan")["version"] == 0
    store.commit(acquired(store), commit_of(2))  # from the state that is there
    assert http.get("/v1/jobs/j")["last_step"] == 2


def test_a_message_of_a_kind_that_nobody_knows_is_skipped(
    http: Http, raw: redis.Redis, tmp_path: Path
):
    """As of a later version of the service; it made all jobs begin again."""
    settings = Settings(data=tmp_path, redis_url=None, worker=False, commit_every_s=0.05)
    for job in ("j", "other"):
        http.register(job_of(job))
    worker = loop.Worker(f"unix://{socket_path(tmp_path)}", settings, fake_adapters(), "w")
    worker._balance(threading.Event())
    sessions = [worker._owned[job].session for job in ("j", "other")]
    for fields in ({"kind": "later", "body": "{}"}, {"a": "b"}):
        raw.xadd(JobKeys("j").messages, fields)
        worker._round(threading.Event())
    for job in ("j", "other"):
        http.send(job, batch_of(0))
    worker._read()
    assert [worker._owned[job].session for job in ("j", "other")] == sessions
    worker._leave()
    assert http.records("j") == http.records("other") == 32
    assert int(raw.hget(JobKeys("j").counts, "errors")) == 2


def test_a_commit_that_one_key_refuses_writes_nothing(store: WorkerStore, raw: redis.Redis):
    """Half of it would be applied again with the messages that it was made of."""
    lease, keys = acquired(store), JobKeys("j")
    store.commit(lease, commit_of(1))
    changes = PendingChanges(applied=["1-0"], steps=[{"step": 1}], events=[("plan", {})])
    commit = Commit(changes, {"detector": b"2"}, {"last_step": 2}, newest=0)
    used = (keys.state, keys.status, keys.counts, keys.steps, keys.histories[Subject.PLANS])
    for key in used:
        before = raw.dump(key)
        raw.delete(key)
        raw.set(key, "something else")
        written = [raw.dump(each) for each in keys.owned()]
        with pytest.raises(redis.ResponseError, match=f"WRONGTYPE {key} holds a string"):
            store.commit(lease, commit)
        assert written == [raw.dump(each) for each in keys.owned()]
        raw.delete(key)
        if before is not None:
            raw.restore(key, 0, before)
    store.commit(lease, commit)


def test_a_worker_keeps_nothing_of_jobs_that_are_deleted(http: Http, store: WorkerStore):
    leases = []
    for number in range(20):
        http.register(job_of(f"job{number}"))
        leases.append(store.acquire(f"job{number}", ttl_s=TTL_S))
        store.commit(leases[-1], commit_of(1))
        assert http("DELETE", f"/v1/jobs/job{number}").status == 204
    lease = acquired(store)
    store.commit(lease, commit_of(1))
    store.share_loads({}, ttl_s=TTL_S)
    assert store._commits == {"j": 1}
    with pytest.raises(LeaseLostError):
        store.commit(leases[0], commit_of(2))
    store.commit(lease, commit_of(2))


def test_a_worker_whose_lease_has_ended_takes_no_message_from_its_successor(
    http: Http, store: WorkerStore, tmp_path: Path
):
    """It stood still, and reads before it learns of that."""
    lost = acquired(store)
    store.renew(lost, ttl_s=0)
    url = f"unix://{socket_path(tmp_path)}"
    other = WorkerStore(url, "other", keep_events=9, keep_steps=9)
    lease = acquired(other)
    for step in range(3):
        http.send("j", batch_of(step))
    assert store.read({"j": lost}, count=9, size=BYTES) == {"j": []}
    assert len(other.read({"j": lease}, count=9, size=BYTES)["j"]) == 3
    http.register(job_of("j", device="H100"))
    http.send("j", batch_of(0))
    assert other.read({"j": lease}, count=9, size=BYTES) == {"j": []}
    other.close()


def test_a_worker_that_stood_still_forgets_no_message_that_its_successor_has_read(
    http: Http, store: WorkerStore, raw: redis.Redis, tmp_path: Path
):
    """It goes on where it removes workers that have read nothing."""
    url, messages = f"unix://{socket_path(tmp_path)}", JobKeys("j").messages

    def consumers() -> set[bytes]:
        return {each["name"] for each in raw.xinfo_consumers(messages, GROUP)}

    lost = acquired(store)
    store.renew(lost, ttl_s=0)
    other = WorkerStore(url, "other", keep_events=9, keep_steps=9)
    lease = acquired(other)
    raw.xgroup_createconsumer(messages, GROUP, "other")
    list(store.claim(lost, "0-0"))
    assert b"other" in consumers()
    http.send("j", batch_of(0))
    (unread,) = other.read({"j": lease}, count=9, size=BYTES)["j"]
    other.renew(lease, ttl_s=0)
    other.close()
    assert [message.id for message in store.claim(acquired(store), "0-0")] == [unread.id]
    assert consumers() == {b"w"}


def test_a_worker_is_woken_although_redis_was_away_at_first(tmp_path: Path):
    server = EmbeddedRedis(tmp_path)
    server.start()
    store = WorkerStore(server.url, "w", keep_events=9, keep_steps=9)
    try:
        server.stop()
        with pytest.raises(redis.RedisError):
            store.wait_for_urgent(0.0)
        server.start()
        store.wait_for_urgent(0.0)
        with redis.Redis(unix_socket_path=str(server.socket)) as raw:
            assert raw.publish(URGENT, "") == 1
        store.close()
    finally:
        server.stop()


def test_the_messages_of_many_jobs_are_read_by_and_by(http: Http, store: WorkerStore):
    """All that wait in all jobs may be more than there is memory."""
    leases = {}
    for job in ("j", "k", "l"):
        http.register(job_of(job))
        http.send(job, batch_of(0))
        http.send(job, batch_of(1))
        leases[job] = store.acquire(job, ttl_s=TTL_S)
    first = store.read(leases, count=9, size=1)
    assert [len(messages) for messages in first.values()] == [1]
    size = len(first["j"][0].body)
    second = store.read(leases, count=9, size=size + 1)
    assert {job: len(messages) for job, messages in second.items()} == {"j": 1, "k": 1}
    third = store.read(leases, count=9, size=BYTES)
    assert {job: len(messages) for job, messages in third.items()} == {"j": 0, "k": 1, "l": 2}


def test_a_job_with_large_messages_is_not_taken_for_one_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else its ranks were silent, while their heartbeats wait."""
    monkeypatch.setattr(loop, "_READ_BYTES", 1)
    settings = Settings(data=tmp_path, redis_url=None, worker=False)
    with running(settings) as http:
        http.register(job_of("j"))
        worker = loop.Worker(f"unix://{socket_path(tmp_path)}", settings, fake_adapters(), "w")
        worker._balance(threading.Event())
        for step in range(3):
            http.send("j", batch_of(step))
        assert [list(worker._read()) for _ in range(4)] == [["j"], ["j"], ["j"], []]
        worker._leave()
        assert http.records("j") == 96


def test_no_job_waits_for_the_backlog_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where one message is as much as a worker reads at a time."""
    monkeypatch.setattr(loop, "_READ_BYTES", 1)
    monkeypatch.setattr(loop, "_BATCH", 1)
    looked_at, read = [], WorkerStore.read

    def noting(store: WorkerStore, leases: Any, **limits: int) -> Any:
        found = read(store, leases, **limits)
        looked_at.extend(job for job, messages in found.items() if messages)
        return found

    settings = Settings(data=tmp_path, redis_url=None, worker=False)
    with running(settings) as http:
        for job in ("a", "b"):
            http.register(job_of(job))
            for step in range(4):
                http.send(job, batch_of(step))
        monkeypatch.setattr(WorkerStore, "read", noting)
        url, stop = f"unix://{socket_path(tmp_path)}", threading.Event()
        worker = loop.Worker(url, settings, fake_adapters(), "w")
        thread = threading.Thread(target=worker.run, args=(stop,))
        thread.start()
        try:
            eventually(lambda: len(looked_at) == 8)
        finally:
            stop.set()
            thread.join()
    assert sorted(looked_at[:2]) == sorted(looked_at[2:4]) == ["a", "b"]


def test_a_message_that_is_gone_ends_no_claim(store: WorkerStore, raw: redis.Redis):
    """Redis 6 gives nothing in its place, and newer ones forget it."""
    lease, messages = acquired(store), JobKeys("j").messages
    for _ in range(2):
        raw.xadd(messages, {"kind": "telemetry", "body": b""})
    read = store.read({"j": lease}, count=9, size=BYTES)
    first, second = (message.id for message in read["j"])
    raw.xdel(messages, first)
    assert [message.id for message in store.claim(lease, "0-0")] == [second]


def test_a_job_that_is_deleted_while_it_is_taken_over_is_no_fault_of_redis(
    http: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """For which a worker would drop all its jobs."""
    for job in ("a", "b"):
        http.register(job_of(job))
    load, loaded = WorkerStore.load, []

    def deleting(store: WorkerStore, job: str) -> Any:
        loaded.append(job)
        found = load(store, job)
        if job == "b":
            assert http("DELETE", "/v1/jobs/b").status == 204
        return found

    monkeypatch.setattr(WorkerStore, "load", deleting)
    settings = Settings(data=tmp_path, redis_url=None, commit_every_s=0.05)
    stop = threading.Event()
    worker = loop.Worker(f"unix://{socket_path(tmp_path)}", settings, fake_adapters(), "w")
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        http.send("a", batch_of(0))
        eventually(lambda: http.records("a") == 32 and "b" in loaded)
        http.send("a", batch_of(1))
        eventually(lambda: http.records("a") == 64)
    finally:
        stop.set()
        thread.join()
    assert loaded == ["a", "b"]


def test_a_commit_of_any_number_of_messages_leaves_none(store: WorkerStore, raw: redis.Redis):
    lease, pipe = acquired(store), raw.pipeline()
    for _ in range(9_000):  # more than a script can pass to a command at once
        pipe.xadd(JobKeys("j").messages, {"kind": "telemetry", "body": b""})
    pipe.execute()
    read = [m.id for m in store.read({"j": lease}, count=9_000, size=BYTES)["j"]]
    changes = PendingChanges(applied=read)
    store.commit(lease, Commit(changes, {"detector": b""}, {}, newest=0))
    assert len(read) == 9_000
    assert raw.xlen(JobKeys("j").messages) == 0
    assert list(store.claim(lease, "0-0")) == []


def test_of_many_steps_only_those_are_written_that_stay(
    http: Http, store: WorkerStore, monkeypatch: pytest.MonkeyPatch
):
    """Redis 6 ends the connection of a command with more than a million arguments."""
    lease, carry_out, numbers = acquired(store), store._commit, []

    def counting(*, keys: list[str], args: list[Any]) -> Any:
        numbers.append(len(args))
        return carry_out(keys=keys, args=args)

    monkeypatch.setattr(store, "_commit", counting)
    before = http("GET", "/v1/jobs/j/steps").headers["etag"]
    steps = [{"step": step} for step in range(5_000)]
    store.commit(lease, Commit(PendingChanges(steps=steps), {}, {}, newest=0))
    store.publish(lease, {}, [{"step": step} for step in range(5_000, 9_000)], "1-0")
    assert max(numbers) < 500
    answer = http("GET", "/v1/jobs/j/steps")
    assert [each["step"] for each in answer.json()["steps"][-9:]] == list(range(8_991, 9_000))
    assert answer.headers["etag"] != before


def test_of_more_events_than_redis_takes_at_a_time_the_newest_are_stored(
    http: Http, store: WorkerStore, raw: redis.Redis
):
    """The connection ended, which a worker took for an outage, again and again for all jobs."""
    lease, verdicts = acquired(store), [("verdict", {"number": 1})] * 400_000
    events = [("failure", {"number": 0}), *verdicts, ("verdict", {"number": 2}), ("ack", {})]
    store.commit(lease, Commit(PendingChanges(events=events), {}, {}, newest=0))
    stored = {
        subject: [fields[b"body"] for _, fields in raw.xrange(key)]
        for subject, key in JobKeys("j").histories.items()
    }
    assert stored[Subject.VERDICTS] == [b'{"number":1}'] * 8 + [b'{"number":2}']
    assert stored[Subject.INCIDENTS][-1] == b'{"number":0}'
    assert stored[Subject.ACTIVITY] == [b"{}"]
    assert int(raw.hget(JobKeys("j").counts, "verdicts")) == 400_001


@pytest.mark.parametrize("resumed", [False, True])
def test_messages_that_lead_to_very_many_events_are_saved_in_between(
    http: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
):
    monkeypatch.setattr(loop, "_MOST_EVENTS", 5)
    commit, saved = WorkerStore.commit, []

    def noting(store: WorkerStore, lease: Lease, made: Commit) -> None:
        commit(store, lease, made)
        saved.append((len(made.changes.applied), len(made.changes.events)))

    monkeypatch.setattr(WorkerStore, "commit", noting)
    settings = Settings(data=tmp_path, redis_url=None, worker=False)
    url, stop = f"unix://{socket_path(tmp_path)}", threading.Event()
    http.register(job_of("j"))
    worker = loop.Worker(url, settings, fake_adapters(), "w")
    worker._balance(stop)
    for rank in range(6):
        http("POST", "/v1/jobs/j/failures", {"ranks": [rank]})
        http.send("j", batch_of(0))
    if resumed:  # one that has read the messages has died
        worker._store.read({"j": worker._owned["j"].lease}, count=99, size=BYTES)
        worker = loop.Worker(url, settings, fake_adapters(), "w")
        worker._balance(stop)
    else:
        worker._read()
    assert saved
    assert all(events >= 5 for _, events in saved)
    worker._leave()
    assert sum(applied for applied, _ in saved) == 12
    assert http.records("j") == 6 * 32
    assert set(http.statuses("j").values()) == {"fail_stop", "healthy"}


def test_a_job_is_tried_again_after_an_error_that_passes(
    http: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It was not worked on until it was registered anew."""
    monkeypatch.setattr(loop, "_BROKEN_S", 1e-9)
    monkeypatch.setattr(loop, "_MOST_BROKEN_S", 3e-9)
    adapters, tries = fake_adapters(), []

    def short_of_memory(*given: Any) -> Any:
        tries.append(given)
        if len(tries) < 5:
            raise MemoryError
        return adapters.detector(*given)

    settings = Settings(data=tmp_path, redis_url=None, worker=False)
    url, stop = f"unix://{socket_path(tmp_path)}", threading.Event()
    http.register(job_of("j"))
    worker = loop.Worker(url, settings, replace(adapters, detector=short_of_memory), "w")
    delays_s = []
    for _ in range(4):
        worker._balance(stop)
        assert not worker._owned
        delays_s.append(worker._broken["j"].delay_s)
    assert delays_s == [1e-9, 2e-9, 3e-9, 3e-9]
    assert "MemoryError" in http.get("/v1/jobs/j")["error"]
    worker._balance(stop)
    worker._commit("j")
    assert http.get("/v1/jobs/j")["error"] is None
    assert not worker._broken
    worker._leave()


def test_the_newest_plans_are_kept_and_plan_0(http: Http, store: WorkerStore, raw: redis.Redis):
    lease, plan = acquired(store), Plan(version=1, layout=job_of().layout, quotas=job_of().quotas)
    for first in range(1, 301, 30):
        plans = [replace(plan, version=version) for version in range(first, first + 30)]
        store.commit(lease, Commit(PendingChanges(plans=plans), {}, {}, newest=first + 29))
    kept = sorted(map(int, raw.hkeys(JobKeys("j").plans)))
    assert kept == [0, *range(201, 301)]
    assert sorted(map(int, raw.hkeys(JobKeys("j").digests))) == kept[1:]
    assert http("GET", "/v1/jobs/j/plan/200").status == 404
    assert http.get("/v1/jobs/j/plan")["version"] == 300


def test_a_pause_ends_with_a_message_that_jobs_act_on(http: Http, store: WorkerStore):
    """What ranks send all the time ends none. A worker has subscribed before it pauses."""
    store.wait_for_urgent(0.0)
    woken = threading.Event()

    def pause() -> None:
        store.wait_for_urgent(600.0)
        woken.set()

    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    assert http.send("j", batch_of(0)).status == 202
    assert http("POST", "/v1/jobs/j/heartbeats", {"ranks": [0]}).status == 202
    assert not woken.wait(0.5)
    assert http("POST", "/v1/jobs/j/failures", {"ranks": [1]}).status == 202
    assert woken.wait(60.0)
    thread.join()


def test_a_report_of_the_future_counts_for_nothing(store: WorkerStore, raw: redis.Redis):
    """The clock of Redis went back after it."""
    eventually(lambda: store.api_delay_s() < 5)
    now_s = raw.time()[0]
    raw.zadd(WORKERS, {"gone": now_s + 3_600})
    workers, *_ = store.share_loads({}, ttl_s=TTL_S)
    assert workers == ["w"]
    raw.hset(APIS, "hung", f"{now_s - 20}000 {now_s - 20}000")
    raw.hset(APIS, "gone", f"{now_s + 3_600}000 {now_s + 3_600}000")
    assert store.api_delay_s() >= 20
    eventually(lambda: not raw.hexists(APIS, "gone"))
