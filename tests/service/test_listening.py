"""Ranks whose service is slow, hangs or is gone live; those that die are found all the same."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import redis
from fakes import HEARTBEAT_TIMEOUT_S
from hypothesis import given
from hypothesis import strategies as st

from resihp.client import Client
from resihp.contracts import ServiceError
from service import Settings, Sidecar
from service.api import delay
from service.api.delay import DelayReporter, WaitingRequests
from service.store.embedded_redis import EmbeddedRedis, socket_path
from service.store.schema import APIS
from service.store.worker_store import WorkerStore
from service.worker.listening import PATIENCE_S, ListeningClock
from tests.service.conftest import (
    FAKES,
    Http,
    batch_of,
    children,
    eventually,
    job_of,
    redis_pids,
    running,
)
from tests.service.forked_sidecar import ForkedSidecar

TICK_S, EVERY_S = 0.25, 1.0
BEAT_S = 0.2

# Delays that a service may show: for so many ticks, the delay of what it is sent.
DELAYS = st.lists(st.tuples(st.integers(1, 60), st.floats(0, 0.8 * PATIENCE_S)), max_size=20)


class SlowService:
    """Applies what one rank sends every `EVERY_S`, in order, after the delay of that time."""

    def __init__(self) -> None:
        self.clock = ListeningClock()
        self.now_s = self.sent_s = self.beat_s = 0.0
        self.waiting: list[tuple[float, float]] = []
        self.applied_s: float | None = None

    def tick(self, delay_s: float, *, lives: bool = True) -> float:
        """Let time pass; the silence of the rank as the service sees it."""
        self.now_s += TICK_S
        if lives and self.now_s - self.sent_s >= EVERY_S:
            self.sent_s = self.now_s
            last_s = self.waiting[-1][1] if self.waiting else 0.0
            self.waiting.append((self.now_s, max(last_s, self.now_s + delay_s)))
        while self.waiting and self.waiting[0][1] <= self.now_s:
            del self.waiting[0]
            self.applied_s = self.clock.latest_s
        oldest_s = self.waiting[0][0] if self.waiting else self.now_s
        self.clock.advance(TICK_S, max(self.now_s - oldest_s, 0.0))
        return 0.0 if self.applied_s is None else self.clock.heard_s - self.applied_s


@given(DELAYS)
def test_whatever_the_delay_does_no_silence_is_longer_than_that_of_the_rank(delays):
    service = SlowService()
    for ticks, delay_s in delays:
        for _ in range(ticks):
            assert service.tick(delay_s) <= EVERY_S + 2 * TICK_S


@given(DELAYS, st.floats(0, 0.8 * PATIENCE_S), st.floats(1.0, 60.0))
def test_a_death_is_found_within_the_time_out_and_the_delays(delays, delay_s, time_out_s):
    service = SlowService()
    for ticks, before_s in [(8, 0.0), *delays]:
        for _ in range(ticks):
            service.tick(before_s)
    died_s = service.now_s
    while service.tick(delay_s, lives=False) <= time_out_s:
        assert service.now_s - died_s < time_out_s + 2 * PATIENCE_S + 2 * TICK_S


class BeatingJob:
    """A job of eight ranks; each sends heartbeats with a client of its own until it is stopped."""

    def __init__(self, http: Http, name: str) -> None:
        http.register(job_of(name))
        self.http, self.name = http, name
        self.held_up_s = 0.0  # longest time for which this machine kept a thread from a core
        self.stops = [threading.Event() for _ in range(8)]
        self.threads = [threading.Thread(target=self._beat, args=(rank,)) for rank in range(8)]

    def __enter__(self) -> BeatingJob:
        for thread in self.threads:
            thread.start()
        self.wait_until_heard()
        return self

    def __exit__(self, *error: object) -> None:
        for stop in self.stops:
            stop.set()
        for thread in self.threads:
            thread.join(30)

    def _beat(self, rank: int) -> None:
        client, waits_s = Client(self.http.url), time.monotonic()
        while not self.stops[rank].wait(BEAT_S):
            self.held_up_s = max(self.held_up_s, time.monotonic() - waits_s - BEAT_S)
            with contextlib.suppress(ServiceError):
                client.heartbeat(self.name, ranks=[rank])
            waits_s = time.monotonic()

    def wait_until_heard(self, messages: int = 5) -> None:
        """Wait until the worker has applied more messages, and so knows all ranks."""
        before = self._applied()
        eventually(lambda: self._applied() >= before + messages)

    def _applied(self) -> int:
        mark = f'resihp_applied_messages_total{{job="{self.name}"}} '
        return int(float(self._metrics().partition(mark)[2].split("\n")[0]))

    def _metrics(self) -> str:
        return self.http("GET", "/metrics").data.decode()

    def assert_only_a_silent_rank_dies(self) -> None:
        """All ranks live, and one that falls silent is found.

        On a machine that held this test up for long, others were silent too.
        """
        self.wait_until_heard(20)
        before = self.stopped()
        self.stops[3].set()
        try:
            eventually(lambda: 3 in self.stopped())
        except AssertionError:  # the service may not have listened
            delay = re.findall(r"^resihp_api_delay.*$", self._metrics(), re.M)
            raise AssertionError(self.http.get("/healthz"), delay) from None
        after = self.stopped()
        if self.held_up_s < HEARTBEAT_TIMEOUT_S / 2:
            assert (before, after) == (set(), {3})

    def stopped(self) -> set[int]:
        """Ranks that are held for dead; connections may have ended with their process."""
        answer = self.http("GET", f"/v1/jobs/{self.name}/verdicts", retries=5).json()
        return {v["rank"] for v in answer["verdicts"] if v["status"] == "fail_stop"}


@contextlib.contextmanager
def standing_still(sidecar: Sidecar, *names: str) -> Iterator[None]:
    """Processes of a sidecar that do nothing meanwhile."""
    processes = {**children(sidecar.pid), "resihp-redis": redis_pids(sidecar.data)[0]}
    pids = [processes[f"resihp-{name}"] for name in names]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def two_apis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESIHP_SLOW_DOWN_BUSY", "2")  # what is told is due to delay alone
        patch.setenv("RESIHP_SLOW_DOWN_LAG_S", "1000")
        with ForkedSidecar(folder, command=(*FAKES, "--processes", "2")) as sidecar:
            with redis.Redis(unix_socket_path=str(socket_path(folder)), protocol=2) as raw:
                eventually(lambda: raw.hlen(APIS) == 2)  # one that never reported has no delay
            yield sidecar


STILL = [("api-0",), ("api-0", "api-1"), ("worker",), ("redis",)]


@pytest.mark.parametrize("names", STILL, ids="-".join)
def test_no_rank_dies_while_processes_stand_still(two_apis: Sidecar, names: tuple[str, ...]):
    with BeatingJob(Http(two_apis.url), "-".join(names)) as job:
        with standing_still(two_apis, *names):
            time.sleep(2 * HEARTBEAT_TIMEOUT_S)
        job.assert_only_a_silent_rank_dies()


def test_senders_are_told_of_the_delay_of_the_slowest_process(two_apis: Sidecar):
    http = Http(two_apis.url)
    http.register(job_of("told"))
    with standing_still(two_apis, "api-0"):
        http = Http(two_apis.url)  # whose connections the other process accepts
        step = count()
        assert eventually(lambda: told_s(http, next(step))) >= 1
        assert http.get("/healthz")["lag_s"] >= 1
        assert http.get("/v1/jobs/told")["lag_s"] >= 1
        (line,) = re.findall(
            r"^resihp_api_delay_seconds (.*)$", http("GET", "/metrics").data.decode(), re.M
        )
        assert float(line) >= 1
    eventually(lambda: told_s(http, next(step)) is None)


def told_s(http: Http, step: int) -> float | None:
    """The interval asked for in an answer."""
    answer = http.send("told", batch_of(step), retries=5)
    assert answer.status == 202, answer.data
    return answer.json().get("interval_s")


class Reports:
    """Store of the delays that a process reports."""

    def __init__(self) -> None:
        self.delays_s: list[float] = []

    async def report_delay(self, process: str, delay_s: float) -> None:
        self.delays_s.append(delay_s)


async def wait_for(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not check():
            await asyncio.sleep(0.01)


def test_the_delay_is_the_age_of_the_oldest_request_wherever_it_waits(
    monkeypatch: pytest.MonkeyPatch,
):
    async def scenario() -> None:
        reports, requests, serves = Reports(), WaitingRequests(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serves.wait()
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        reporter = asyncio.create_task(DelayReporter(reports, "me", requests, address).run())
        found = reports.delays_s
        try:
            await asyncio.sleep(1.0)
            assert not found  # nothing has reached the server yet
            serves.set()
            await wait_for(lambda: found[-1:] == [0.0])
            serves.clear()
            await wait_for(lambda: found[-1] > 1.0)
            serves.set()
            await wait_for(lambda: found[-1] < 0.1)
            requests.add("slow")
            await wait_for(lambda: found[-1] > 1.0)
            requests.remove("slow")
            await wait_for(lambda: found[-1] < 0.1)
            monkeypatch.setattr(delay, "_FAILURE_S", 60.0)
            requests.fail()
            await wait_for(lambda: found[-1] >= PATIENCE_S)
            monkeypatch.undo()
            await wait_for(lambda: found[-1] < 0.1)
        finally:
            reporter.cancel()
            server.close()

    asyncio.run(scenario())


def test_a_process_that_could_not_be_reached_for_long_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
):
    """However many probes have failed."""
    monkeypatch.setattr(delay, "REPORT_EVERY_S", 0.01)
    failures: list[None] = []
    connect = asyncio.open_connection

    async def refuse(*address: object) -> None:
        failures.append(None)
        raise OSError(errno.EMFILE, "Too many open files")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async def scenario() -> None:
        reports, requests = Reports(), WaitingRequests()
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        reporter = DelayReporter(reports, "me", requests, server.sockets[0].getsockname())
        task, found = asyncio.create_task(reporter.run()), reports.delays_s
        try:
            await wait_for(lambda: bool(found))
            monkeypatch.setattr(asyncio, "open_connection", refuse)
            await wait_for(lambda: len(failures) > 200)
            assert found[-1] > 0.5
            assert len(reporter._probes) <= 2
            monkeypatch.setattr(asyncio, "open_connection", connect)
            await wait_for(lambda: found[-1] < 0.5)
        finally:
            task.cancel()
            server.close()

    asyncio.run(scenario())


def test_the_slowest_process_counts_until_it_is_long_gone(tmp_path: Path):
    server = EmbeddedRedis(tmp_path)
    server.start()
    store = WorkerStore(server.url, "w", keep_events=9, keep_steps=9)
    try:
        assert store.api_delay_s() == math.inf
        with (
            running(Settings(redis_url=server.url, data=tmp_path, worker=False)),
            redis.Redis.from_url(server.url, protocol=2) as raw,
        ):
            eventually(lambda: store.api_delay_s() < 5)

            def hang(seconds: int) -> None:
                since_ms = 1_000 * (raw.time()[0] - seconds)
                raw.hset(APIS, "hung", f"{since_ms} {since_ms}")

            hang(20)
            assert store.api_delay_s() >= 20
            hang(40)
            assert store.api_delay_s() < 20
            eventually(lambda: raw.hlen(APIS) == 1)
        assert store.api_delay_s() == math.inf
    finally:
        store.close()
        server.stop()
