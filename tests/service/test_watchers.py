"""Many requests that wait: none is refused, and they read the store together."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from service import Settings
from service.api.notifier import JobChange, Notifier
from service.store.embedded_redis import socket_path
from service.store.http_store import EventCursor, HttpStore
from service.store.schema import NEWS, PLANS
from tests.service.conftest import Http, batch_of, eventually, job_of, running

POLLS, STREAMS = 150, 150


async def told(url: str, path: str, again: str, needle: bytes) -> None:
    """Read until `needle` comes. Any refusal fails.

    A machine so busy that the sidecar gets Redis's answer too late ends a request: a client asks
    again, at the path `again`.
    """
    while True:
        seen = await asyncio.wait_for(answer(url, path, needle), 280)
        if needle in seen:
            return
        assert seen.startswith(b"HTTP/1.1 200") or b"cannot reach its Redis" in seen, seen
        path = again


async def answer(url: str, path: str, needle: bytes) -> bytes:
    """The answer up to `needle`, or all of it."""
    reader, writer = await asyncio.open_connection(*address_of(url))
    try:
        writer.write(request_of(url, path))
        return await read_until(reader, needle)
    finally:
        writer.close()


def address_of(url: str) -> tuple[str | None, int | None]:
    address = urlsplit(url)
    return address.hostname, address.port


def request_of(url: str, path: str) -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nConnection: close\r\n\r\n"
    ).encode()


async def read_until(reader: asyncio.StreamReader, *needles: bytes) -> bytes:
    """What comes up to one of `needles`, or all of it."""
    seen = b""
    while not any(needle in seen for needle in needles):
        if not (more := await reader.read(65536)):
            break
        seen += more
    return seen


def reads_of_streams(store: redis.Redis) -> int:
    return int(store.info("commandstats").get("cmdstat_xrange", {"calls": 0})["calls"])


async def fail_a_rank_before_watchers(http: Http, store: redis.Redis) -> int:
    """The number of reads that it took to tell all watchers of the new plan."""
    path, watchers = "/v1/jobs/j", http.app.state.context.notifier
    events, plan = f"{path}/events", f"{path}/plan?after=0&wait=60"
    asked = [(events, f"{events}?replay=true", b"event: plan\n")] * STREAMS
    asked += [(plan, plan, b'"version":1')] * POLLS
    requests = [asyncio.create_task(told(http.url, *one)) for one in asked]

    def all_wait() -> bool:  # for the next change, after the first read of each
        counts = {NEWS: STREAMS, PLANS: POLLS}
        return all(len(watchers.next_change(c, "j").waiting) == n for c, n in counts.items())

    await asyncio.to_thread(eventually, all_wait)
    before = reads_of_streams(store)
    for step in range(5):
        assert (await asyncio.to_thread(http.send, "j", batch_of(step))).status == 202
    failure = await asyncio.to_thread(http, "POST", f"{path}/failures", {"ranks": [7]})
    assert failure.status == 202
    await asyncio.gather(*requests)
    return reads_of_streams(store) - before


@pytest.fixture
def few_open_files() -> Iterator[None]:
    """Fewer than the watchers need: the sidecar asks the system for more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (POLLS + STREAMS, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("few_open_files")
def test_hundreds_of_watchers_are_told_by_a_few_reads(tmp_path: Path):
    settings = Settings(redis_url=None, data=tmp_path, commit_every_s=0.05)
    store = redis.Redis(unix_socket_path=str(socket_path(tmp_path)), protocol=2)
    with running(settings) as http, store:
        http.register(job_of())
        assert asyncio.run(fail_a_rank_before_watchers(http, store)) < STREAMS


def test_streams_that_come_together_are_refused_before_they_start(tmp_path: Path, monkeypatch):
    settings = Settings(redis_url=None, data=tmp_path, worker=False, max_watchers=1)
    newest, asked, at_once = HttpStore.newest, [], 4

    async def with_the_others(store: HttpStore, job: str) -> EventCursor:
        asked.append(job)
        while len(asked) < at_once:
            await asyncio.sleep(0.01)
        return await newest(store, job)

    async def heads(url: str) -> list[bytes]:
        path, until = "/v1/jobs/j/events", (b"retry: ", b"too-many-watchers")
        streams = [asyncio.open_connection(*address_of(url)) for _ in range(at_once)]
        opened = await asyncio.gather(*streams)
        for _, writer in opened:
            writer.write(request_of(url, path))
        seen = [await asyncio.wait_for(read_until(reader, *until), 280) for reader, _ in opened]
        for _, writer in opened:
            writer.close()
        return [head.partition(b"\r\n")[0] for head in seen]

    monkeypatch.setattr(HttpStore, "newest", with_the_others)
    with running(settings) as http:
        http.register(job_of())
        first, *refused = sorted(asyncio.run(heads(http.url)))
        assert first.startswith(b"HTTP/1.1 200")
        assert all(head.startswith(b"HTTP/1.1 429") for head in refused)
        eventually(lambda: http.app.state.context.notifier.count == 0)


def test_a_poll_whose_client_has_gone_gives_its_place_back(tmp_path: Path):
    settings = Settings(redis_url=None, data=tmp_path, worker=False, max_watchers=1)
    path = "/v1/jobs/j/plan?after=0&wait=60"

    async def begin(url: str, counted: Callable[[], bool]) -> None:
        _, writer = await asyncio.open_connection(*address_of(url))
        writer.write(request_of(url, path))
        await asyncio.to_thread(eventually, counted)
        writer.close()

    with running(settings) as http:
        http.register(job_of())
        watchers = http.app.state.context.notifier
        begun_s = time.monotonic()
        for _ in range(2):
            asyncio.run(begin(http.url, lambda: watchers.count == 1))
            eventually(lambda: watchers.count == 0)
        assert time.monotonic() - begun_s < 60, "its wait was over"


def test_what_woken_watchers_read_is_read_once_and_anew_after_each_change():
    done = []

    async def work() -> int:
        done.append(await asyncio.sleep(0.01))
        return len(done)

    async def story() -> None:
        change = JobChange()
        assert await asyncio.gather(*(change.read("a", work) for _ in range(9))) == [1] * 9
        assert await change.read("a", work) == 1
        assert await change.read("b", work) == 2
        assert await JobChange().read("a", work) == 3

    asyncio.run(story())


def test_a_failed_read_fails_for_those_who_wait_for_it_and_is_tried_again():
    async def fails() -> int:
        await asyncio.sleep(0.01)
        raise redis.ConnectionError

    async def works() -> int:
        return 1

    async def story() -> None:
        change = JobChange()
        results = await asyncio.gather(
            *(change.read("a", fails) for _ in range(3)), return_exceptions=True
        )
        assert [type(result) for result in results] == [redis.ConnectionError] * 3
        assert await change.read("a", works) == 1

    asyncio.run(story())


@pytest.mark.parametrize("channel", [NEWS, PLANS])
def test_a_change_wakes_each_watcher_of_its_channel_once(channel):
    async def story() -> None:
        notifier = Notifier(max_watchers=99)
        waking = asyncio.create_task(notifier.wake())
        other = {NEWS: PLANS, PLANS: NEWS}[channel]
        waits = [
            asyncio.create_task(notifier.wait(notifier.next_change(channel, "j")))
            for _ in range(40)
        ]
        elsewhere = asyncio.create_task(notifier.wait(notifier.next_change(other, "j")))
        missed = notifier.next_change(channel, "j")
        await asyncio.sleep(0)
        notifier.notify(channel, "j")
        await asyncio.wait_for(asyncio.gather(*waits), 60)
        await asyncio.wait_for(notifier.wait(missed), 60)
        assert not elsewhere.done()
        notifier.close()
        await asyncio.wait_for(elsewhere, 60)
        waking.cancel()

    asyncio.run(story())


def test_nothing_is_kept_of_jobs_that_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Notifier, "RECHECK_S", 1e6)
    with running(Settings(redis_url=None, data=tmp_path, worker=False)) as http:
        for path in ("plan?after=0&wait=1", "events"):
            assert http("GET", f"/v1/jobs/nobody/{path}").status == 404
        assert http.app.state.context.notifier._changes == {}
