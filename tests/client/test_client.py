"""What goes over the wire, and what comes back as what."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from itertools import count

import numpy as np
import pytest

from resihp import Client, Monitor
from resihp.contracts import (
    Advice,
    Cause,
    ContractError,
    Diagnosis,
    Job,
    Layout,
    Op,
    Plan,
    ServiceError,
    Status,
    Verdict,
    from_json,
    to_json,
)
from resihp.contracts.codec import WireFormat, decode

LAYOUT = Layout.grid(dp=2, pp=2, tp=1, layers=4)
PLAN = Plan(version=3, layout=LAYOUT, quotas=(5, 3), from_step=40, step_ms=11.0, bound_ms=10.0)


@pytest.fixture
def client(service):
    client = Client(service.url + "/", token="secret", timeout=300)
    yield client
    client.close()


def test_register(client, service):
    job = Job(name="llama 7b?", layout=LAYOUT, microbatches=8)
    client.register(job)
    asked = service.asked[0]
    assert (asked.method, asked.path) == ("PUT", "/v1/jobs/llama%207b%3F")
    assert asked.headers["Authorization"] == "Bearer secret"
    assert asked.headers["Content-Type"] == "application/json"
    assert from_json(Job, asked.json) == job


def test_telemetry(client, service):
    client.send_telemetry("j", b"\x80", WireFormat.MSGPACK, "key-1")
    asked = service.asked[0]
    assert (asked.method, asked.path, asked.body) == ("POST", "/v1/jobs/j/telemetry", b"\x80")
    assert asked.headers["Content-Type"] == "application/msgpack"
    assert asked.headers["Idempotency-Key"] == "key-1"


def test_heartbeat_failure_and_acknowledgement(client, service):
    client.heartbeat("j", ranks=(1, 2), step=9)
    client.report_failure("j", ranks=[4], step=9, plan_version=1, reported_by=0, detail="reset")
    client.acknowledge("j", 3, rank=0, step=40, pause_ms=12.5)
    client.acknowledge("j", 3, rank=1, state="refused", detail="no memory")
    paths = [asked.path.removeprefix("/v1/jobs/j/") for asked in service.asked]
    assert paths == ["heartbeats", "failures", "plan/3/ack", "plan/3/ack"]
    assert [asked.json for asked in service.asked] == [
        {"ranks": [1, 2], "step": 9},
        {"ranks": [4], "step": 9, "plan_version": 1, "reported_by": 0, "detail": "reset"},
        {"rank": 0, "step": 40, "state": "applied", "detail": "", "pause_ms": 12.5},
        {"rank": 1, "step": None, "state": "refused", "detail": "no memory", "pause_ms": None},
    ]


def test_a_job_is_deleted_by_its_name(client, service):
    client.delete("a job (replay)")
    assert service.asked[-1].method == "DELETE"
    assert service.asked[-1].path == "/v1/jobs/a%20job%20%28replay%29"


def test_a_heartbeat_of_the_first_step_names_it(client, service):
    client.heartbeat("j", ranks=[0], step=0)
    client.heartbeat("j", ranks=[0])
    assert [asked.json for asked in service.asked] == [{"ranks": [0], "step": 0}, {"ranks": [0]}]


def test_numbers_of_numpy_are_sent_as_plain_ones(client, service):
    one, ms = np.int64(1), np.float32(12.5)
    job = Job(name="j", layout=LAYOUT, microbatches=np.int64(8))
    client.register(job)
    client.heartbeat("j", ranks=np.arange(2), step=one)
    client.report_failure("j", ranks=np.arange(2), step=one, plan_version=one, reported_by=one)
    client.announce_joiners("j", ranks=np.arange(2), step=one)
    client.answer_probe("j", probe="p", rank=one, ms=ms)
    client.acknowledge("j", one, rank=one, step=one, pause_ms=ms)
    client.tell_plan("j", PLAN, lost=np.arange(2))
    sent = [asked.json for asked in service.asked]
    assert sent == [
        to_json(job),
        {"ranks": [0, 1], "step": 1},
        {"ranks": [0, 1], "step": 1, "plan_version": 1, "reported_by": 1, "detail": ""},
        {"ranks": [0, 1], "step": 1},
        {"rank": 1, "ms": 12.5, "detail": ""},
        {"rank": 1, "step": 1, "state": "applied", "detail": "", "pause_ms": 12.5},
        {"plan": to_json(PLAN), "lost": [0, 1]},
    ]
    assert service.asked[5].path == "/v1/jobs/j/plan/1/ack"


def test_verdicts_and_diagnosis(client, service):
    slow = Verdict(rank=2, status=Status.FAIL_SLOW, slowdown=1.5, since_step=7, evidence=("e",))
    service.answer(200, {"job": "j", "verdicts": [{**to_json(slow), "news": 1}]})
    assert client.verdicts("j") == [slow]
    why = Diagnosis(slowdown=1.2, root_cause=Cause.DEVICE, attribution={Cause.DEVICE: 1.0})
    service.answer(200, to_json(why))
    assert client.diagnosis("j") == why


def test_advice(client, service):
    service.answer(200, {"job": "j", "advice": None})
    assert client.advice("j") is None
    found = Advice(ranks=(5,), step_ms=150.0, without_ms=120.0, replaced_ms=100.0)
    service.answer(200, {"job": "j", "advice": {**to_json(found), "summary": found.summary}})
    assert client.advice("j") == found


def test_plan(client, service):
    service.answer(200, {**to_json(PLAN), "gap": PLAN.gap})
    assert client.plan("j", after=2, wait=0.5) == PLAN
    service.answer(204)
    assert client.plan("j", after=3) is None
    service.answer(200, to_json(PLAN))
    assert client.plan("j") == PLAN
    assert [asked.path for asked in service.asked] == [
        "/v1/jobs/j/plan?after=2&wait=0.5",
        "/v1/jobs/j/plan?after=3&wait=0.0",
        "/v1/jobs/j/plan",
    ]


def test_fields_of_a_newer_sidecar_are_skipped_at_any_depth(client, service):
    document = to_json(PLAN)
    for part in (
        document,
        document["layout"],
        document["layout"]["replicas"][0],
        document["layout"]["replicas"][1]["stages"][0],
    ):
        part["of_next_year"] = {"ranks": [1]}
    service.answer(200, document)
    assert client.plan("j") == PLAN
    with pytest.raises(ContractError, match="of_next_year: unknown field"):
        from_json(Plan, document)
    document["layout"]["replicas"][0]["stages"][0]["ranks"] = ["x"]
    service.answer(200, document)
    with pytest.raises(ServiceError, match=r"replicas\[0\]\.stages\[0\]\.ranks\[0\]: must be"):
        client.plan("j")


def test_a_long_poll_may_outlast_the_timeout(service):
    service.delay = threading.Event()
    service.answer(204)
    client = Client(service.url, timeout=0.2)
    threading.Timer(0.5, service.delay.set).start()
    assert client.plan("j", after=0, wait=60) is None
    service.delay = threading.Event()
    with pytest.raises(ServiceError, match="no answer") as caught:
        client.health()
    assert caught.value.status is None
    client.close()


def test_health(client, service):
    service.answer(200, {"status": "ok"})
    assert client.health() == {"status": "ok"}
    assert service.asked[0].path == "/v1/healthz"


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (422, {"title": "Malformed", "detail": "columns.op: is missing"}, "Malformed: columns.op"),
        (404, {"title": "No such job"}, "No such job"),
        (500, b"Internal Server Error", "status 500"),
        (502, [1], "status 502"),
        (307, b"", "status 307"),
    ],
)
def test_errors_carry_status_and_the_problems_words(client, service, status, body, words):
    service.answer(status, body)
    with pytest.raises(ServiceError, match=words) as caught:
        client.verdicts("j")
    assert caught.value.status == status


@pytest.mark.parametrize(
    "body",
    [b"<html>", {"version": 1}, [], {"version": "x", "layout": {}, "quotas": []}, b"[" * 100_000],
)
def test_an_answer_that_makes_no_sense_is_a_service_error(client, service, body):
    service.answer(200, body)
    with pytest.raises(ServiceError):
        client.plan("j")


@contextmanager
def endless(head: bytes, part: bytes, pause_s: float):
    """The address of a server whose answer does not end, until the client leaves."""
    left = threading.Event()

    def serve():
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(65_536)
            connection.sendall(head + b"\r\n\r\n")
            while True:
                connection.sendall(part)
                time.sleep(pause_s)
        left.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", left
        thread.join(60)


def test_an_answer_that_drips_is_not_awaited(monkeypatch):
    minutes = count()  # one passes with each part: each is in time, and all of them are not
    monkeypatch.setattr("resihp.client._client.monotonic", lambda: 60.0 * next(minutes))
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000"
    with endless(head, b" ", 0.02) as (url, left):
        with pytest.raises(ServiceError, match="does not end"):
            Client(url, timeout=150.0).health()
        assert next(minutes) == 7  # twice the time-out
        assert left.wait(60)


@pytest.mark.parametrize(("status", "words"), [(200, "longer than"), (503, "status 503 Busy")])
def test_of_an_endless_answer_only_so_much_is_read(status, words):
    head = b"HTTP/1.1 %d Busy\r\nTransfer-Encoding: chunked" % status
    with endless(head, b"100000\r\n" + b"x" * (1 << 20) + b"\r\n", 0.0) as (url, left):
        with pytest.raises(ServiceError, match=words) as caught:
            Client(url, timeout=60).health()
        assert caught.value.status == (status if status >= 300 else None)
        assert left.wait(60)


def test_connections_are_used_again(client, service):
    for status in (200, 500, 204):
        service.answer(status, {})
        with suppress(ServiceError):
            client.send_telemetry("j", b"", WireFormat.MSGPACK)
    assert len(service.asked) == 3
    assert len({asked.port for asked in service.asked}) == 1


def test_nobody_there(closed_port):
    with pytest.raises(ServiceError, match="no answer") as caught:
        Client(f"http://127.0.0.1:{closed_port}", timeout=1).health()
    assert caught.value.status is None


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8700", "ftp://host", "http://", "http://[::1", "http://host:99999"]
)
def test_what_is_no_address(url):
    with pytest.raises(ContractError) as caught:
        Client(url)
    assert caught.value.field == "url"


def test_white_space_around_the_token_is_none_of_it(service):
    service.answer(200, {"status": "ok"})
    Client(service.url, "secret\r\n").health()
    Client(service.url, "\n").health()
    assert [asked.headers.get("Authorization") for asked in service.asked] == [
        "Bearer secret", None,
    ]  # fmt: skip


@pytest.mark.parametrize("token", ["ключ", "a\x00b", "a\nb"])
def test_what_is_no_token(token):
    with pytest.raises(ContractError) as caught:
        Client("http://127.0.0.1:9", token)
    assert caught.value.field == "token"
    assert token not in str(caught.value)


def test_both_sides_of_a_fork_have_their_own_connection(client, service):
    service.answer(200, {"status": "ok"})
    client.health()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if client.health() == {"status": "ok"} else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.health() == {"status": "ok"}
    assert len(service.asked) == 3


def test_a_monitor_over_real_http(service):
    service.answers = [(500, b""), (202, {})]
    with Monitor(
        job="j", url=service.url, token="t", rank=1, interval_s=0.01, heartbeat_s=0
    ) as monitor:
        for _ in range(3):
            with monitor.step(), monitor.microbatch(seq_lens=[2, 3]):
                pass
        monitor.close(300.0)
    keys = [asked.headers["Idempotency-Key"] for asked in service.asked]
    assert keys[0] == keys[1]
    batches = {asked.headers["Idempotency-Key"]: decode(asked.body) for asked in service.asked}
    assert sum(len(batch) for batch in batches.values()) == monitor.stats.sent == 3
    assert service.asked[0].headers["Authorization"] == "Bearer t"
    assert all((batch.op == Op.FORWARD).all() for batch in batches.values())
