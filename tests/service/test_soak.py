"""Long campaigns on the service: processes die at random, and thousands of requests wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import urllib3
from test_recovery import start_worker

from resihp.contracts import TelemetryBatch
from service import Sidecar
from tests.service.conftest import (
    FAKES,
    Http,
    batch_of,
    children,
    eventually,
    job_of,
    redis_pids,
    stored_steps,
)

pytestmark = pytest.mark.soak

JOBS, APIS, MORE_WORKERS = 20, 3, 2
KILLS, KILL_EVERY_S, STEP_S = 12, 5.0, 0.5
SOME_STEPS = 60
WATCHERS = 2_048
BETWEEN_S = 0.05  # messages, of which a hundredth has an answer later than p99
PATIENCE_S = 600.0


@dataclass
class History:
    """What one job has sent: its steps were all accepted in the end, in order.

    slow      rank that is slow from step `since` on
    slow_at   Unix time at which the first of its slow records were sent
    answers   number of answers by status; 0: none
    """

    job: str
    slow: int
    since: int
    steps: int = 0
    slow_at: float = 0.0
    answers: Counter[int] = field(default_factory=Counter)

    def batch(self, step: int) -> TelemetryBatch:
        """Records whose sum of tokens tells which steps were applied."""
        plain = batch_of(step, slow=(self.slow,) if step >= self.since else ())
        columns = plain.columns() | {"tokens": np.full(len(plain), tokens(step))}
        return TelemetryBatch(**columns)

    def send(self, url: str, stop: threading.Event) -> None:
        """Send a step after the other, each until it is accepted, until `stop`."""
        http = Http(url)
        while not stop.is_set() or self.steps <= max(SOME_STEPS, self.since):
            if self.steps == self.since:
                self.slow_at = time.time()
            eventually(lambda: self._is_accepted(http), timeout_s=PATIENCE_S)
            self.steps += 1
            stop.wait(STEP_S)
        http.close()

    def _is_accepted(self, http: Http) -> bool:
        status = 0
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            batch, key = self.batch(self.steps), f"{self.job}-{self.steps}"
            status = http.send(self.job, batch, **{"Idempotency-Key": key}).status
        self.answers[status] += 1
        assert status in {0, 202, 429, 503}
        return status == 202


def tokens(step: int) -> int:
    return 1_000 + step * step


class Killer:
    """Kills a random process of API or workers at a time, and Redis once."""

    def __init__(self, sidecar: Sidecar, seed: int) -> None:
        self.sidecar, self.random = sidecar, random.Random(seed)
        self.workers = [start_worker(sidecar.data) for _ in range(MORE_WORKERS)]
        self.killed: Counter[str] = Counter()

    def run(self) -> None:
        redis_at = self.random.randrange(KILLS // 4, 3 * KILLS // 4)
        for number in range(KILLS):
            time.sleep(KILL_EVERY_S)
            if number == redis_at:
                for pid in redis_pids(self.sidecar.data):
                    self._kill("redis", pid)
            self._kill_one()

    def _kill_one(self) -> None:
        own = sorted(children(self.sidecar.pid).items())
        others = [(f"worker {number}", each.pid) for number, each in enumerate(self.workers)]
        name, pid = self.random.choice([*own, *others])
        self._kill(name, pid)
        for number, worker in enumerate(self.workers):
            if worker.pid == pid:
                worker.wait(PATIENCE_S)
                self.workers[number] = start_worker(self.sidecar.data)

    def _kill(self, name: str, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has died by itself
            os.kill(pid, signal.SIGKILL)
            self.killed[name] += 1

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait(PATIENCE_S)


@contextlib.contextmanager
def started(folder: Path, seed: int) -> Iterator[tuple[Sidecar, Killer]]:
    options = ("--processes", str(APIS))
    with Sidecar(folder, command=FAKES, options=options) as sidecar:
        killer = Killer(sidecar, seed)
        try:
            yield sidecar, killer
        finally:
            killer.close()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_twice_or_wrong_while_processes_die(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
):
    rng = random.Random(seed)
    histories = [
        History(f"j{number}", slow=rng.randrange(8), since=rng.randrange(10, SOME_STEPS))
        for number in range(JOBS)
    ]
    with started(tmp_path, seed) as (sidecar, killer):
        http = Http(sidecar.url)
        for history in histories:
            http.register(job_of(history.job))
        stop = threading.Event()
        senders = [
            threading.Thread(target=history.send, args=(sidecar.url, stop)) for history in histories
        ]
        for sender in senders:
            sender.start()
        try:
            killer.run()
        finally:
            stop.set()
            for sender in senders:
                sender.join()
        delays_s = [check(http, sidecar.data, history) for history in histories]
        http.close()
    answers = sum((history.answers for history in histories), Counter())
    with capsys.disabled():
        print(  # noqa: T201 what a person looks at after a soak
            f"\nseed {seed}: {sum(history.steps for history in histories)} messages applied once; "
            f"answers {dict(answers)}; killed {dict(killer.killed)}; slow ranks named after "
            f"{statistics.median(delays_s):.1f} s at p50, {max(delays_s):.1f} s at most"
        )


def check(http: Http, data: Path, history: History) -> float:
    """Compare what the service made of a job with its history; the delay of its verdict in s."""
    path = f"/v1/jobs/{history.job}"
    eventually(lambda: http.get(path)["backlog"] == 0, timeout_s=PATIENCE_S)
    verdicts = http.get(f"{path}/verdicts")["verdicts"]
    total = 32 * sum(map(tokens, range(history.steps)))
    evidence = [f"records={32 * history.steps}", f"checksum={total % (1 << 40)}"]
    assert verdicts[0]["evidence"] == evidence, history
    slow = {verdict["rank"] for verdict in verdicts if verdict["status"] != "healthy"}
    assert slow == {history.slow}
    summaries = http.get(f"{path}/steps?limit=10000")["steps"]
    assert [summary["step"] for summary in summaries] == list(range(history.steps - 1))
    assert stored_steps(data, history.job) == list(range(history.steps - 1))
    found = [event for event in events_of(http, path) if event["kind"] == "verdict"]
    named = [event for event in found if event["verdict"]["status"] == "fail_slow"]
    assert [(event["verdict"]["rank"], event["verdict"]["step"]) for event in named] == [
        (history.slow, history.since)
    ]
    assert len(found) == 9  # each rank healthy at first, and the slow one
    return float(named[0]["at"]) - history.slow_at


def events_of(http: Http, path: str) -> list[dict[str, Any]]:
    """The kept events of a job, up to the plan that follows the verdict on the slow rank."""
    answer = http("GET", f"{path}/events?replay=true", preload_content=False, timeout=60.0)
    events, rest = [], b""
    while not any(event["kind"] == "plan" for event in events):
        *lines, rest = (rest + answer.read1()).split(b"\n")
        events += [json.loads(line[5:]) for line in lines if line.startswith(b"data:")]
    answer.close()
    return events


class Watchers:
    """Event streams and long polls, which ask again when they are answered.

    waiting  streams that have begun, and polls
    """

    def __init__(self, url: str) -> None:
        self.address = urlsplit(url)
        self.statuses: Counter[bytes] = Counter()
        self.waiting = 0

    async def stream(self, plans: int) -> None:
        """Follow the events until so many plans are published."""
        reader, writer = await self._connect()
        await self._ask(reader, writer, "/v1/jobs/j/events")
        self.waiting += 1
        seen = 0
        while seen < plans:
            line = await asyncio.wait_for(reader.readline(), PATIENCE_S)
            assert line, "the stream has ended"
            seen += line == b"event: plan\n"
        writer.close()

    async def poll(self, plans: int) -> None:
        """Wait for one plan after the other."""
        reader, writer = await self._connect()
        self.waiting += 1
        version = 0
        while version < plans:
            path = f"/v1/jobs/j/plan?after={version}&wait=60"
            length = await self._ask(reader, writer, path)
            if length:
                version = json.loads(await reader.readexactly(length))["version"]
        writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.address.hostname, self.address.port)

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str
    ) -> int:
        """Ask, and return the length of the answer."""
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {self.address.netloc}\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        self.statuses[head.split(b" ")[1]] += 1
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        return int(fields.get(b"content-length", 0))


async def watch_and_send(http: Http, statuses: Counter[int], delays_s: list[float]) -> Watchers:
    watchers, stop = Watchers(http.url), threading.Event()

    def send() -> None:
        for step in range(100_000):
            if stop.is_set():
                return
            begun_s = time.monotonic()
            statuses[http.send("j", batch_of(step)).status] += 1
            delays_s.append(time.monotonic() - begun_s)
            stop.wait(BETWEEN_S)

    sending = asyncio.create_task(asyncio.to_thread(send))
    try:
        waits = [
            asyncio.create_task(watch(2))
            for watch in (watchers.stream, watchers.poll)
            for _ in range(WATCHERS // 2)
        ]
        while watchers.waiting < WATCHERS:
            await asyncio.sleep(0.1)
        for rank in (7, 2):
            await asyncio.sleep(5.0)  # all of them wait while telemetry flows
            failure = await asyncio.to_thread(
                http, "POST", "/v1/jobs/j/failures", {"ranks": [rank]}
            )
            assert failure.status == 202
        await asyncio.wait_for(asyncio.gather(*waits), PATIENCE_S)
    finally:
        stop.set()
        await sending
    return watchers


def test_as_many_watchers_as_promised_are_told_of_plans_while_telemetry_flows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * WATCHERS, limits[1]), limits[1]))
    statuses, delays_s = Counter[int](), list[float]()
    try:
        with Sidecar(tmp_path, command=FAKES) as sidecar:
            http = Http(sidecar.url)
            http.register(job_of())
            watchers = asyncio.run(watch_and_send(http, statuses, delays_s))
            http.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert set(statuses) == {202}
    assert set(watchers.statuses) <= {b"200", b"204"}
    p99_s = sorted(delays_s)[len(delays_s) * 99 // 100]
    with capsys.disabled():
        print(  # noqa: T201 what a person looks at after a soak
            f"\n{WATCHERS} watchers: {dict(watchers.statuses)}; {statuses[202]} messages, "
            f"{statistics.median(delays_s) * 1e3:.0f} ms at p50 and {p99_s * 1e3:.0f} ms at p99"
        )
