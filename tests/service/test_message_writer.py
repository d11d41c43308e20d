"""Messages that are written together: each once and answered by itself, whatever Redis does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio

from resihp.contracts import Plan
from service import Settings
from service.errors import UnknownJobError
from service.store.documents import MessageKind
from service.store.embedded_redis import EmbeddedRedis
from service.store.http_store import HttpStore
from tests.service.conftest import job_of


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path)
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def store_of(server: EmbeddedRedis) -> AsyncIterator[tuple[HttpStore, redis.asyncio.Redis]]:
    client = redis.asyncio.Redis.from_url(server.url, protocol=2)
    store = HttpStore(client, Settings(redis_url=server.url))
    job = job_of()
    plan = Plan(version=0, layout=job.layout, quotas=job.quotas)
    await store.register(job, plan)
    try:
        yield store, client
    finally:
        await client.aclose()


def put(store: HttpStore, number: int, job: str = "j", size: int = 10):
    key = f"key-{number}"
    return store.put(job, MessageKind.TELEMETRY, bytes(size), retry_key=key, status="probes")


def test_each_of_many_messages_is_written_once_and_has_its_own_answer(server: EmbeddedRedis):
    async def scenario() -> None:
        async with store_of(server) as (store, client):
            for _ in range(2):  # Redis does not know the script at first, and after a flush
                writes = [put(store, number) for number in range(100)]
                answers = await asyncio.gather(
                    *writes, put(store, 0, "unknown"), return_exceptions=True
                )
                assert isinstance(answers.pop(), UnknownJobError)
                (counts,) = await store.counts("j")
                assert counts["backlog"] == 100
                await client.script_flush()
            assert [answer.is_new for answer in answers] == [False] * 100

    asyncio.run(scenario())


def test_large_messages_go_one_after_the_other(server: EmbeddedRedis):
    async def scenario() -> None:
        async with store_of(server) as (store, _):
            answers = await asyncio.gather(*(put(store, n, size=6 << 20) for n in range(5)))
            assert [answer.is_new for answer in answers] == [True] * 5

    asyncio.run(scenario())


def test_all_that_wait_learn_that_redis_is_gone(server: EmbeddedRedis):
    async def scenario() -> None:
        async with store_of(server) as (store, _):
            server.stop()
            writes = [put(store, number) for number in range(10)]
            answers = await asyncio.gather(*writes, return_exceptions=True)
            assert all(isinstance(answer, redis.RedisError) for answer in answers)

    asyncio.run(scenario())
