"""Each limit has its own clear error; a token is wanted where one is set."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from pydantic import ValidationError
from redis.asyncio import Redis
from test_api import JSON, problem_of

from detector import Detector, DetectorSettings
from resihp.cli._serve import settings_from
from resihp.client import Client
from resihp.contracts import TelemetryBatch, codec, to_json
from resihp.contracts.telemetry import MOST_MS
from service import Settings, connections
from service.api import bodies, middleware
from service.api.delay import WaitingRequests
from service.api.metrics import HttpMetrics
from service.errors import StartError
from service.server import write_ready_file
from service.settings import unknown_variables
from service.store.connection import check_redis, without_password
from service.store.embedded_redis import socket_path
from service.store.http_store import HttpStore
from service.worker.adapters import load_adapters
from tests.forked import ForkedProcess
from tests.service.conftest import Http, batch_of, eventually, job_of, running
from tests.service.forked_sidecar import run_python


def settings_of(tmp_path, **more):
    return Settings(redis_url=None, data=tmp_path, commit_every_s=0.05, **more)


def test_sizes_and_numbers_are_limited(tmp_path):
    limits = {"max_body_bytes": 20_000, "max_records": 100, "max_jobs": 2, "max_watchers": 1}
    with running(settings_of(tmp_path, **limits)) as http:
        http.register(job_of("a"))
        http.register(job_of("b"))
        refused = http("PUT", "/v1/jobs/c", to_json(job_of("c")))
        assert problem_of(refused, 429)["type"].endswith("too-many-jobs")
        assert refused.headers["retry-after"] == "1"
        path = "/v1/jobs/a/telemetry"
        problem_of(http("POST", path, body=b"x" * 20_001, headers=JSON), 413)
        chunks = (b" " * 7_000 for _ in range(4))
        chunked = http("POST", path, body=chunks, headers=JSON, chunked=True)
        assert "20000 bytes" in problem_of(chunked, 413)["detail"]
        many = type(batch_of(0)).concat([batch_of(step) for step in range(4)])
        assert "100 records" in problem_of(http.send("a", many), 422)["detail"]
        watching = http("GET", "/v1/jobs/a/events", preload_content=False)
        assert watching.read1(16)
        full = problem_of(http("GET", "/v1/jobs/a/plan?after=0&wait=5"), 429)
        assert full["type"].endswith("too-many-watchers")
        problem_of(http("GET", "/v1/jobs/a/events"), 429)
        watching.close()


def test_requests_that_stop_arriving_are_cut_and_counted(tmp_path, monkeypatch):
    head = b"POST /v1/jobs/a/telemetry HTTP/1.1\r\nHost: localhost\r\n"
    whole = b"GET /v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running(settings_of(tmp_path)) as http:
        http.register(job_of("a"))
        monkeypatch.setattr(middleware, "SILENT_S", 0.3)
        answer = exchange(
            http, head + b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"urn:resihp:problem:slow-request" in answer
        cut_soon = partial(monkeypatch.setattr, connections, "HEAD_S", 0.3)
        assert exchange(http, whole, cut_soon, b"GET /v1/hea").startswith(b"HTTP/1.1 200")
        assert exchange(http, b"") == b""
        assert exchange(http, head) == b""
        monkeypatch.undo()
        text = http("GET", "/metrics").data.decode()
        process = multiprocessing.current_process().name  # each counts its own
        for part, count in (("head", 3.0), ("body", 1.0)):
            assert f'resihp_http_cut_total{{part="{part}",process="{process}"}} {count}' in text


def exchange(
    http: Http, first: bytes, between: Callable[[], None] | None = None, second: bytes = b""
) -> bytes:
    """All that the sidecar answers until it closes the connection, to these bytes, the second ones
    sent after an answer to the first ones, and after the call of `between`."""
    address = urlsplit(http.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        answer = b""
        # By one that was closed before it was sent anything, or before all was read.
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(first)
            if between is not None:
                answer = connection.recv(65_536)
                between()
                connection.sendall(second)
            while part := connection.recv(65_536):
                answer += part
    return answer


@pytest.mark.parametrize("part", ["headers", "one header", "trailers"])
def test_heads_and_trailers_without_end_are_cut_and_counted(tmp_path, monkeypatch, part):
    """Before the token is asked for. A head of the usual size, and a body of any, are not cut."""
    monkeypatch.setattr(connections, "HEAD_S", 600.0)
    size = connections.HEAD_BYTES
    begun = b"POST /v1/jobs/a/telemetry HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s\r\n"
    chunked = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    endless = b"a: " + b"b" * 4 * size if part == "one header" else b"a:b\r\n" * size
    usual = b"a: b\r\n" * (size // 12) + b"Content-Length: %d\r\n\r\n" % (4 * size)
    with running(settings_of(tmp_path, token="s")) as http:
        whole = exchange(
            http, begun + usual + bytes(4 * size) + begun + b"Connection: close\r\n\r\n"
        )
        assert whole.count(b"urn:resihp:problem:unsupported-media-type") == 2
        answer = exchange(http, begun + (chunked if part == "trailers" else b"") + endless)
        assert not answer or answer.startswith(b"HTTP/1.1 431")
        text = http("GET", "/metrics", headers={"Authorization": "Bearer s"}).data.decode()
        process = multiprocessing.current_process().name
        assert f'resihp_http_cut_total{{part="head",process="{process}"}} 1.0' in text


def test_made_up_methods_make_no_new_series(tmp_path):
    with running(settings_of(tmp_path)) as http:
        for method in ("GET", "PROPFIND", "LOCK"):
            http(method, "/v1/jobs")
        text = http("GET", "/metrics").data.decode()
    methods = set(re.findall(r'resihp_http_requests_total\{method="(\w+)"', text))
    assert methods == {"GET", "other"}


@pytest.mark.parametrize(
    ("path", "document", "field"),
    [
        ("telemetry", {"dropped": 2**32}, "dropped"),
        ("telemetry", {"columns": {"step": [2**53 + 1]}}, "step"),
        ("telemetry", {"columns": {"compute_ms": [1e300]}}, "compute_ms"),
        ("telemetry", {"columns": {"wait_ms": [1e300]}}, "wait_ms"),
        ("heartbeats", {"ranks": [0], "step": 2**62}, "step"),
        ("heartbeats", {"ranks": [0], "position": {"step": 2**62}}, "position.step"),
        ("heartbeats", {"ranks": [0], "position": {"step": 0, "for_s": 1e300}}, "position.for_s"),
        ("heartbeats", {"ranks": list(range(131_073))}, "ranks"),
        ("failures", {"ranks": [0], "step": 2**62}, "step"),
        ("failures", {"ranks": [0], "reported_by": 2**31}, "reported_by"),
        ("joiners", {"ranks": list(range(131_073))}, "ranks"),
        ("plan/0/ack", {"rank": 0, "state": "applied", "pause_ms": 1e300}, "pause_ms"),
        ("plan/0/ack", {"rank": 0, "state": "applied", "pause_ms": -1.0}, "pause_ms"),
    ],
)
def test_odd_numbers_are_refused_by_name(http: Http, path, document, field):
    http.register(job_of("odd"))
    if path == "telemetry":
        columns = {"rank": [0], "step": [0], "microbatch": [0], "op": [0], "compute_ms": [1.0]}
        document = {"version": 1, **document, "columns": columns | document.get("columns", {})}
    problem = problem_of(http("POST", f"/v1/jobs/odd/{path}", document), 422)
    assert field in {error["field"] for error in problem["errors"]}


def test_the_largest_numbers_that_are_allowed_break_nothing(tmp_path):
    with running(settings_of(tmp_path), load_adapters) as http:
        http.register(job_of("a"))
        most = replace(batch_of(0, dropped=2**32 - 1), compute_ms=np.full(32, MOST_MS))
        for batch in (most, most, *map(batch_of, range(1, 9))):
            assert http.send("a", batch).status == 202
        eventually(lambda: http.get("/v1/jobs/a")["backlog"] == 0)
        assert http.get("/v1/jobs/a")["last_step"] == 8
        kept = http.get("/v1/jobs/a/steps")["steps"]
        assert kept[0]["observed_ms"] > MOST_MS


def test_a_message_holds_so_many_steps(http: Http):
    http.register(job_of("steps"))
    size = 8_193
    first = np.zeros(size, int)
    batch = TelemetryBatch(
        rank=first, step=np.arange(size), microbatch=first, op=first, compute_ms=first
    )
    problem = problem_of(http.send("steps", batch), 422)
    assert problem["errors"][0]["field"] == "columns.step"
    assert http.send("steps", batch.select(slice(1, None))).status == 202


def test_many_mistakes_are_counted_not_listed(http: Http):
    http.register(job_of("mistakes"))
    document = {"ranks": [0], **{f"field {number}": 0 for number in range(10_000)}}
    problem = problem_of(http("POST", "/v1/jobs/mistakes/heartbeats", document), 422)
    assert problem["detail"] == "has 10000 mistakes"
    answer = http("POST", "/v1/jobs/mistakes/heartbeats", {"ranks": [0], "x" * 1_000_000: 0})
    assert "Extra inputs" in problem_of(answer, 422)["detail"]
    assert len(answer.data) < 2_000


def test_other_requests_are_answered_while_a_large_message_is_decoded(tmp_path, monkeypatch):
    begun, done = threading.Event(), threading.Event()

    def decode(message, form, **more):
        begun.set()
        assert done.wait(120)
        return codec.decode(message, form, **more)

    monkeypatch.setattr(bodies, "decode", decode)
    large = type(batch_of(0)).concat([batch_of(0) for _ in range(bodies.LARGE_BYTES // 1_000)])
    with running(settings_of(tmp_path)) as http, ThreadPoolExecutor() as pool:
        http.register(job_of("a"))
        sent = pool.submit(http.send, "a", large)
        try:
            assert begun.wait(120)
            assert http("GET", "/healthz").status == 200
            assert not sent.done()
        finally:
            done.set()
        assert sent.result().status == 202


def test_large_bodies_take_turns_and_small_ones_do_not(monkeypatch):
    monkeypatch.setattr(middleware, "LARGE_AT_A_TIME", 1)
    answering = []

    waiting = WaitingRequests()

    async def requests() -> None:
        may_end = asyncio.Event()

        async def app(scope, receive, send):
            await receive()
            answering.append(scope["path"])
            await may_end.wait()

        guarded = middleware.RequestMiddleware(
            app, Settings(redis_url=None), HttpMetrics(), waiting
        )

        async def request(path: str, size: int) -> None:
            async def receive():
                return {"type": "http.request", "body": bytes(size), "more_body": False}

            await guarded(
                {"type": "http", "method": "POST", "path": path, "headers": []}, receive, None
            )

        sizes = {"/large": bodies.LARGE_BYTES + 1, "/waits": bodies.LARGE_BYTES + 1, "/small": 10}
        tasks = [asyncio.create_task(request(path, size)) for path, size in sizes.items()]
        for _ in range(100):
            await asyncio.sleep(0)
        assert answering == ["/large", "/small"]
        may_end.set()
        await asyncio.gather(*tasks)

    asyncio.run(requests())
    assert not len(waiting)
    assert answering == ["/large", "/small", "/waits"]


@pytest.mark.parametrize("announced", [b"content-length: 16777216", b"transfer-encoding: chunked"])
def test_slow_uploads_hold_up_no_other_large_body(announced):
    """Of many clients on a slow line, whatever they announce; each needs what has arrived."""
    head = [tuple(announced.split(b": "))]

    async def requests(uploads: Uploads) -> None:
        slow = [uploads.start(f"/slow{number}", head) for number in range(64)]
        quick = uploads.start("/quick", head)
        for path, _ in [*slow, quick]:
            await uploads.arrive(path, 2 * bodies.LARGE_BYTES)
        assert not len(uploads.waiting)
        await uploads.arrive("/quick", 0)
        await quick[1]
        assert uploads.answered == ["/quick"]
        for path, task in slow:
            await uploads.arrive(path, 0)
            await task

    asyncio.run(asyncio.wait_for(requests(Uploads(Settings(redis_url=None))), 60))


def test_bodies_that_fill_the_room_together_do_not_wait_for_each_other():
    """One of them goes on, and gives its place to another as soon as there is room again."""
    part = 2 * bodies.LARGE_BYTES
    settings = Settings(redis_url=None, max_body_bytes=2 * part)

    async def requests(uploads: Uploads) -> None:
        tasks = dict(uploads.start(f"/{number}", []) for number in range(9))
        for path in tasks:
            await uploads.arrive(path, part)
        waiting = ["/7", "/8"]  # six are room, and one has the place
        assert len(uploads.waiting) == 2
        assert sorted(uploads.unread) == waiting
        for path in ("/0", "/1"):
            await uploads.arrive(path, part)
        assert len(uploads.waiting) == 4
        await uploads.arrive("/6", part)
        assert sorted(uploads.unread) == ["/0", "/1", *waiting]
        ended = ("/6", "/2", "/3", "/4")
        for path in ended:
            await uploads.arrive(path, 0)
            await tasks[path]
        assert uploads.unread == set()
        for path in tasks.keys() - {*ended}:
            await uploads.arrive(path, 0)
        await asyncio.gather(*tasks.values())
        assert not len(uploads.waiting)

    asyncio.run(asyncio.wait_for(requests(Uploads(settings)), 60))


class Uploads:
    """Requests whose bodies arrive when told.

    waiting   those that wait for the service
    unread    paths of those that have a part that is not taken
    answered  paths, in order
    """

    def __init__(self, settings: Settings) -> None:
        self.waiting = WaitingRequests()
        self.unread, self.answered = set[str](), list[str]()
        self._parts: dict[str, asyncio.Queue[int]] = {}
        self._guarded = middleware.RequestMiddleware(
            self._app, settings, HttpMetrics(), self.waiting
        )

    def start(self, path: str, head: list[tuple[bytes, ...]]) -> tuple[str, asyncio.Task[None]]:
        """Begin a request."""
        parts = self._parts[path] = asyncio.Queue()

        async def receive():
            size = await parts.get()
            return {"type": "http.request", "body": bytes(size), "more_body": size > 0}

        scope = {"type": "http", "method": "POST", "path": path, "headers": head}
        return path, asyncio.create_task(self._guarded(scope, receive, None))

    async def arrive(self, path: str, size: int) -> None:
        """Give a part of a body, of no bytes at its end, and all requests the time to go on."""
        self.unread.add(path)
        self._parts[path].put_nowait(size)
        for _ in range(20):
            await asyncio.sleep(0)

    async def _app(self, scope, receive, send) -> None:
        more = True
        while more:
            more = (await receive()).get("more_body", False)
            self.unread.discard(scope["path"])
        self.answered.append(scope["path"])


def test_jobs_that_ended_long_ago_are_deleted_but_not_the_newest(tmp_path):
    names = [f"j{index:02}" for index in range(13)]
    with running(settings_of(tmp_path)) as http:
        for name in names:
            http.register(job_of(name))
        http.send(names[0], batch_of(0))
        eventually(lambda: http.records(names[0]) == 32)
        assert len(http.get("/v1/jobs")["jobs"]) == 13
    with running(settings_of(tmp_path, keep_jobs_days=1e-9)) as http:
        eventually(lambda: len(http.get("/v1/jobs")["jobs"]) == 10)
        left = [job["name"] for job in http.get("/v1/jobs")["jobs"]]
        assert left == [names[0], *names[4:]]
        assert http.records(names[0]) == 32


@pytest.mark.parametrize("ahead_s", [(-3e6, 0), (0, 3e6)])
def test_jobs_are_deleted_by_the_clock_of_redis(tmp_path, monkeypatch, ahead_s):
    """That of the host of an API process may be wrong, at the registration or later."""
    now, url = time.time, f"unix://{socket_path(tmp_path)}"

    async def expired(silent_s: float) -> list[str]:
        async with Redis.from_url(url, protocol=2) as client:
            return await HttpStore(client, Settings()).expire(silent_s=silent_s, keep=0)

    with running(settings_of(tmp_path, worker=False)) as http:
        monkeypatch.setattr(time, "time", lambda: now() + ahead_s[0])
        http.register(job_of("silent"))
        http.register(job_of("heard"))
        http.send("heard", batch_of(0))
        monkeypatch.setattr(time, "time", lambda: now() + ahead_s[1])
        assert asyncio.run(expired(1_000.0)) == []
        assert asyncio.run(expired(-1_000.0)) == ["silent", "heard"]


def test_a_full_backlog_refuses_telemetry_but_not_failures(tmp_path):
    with running(settings_of(tmp_path, max_backlog=5, worker=False)) as http:
        http.register(job_of("a"))
        for step in range(5):
            assert http.send("a", batch_of(step)).status == 202
        refused = http.send("a", batch_of(5))
        assert problem_of(refused, 429)["type"].endswith("backlog-full")
        assert refused.headers["retry-after"] == "1"
        assert http("POST", "/v1/jobs/a/failures", {"ranks": [1]}).status == 202
        assert 'resihp_refused_total{job="a"} 1.0' in http("GET", "/metrics").data.decode()


def test_a_backlog_is_limited_in_bytes_too(tmp_path):
    with running(settings_of(tmp_path, max_backlog_bytes=5_000, worker=False)) as http:
        http.register(job_of("a"))
        statuses = [http.send("a", batch_of(step)).status for step in range(4)]
        assert statuses[0] == 202
        assert statuses[-1] == 429


def test_a_token_is_wanted_where_one_is_set(tmp_path):
    with running(settings_of(tmp_path, token="secret")) as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = http("GET", "/v1/jobs", headers=headers)
            problem_of(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} secret"}
            assert http("GET", "/v1/jobs", headers=headers).status == 200
        for path in ("/", "/healthz", "/docs", "/openapi.json", "/assets/swagger/swagger-ui.css"):
            assert http("GET", path).status == 200


def test_white_space_around_a_token_is_left_out_on_both_sides(tmp_path):
    with running(settings_of(tmp_path, token="secret\n")) as http:
        Client(http.url, "secret\n").register(job_of("j"))
    with pytest.raises(ValidationError, match="must not be empty"):
        Settings(token=" \n")


@pytest.mark.parametrize("token", ["schlüssel", "two\nlines"])
def test_a_token_that_no_client_can_send_is_refused(token):
    with pytest.raises(ValidationError, match="printable ASCII") as refused:
        Settings(token=token)
    assert token not in str(refused.value.errors()[0]["msg"])


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pa/ss@db", "redis://:***@db"),
        ("redis://me:pa?s#s@w/or:d@db:6379/0", "redis://me:***@db:6379/0"),
        ("rediss://us/er:secret@db", "rediss://us/er:***@db"),
        ("me:sec/ret@db:6379", "me:***@db:6379"),
        ("redis://db:6379/0?password=p@ss/w&db=1", "redis://db:6379/0?password=***&db=1"),
        ("redis://db:6379/0", "redis://db:6379/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_no_part_of_a_password_is_shown(url, shown):
    assert without_password(url) == shown
    if "pa/ss" in url:
        with pytest.raises(StartError) as refused:
            check_redis(url)
        assert "%2F" in str(refused.value)
        assert "pa" not in str(refused.value).replace("password", "")


def test_a_ready_file_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path):
    taken = tmp_path / "ready"
    taken.mkdir()
    with pytest.raises(StartError, match=r"cannot write .*ready"):
        write_ready_file(taken, "http://127.0.0.1:8700")
    assert list(tmp_path.iterdir()) == [taken]


def test_without_a_token_only_local_names_are_served(tmp_path):
    with running(settings_of(tmp_path)) as http:
        problem_of(http("GET", "/v1/jobs", headers={"Host": "evil.example"}), 421)
        assert http("GET", "/v1/jobs", headers={"Host": "localhost:8700"}).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_a_public_address_needs_a_token(host):
    with pytest.raises(ValidationError, match="bearer token"):
        Settings(host=host, token=None)
    assert Settings(host=host, token="secret").host == host


def test_the_environment_sets_and_options_override(monkeypatch):
    monkeypatch.setenv("RESIHP_PORT", "9001")
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
    monkeypatch.setenv("RESIHP_MAX_JOBS", "3")
    settings = Settings(port=9002)
    assert (settings.port, settings.max_jobs) == (9002, 3)
    assert settings.redis_url == "redis://elsewhere"


def test_the_address_of_a_kubernetes_service_is_no_port(monkeypatch):
    monkeypatch.setenv("RESIHP_PORT", "tcp://10.0.0.7:9000")
    assert Settings().port == 8700
    assert Settings(port=9001).port == 9001


def test_variables_that_nothing_reads_are_named_at_the_start(monkeypatch, capfd):
    given = {"MAX_BACKLOG_BYTE": "9", "FOO": "1", "MAX_JOBS": "3", "URL": "http://127.0.0.1:8700"}
    given |= {"SIDECAR_SERVICE_HOST": "10.0.0.7", "SIDECAR_PORT": "tcp://10.0.0.7:8700"}
    for name in [name for name in os.environ if name.startswith("RESIHP_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(f"RESIHP_{name}", value)
    root, web = logging.getLogger(), logging.getLogger("uvicorn.error")
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    for log in (root, web):
        monkeypatch.setattr(log, "level", log.level)
    monkeypatch.setattr(web, "filters", list(web.filters))

    def said() -> list[str]:
        """Lines on variables; the sidecar of other tests may log to the same place meanwhile."""
        settings_from()
        return [line for line in capfd.readouterr().err.splitlines() if "variables" in line]

    (line,) = said()
    assert "'RESIHP_FOO, RESIHP_MAX_BACKLOG_BYTE (RESIHP_MAX_BACKLOG_BYTES?)'" in line
    monkeypatch.delenv("RESIHP_FOO")
    monkeypatch.delenv("RESIHP_MAX_BACKLOG_BYTE")
    assert said() == []


def test_every_variable_that_our_code_reads_is_known():
    root = Path(__file__).parents[2]
    folders = ("resihp", "benchmarks", "docs", "notebooks")
    named = {
        name
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.suffix in {".py", ".md", ".ipynb"}
        for name in re.findall(r"\bRESIHP_[A-Z_]*[A-Z]\b", path.read_text())
    }
    assert "RESIHP_URL" in named
    assert unknown_variables(dict.fromkeys(named, "")) == {}


def test_two_jobs_do_not_mix(tmp_path):
    with running(settings_of(tmp_path)) as http:
        for name in ("a", "b:messages"):
            http.register(job_of(name))
        http.send("a", batch_of(0, slow=(1,)))
        http.send("b:messages", batch_of(0, slow=(2,)))
        http.send("b:messages", batch_of(1, slow=(2,)))
        eventually(lambda: http.records("a") == 32 and http.records("b:messages") == 64)
        assert http.statuses("a")[2] == "healthy"
        assert http.statuses("b:messages")[2] == "fail_slow"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "set a bearer token"),
        (["--redis", "redis://127.0.0.1:1"], "cannot reach Redis"),
        (["--redis", "db:6379"], "not a Redis URL: db:6379"),
        (["--port", "70000"], "port"),
        (["--redis", "redis://:pa/ss@db"], "not a Redis URL: redis://:***@db"),
        (["--token", "schlüssel"], "printable ASCII"),
        ([], "not a Redis URL: of-resihp"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, monkeypatch, arguments, words):
    monkeypatch.setenv("RESIHP_REDIS_URL", "of-resihp")  # before that of another program
    monkeypatch.setenv("REDIS_URL", "of-another-program")
    command = ["-m", "resihp.cli", "serve", "--data", str(tmp_path), *arguments]
    with (tmp_path / "said").open("w+") as said:
        process = ForkedProcess(run_python, command, out=said.fileno(), err=said.fileno())
        assert process.wait(300) == 2
        said.seek(0)
        (line,) = said.read().splitlines()
    assert words in line
    assert "Traceback" not in line
    assert line.startswith("resihp: ")


def test_thresholds_of_the_detector_are_settings(monkeypatch):
    monkeypatch.setenv("RESIHP_MIN_SLOWDOWN", "1.2")
    monkeypatch.setenv("RESIHP_FALSE_ALARM_STEPS", "9000")
    detector = load_adapters(Settings()).detector(job_of(), None)
    assert isinstance(detector, Detector)
    assert (detector.settings.min_slowdown, detector.settings.false_alarm_steps) == (1.2, 9000)
    assert detector.settings.confirm_steps == DetectorSettings().confirm_steps


def test_each_setting_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
    documented = {name.removeprefix("RESIHP_").lower() for name in re.findall(r"`([A-Z_]+)`", page)}
    assert set(Settings.model_fields) - {"redis_url"} <= documented
    assert "redis_url" in documented


def test_documented_thresholds_are_the_detectors_defaults():
    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
    defaults = DetectorSettings()
    for name, value in {
        "MIN_SLOWDOWN": defaults.min_slowdown,
        "FALSE_ALARM_STEPS": defaults.false_alarm_steps,
        "CONFIRM_STEPS": defaults.confirm_steps,
        "RECOVER_STEPS": defaults.recover_steps,
        "PROBES_PER_MINUTE": defaults.probes_per_minute,
        "PROBATION_PROBE_S": defaults.probation_probe_s,
    }.items():
        assert f"| `RESIHP_{name}` | {value:,g} |" in page, name
