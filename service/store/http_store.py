"""Asynchronous access to Redis for the HTTP routes."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from redis import RedisError
from redis.asyncio import Redis

from resihp.contracts import Job, Plan, from_json, to_json

from ..errors import BacklogFullError, TooManyJobsError, UnknownJobError, UnknownPlanError
from ..settings import Settings
from .documents import (
    VERDICTS,
    MessageKind,
    dumps,
    plan_json,
    stream_order,
    verdict_texts,
)
from .faults import store_fault
from .message_writer import MessageWriter
from .schema import (
    APIS,
    DELETE,
    GENERATIONS,
    GROUP,
    JOBS,
    LAGS,
    LOADS,
    NEWS,
    PLANS,
    REGISTER,
    REPORT_DELAY,
    URGENT,
    Subject,
    edition,
    keys_of,
)

_REMEMBER_S = 600  # time for which a retried message is recognised
_PAGE, _PAGE_BYTES = 100, 1 << 20  # events read at a time: at most, and size that ends a page
_BEGIN = "0-0"


class EventCursor(NamedTuple):
    """A place in the events of a job: stream ids of the newest event and step summary known."""

    event: str = _BEGIN
    step: str = _BEGIN


class StoredMessage(NamedTuple):
    """Outcome of a message: whether it was new, and the status document asked for, if any."""

    is_new: bool
    status: bytes | None


class HttpStore:
    """Reads and writes of the routes. Raises the errors of `service.errors`."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        # redis-py types each answer as a union over its two clients; the methods below are typed.
        self._redis: Any = redis
        self._settings = settings
        self._writer = MessageWriter(redis)
        self._register = self._redis.register_script(REGISTER)
        self._delete = self._redis.register_script(DELETE)
        self._lags = self._redis.register_script(LAGS)
        self._report_delay = self._redis.register_script(REPORT_DELAY)

    async def ping(self) -> None:
        """Check that Redis answers. Raises `redis.RedisError`."""
        await self._redis.ping()

    async def register(self, job: Job, plan: Plan) -> bool:
        """Register a job; False if it was registered before with equal content.

        Other content under the same name resets the job. Raises `TooManyJobsError`.
        """
        keys = keys_of(job.name)
        history = keys.histories[Subject.of("registered")]
        answer = await self._register(
            keys=[
                JOBS, GENERATIONS, keys.meta, keys.messages, keys.plans, history, *keys.owned(),
            ],
            args=[
                job.name, dumps(to_json(job)), dumps(plan_json(plan)), self._settings.max_jobs,
                GROUP, dumps({"job": job.name}),
            ],
        )  # fmt: skip
        if answer == -1:
            raise TooManyJobsError(self._settings.max_jobs)
        await self._announce(job.name)
        return bool(answer)

    async def delete(self, name: str) -> None:
        """Remove a job with all its data. Raises `UnknownJobError`."""
        if not await self._delete(keys=[JOBS, *keys_of(name).owned()], args=[name]):
            raise UnknownJobError(name)
        await self._announce(name)

    async def expire(self, *, silent_s: float, keep: int) -> list[str]:
        """Delete jobs without a message for `silent_s` by the clock of Redis, except the `keep`
        newest; their names."""
        heard_s = {name: await self._heard_s(name) for name in await self.names()}
        oldest_first = sorted(heard_s, key=heard_s.__getitem__)
        now_s, _ = await self._redis.time()
        before_s = now_s - silent_s
        candidates = oldest_first[: max(len(heard_s) - keep, 0)]
        expired = [name for name in candidates if heard_s[name] < before_s]
        for name in expired:
            with contextlib.suppress(UnknownJobError):  # deleted meanwhile
                await self.delete(name)
        return expired

    async def _heard_s(self, name: str) -> float:
        """Unix time of a job's registration or of its last message, in seconds; infinite for one
        that is gone or whose keys hold something else."""
        keys = keys_of(name)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(keys.meta, "registered_at").xinfo_stream(keys.messages)
            registered, stream = await _answers(pipe)
        if registered is None or stream is None:
            return math.inf
        return max(float(registered), stream_order(stream["last-generated-id"].decode())[0] / 1e3)

    async def _announce(self, name: str) -> None:
        for channel in (NEWS, PLANS):
            await self._redis.publish(channel, name)

    async def names(self) -> list[str]:
        """Names of all jobs, sorted."""
        return sorted(name.decode() for name in await self._redis.smembers(JOBS))

    async def job(self, name: str) -> Job:
        """The registered job. Raises `UnknownJobError`."""
        return from_json(Job, json.loads(await self.description(name)))

    async def description(self, name: str) -> bytes:
        """The registered job as JSON. Raises `UnknownJobError`."""
        document: bytes | None = await self._redis.hget(keys_of(name).meta, "job")
        if document is None:
            raise UnknownJobError(name)
        return document

    async def require(self, name: str) -> int:
        """Version of the newest plan of a job. Raises `UnknownJobError`."""
        version = await self._redis.hget(keys_of(name).meta, "plan")
        if version is None:
            raise UnknownJobError(name)
        return int(version)

    async def newest_plan(self, name: str, *, after: int = -1) -> bytes | None:
        """The newest plan as the JSON that is stored; None if its version is not above `after`.

        Raises `UnknownJobError`.
        """
        version = await self.require(name)
        if version <= after:
            return None
        document: bytes | None = await self._redis.hget(keys_of(name).plans, str(version))
        if document is None:  # deleted meanwhile
            raise UnknownJobError(name)
        return document

    async def plan(self, name: str, version: int) -> bytes:
        """A plan as JSON, with its gap. Raises `UnknownPlanError`."""
        document: bytes | None = await self._redis.hget(keys_of(name).plans, str(version))
        if document is None:
            raise UnknownPlanError(name, version)
        return document

    async def digest(self, name: str, version: int) -> str | None:
        """Digest of a plan; None for plan 0. Raises `UnknownPlanError`."""
        keys = keys_of(name)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hexists(keys.plans, str(version)).hget(keys.digests, str(version))
            is_known, digest = await pipe.execute()
        if not is_known:
            raise UnknownPlanError(name, version)
        return digest.decode() if digest is not None else None

    async def tag(self, name: str, *documents: str) -> str:
        """Text that changes with each of these status documents, `plans` or `steps` of a job, and
        when it is registered anew. What is read after it is never older. Raises `UnknownJobError`.
        """
        fields = ["registered_at", *map(edition, documents)]
        registered, *editions = await self._redis.hmget(keys_of(name).meta, fields)
        if registered is None:
            raise UnknownJobError(name)
        return b"-".join([registered, *(number or b"0" for number in editions)]).decode()

    async def status(self, name: str, *documents: str) -> list[bytes | None]:
        """These status documents as JSON, as last saved; None for those that never were."""
        found: list[bytes | None] = await self._redis.hmget(keys_of(name).status, documents)
        return found

    async def statuses(
        self, names: Sequence[str], *documents: str
    ) -> list[dict[str, bytes | None]]:
        """These status documents of each of the jobs, as JSON; none of one whose keys hold
        something else."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(keys_of(name).status, documents)
            answers = await _answers(pipe)
        none = [None] * len(documents)
        return [dict(zip(documents, found or none, strict=True)) for found in answers]

    async def verdicts(self, name: str, *, after: int, limit: int | None) -> list[tuple[int, str]]:
        """The verdicts on the devices of a job above rank `after`, the first `limit` of them, as
        (rank, JSON) by rank."""
        found = zip(VERDICTS, await self.status(name, *VERDICTS), strict=True)
        status = {key: json.loads(document) for key, document in found if document is not None}
        return verdict_texts(status, after=after, limit=limit)

    async def counts(self, *names: str) -> list[dict[str, int] | None]:
        """Counters of each of these jobs, and its `backlog`: messages in no saved state; None for
        one whose keys hold something else."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for keys in map(keys_of, names):
                pipe.hgetall(keys.counts).xlen(keys.messages)
            answers = await _answers(pipe)
        return [
            None
            if fields is None or backlog is None
            else {key.decode(): int(value) for key, value in fields.items()} | {"backlog": backlog}
            for fields, backlog in zip(answers[::2], answers[1::2], strict=True)
        ]

    async def lags_s(self, names: Sequence[str]) -> tuple[float, list[float]]:
        """Age in seconds of the oldest request that an API process may not have stored, and that of
        the oldest message of each job that no worker has read; 0 if none."""
        answer = await self._lags(keys=[APIS, *(keys_of(name).messages for name in names)])
        delay_s, *lags_s = (milliseconds / 1e3 for milliseconds in answer)
        return delay_s, lags_s

    async def report_delay(self, process: str, delay_s: float) -> None:
        """Report the age of the oldest request that this API process has not answered."""
        await self._report_delay(keys=[APIS], args=[process, int(delay_s * 1e3)])

    async def remove_report(self, process: str) -> None:
        """Remove the report of an API process that has answered all its requests and ends."""
        await self._redis.hdel(APIS, process)

    async def loads(self) -> dict[str, float]:
        """Share of a core that each job costs its worker, as last reported."""
        fields = await self._redis.hgetall(LOADS)
        return {name.decode(): float(load) for name, load in fields.items()}

    async def put(
        self,
        name: str,
        kind: MessageKind,
        body: bytes,
        *,
        records: int = 0,
        dropped: int = 0,
        retry_key: str | None = None,
        status: str = "",
    ) -> StoredMessage:
        """Append a message to the job's stream, unless `retry_key` was received before; return the
        status document of that name with the answer.

        Raises `UnknownJobError` and `BacklogFullError`.
        """
        keys = keys_of(name)
        # Telemetry may fill half of the space, so that reports of failures always find room.
        room = 1 if kind is MessageKind.TELEMETRY else 2
        answer, document = await self._writer.write(
            [
                keys.meta, keys.messages, keys.counts, keys.seen(retry_key or ""), keys.status,
                URGENT,
            ],
            [
                room * self._settings.max_backlog, room * self._settings.max_backlog_bytes,
                kind.value, body, records, dropped, _REMEMBER_S if retry_key else 0, status,
            ],
        )  # fmt: skip
        if answer == b"unknown":
            raise UnknownJobError(name)
        if answer == b"full":
            raise BacklogFullError(name)
        return StoredMessage(answer != b"duplicate", document)

    async def news(
        self, name: str, cursor: EventCursor
    ) -> list[tuple[EventCursor, dict[str, Any]]]:
        """Events in a job after a cursor, then step summaries, each oldest first.

        Each document comes with the cursor after it. There may be more: the list is empty at the
        end. Raises `UnknownJobError`.
        """
        keys = keys_of(name)
        async with self._redis.pipeline(transaction=False) as pipe:
            # Read first: all events up to the newest are there, and later ones may be in part.
            pipe.hget(keys.meta, "event").xrange(keys.steps, min=f"({cursor.step}", count=_PAGE)
            for history in keys.histories.values():
                pipe.xrange(history, min=f"({cursor.event}", count=_PAGE)
            newest, steps, *histories = await pipe.execute()
        if newest is None:
            raise UnknownJobError(name)
        newest = stream_order(newest.decode())
        events = [item for item in chain(*histories) if _order(item) <= newest]
        found, size = [], 0
        for identity, fields in sorted(events, key=_order)[:_PAGE]:
            cursor = cursor._replace(event=identity.decode())
            found.append((cursor, _document(identity, fields)))
            size += len(fields[b"body"])
            if size >= _PAGE_BYTES:
                break
        for identity, fields in steps:
            cursor = cursor._replace(step=identity.decode())
            found.append((cursor, _document(identity, fields)))
        return found

    async def newest(self, name: str) -> EventCursor:
        """The cursor after all that has happened in a job. Raises `UnknownJobError`."""
        keys = keys_of(name)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(keys.meta, "event").xrevrange(keys.steps, count=1)
            event, steps = await pipe.execute()
        if event is None:
            raise UnknownJobError(name)
        return EventCursor(event.decode(), steps[0][0].decode() if steps else _BEGIN)

    async def steps(self, name: str, *, after: int, limit: int) -> list[dict[str, Any]]:
        """The newest summaries of steps above `after`, oldest first. Where a job has gone back,
        what was stored before of that step and of later ones no longer counts."""
        found: list[dict[str, Any]] = []
        newest, count, lowest = "+", 4, math.inf
        while len(found) < limit and lowest > after + 1:
            count = min(4 * count, 500)
            items = await self._redis.xrevrange(keys_of(name).steps, max=newest, count=count)
            for identity, fields in items:
                step = _document(identity, fields)
                if after < step["step"] < lowest:
                    found.append(step)
                lowest = min(lowest, step["step"])
            if len(items) < count:
                break
            newest = f"({items[-1][0].decode()}"
        return found[:limit][::-1]


async def _answers(pipe: Any) -> list[Any]:
    """The answers to commands on keys of jobs; None for one whose key holds something else."""
    answers: list[Any] = await pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, RedisError) and store_fault(answer) is not None:
            raise answer
    return [None if isinstance(answer, RedisError) else answer for answer in answers]


def _order(item: tuple[bytes, dict[bytes, bytes]]) -> tuple[int, int]:
    return stream_order(item[0].decode())


def _document(identity: bytes, fields: dict[bytes, bytes]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(fields[b"body"])
    return {"kind": fields[b"kind"].decode(), "at": int(identity.split(b"-")[0]) / 1e3, **body}
