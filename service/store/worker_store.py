"""Blocking access to Redis for one worker: leases, message streams and commits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from resihp.contracts import Job, Plan, from_json

from ..errors import LeaseLostError
from .documents import (
    Commit,
    JobMessage,
    dumps,
    loads,
    message_of,
    plan_from_json,
    plan_json,
    predictor_key,
    stream_order,
)
from .schema import ACQUIRE, FENCES, GROUP, JOBS, NEWS, PLANS, PREDICTORS, RENEW, WORKERS, JobKeys


@dataclass(frozen=True)
class Lease:
    """The exclusive right to work on a job; every commit checks both fields.

    token       changes with every acquisition, also by the same worker
    generation  changes when the job is registered with other content
    """

    job: str
    token: bytes
    generation: bytes


class WorkerStore:
    """Reads and writes of one worker, whose unique name in Redis is `name`."""

    def __init__(self, url: str, name: str, *, keep_events: int, keep_steps: int) -> None:
        self.name = name
        self._redis: Any = redis.Redis.from_url(url, protocol=2, socket_timeout=15)
        self._keep_events = keep_events
        self._keep_steps = keep_steps
        self._acquire = self._redis.register_script(ACQUIRE)
        self._renew = self._redis.register_script(RENEW)

    def close(self) -> None:
        """Close every connection."""
        self._redis.close()

    def jobs(self) -> list[str]:
        """Names of all jobs, sorted."""
        return sorted(name.decode() for name in self._redis.smembers(JOBS))

    def count_workers(self, now_s: float, *, ttl_s: float) -> int:
        """Number of workers alive in the last `ttl_s`, with this one, which is at `now_s`."""
        with self._redis.pipeline() as pipe:
            pipe.zadd(WORKERS, {self.name: now_s}).zremrangebyscore(WORKERS, 0, now_s - ttl_s)
            return int(pipe.zcard(WORKERS).execute()[-1])

    def leave(self) -> None:
        """Remove this worker from the list of workers."""
        self._redis.zrem(WORKERS, self.name)

    def acquire(self, job: str, *, ttl_s: float) -> Lease | None:
        """The lease of a job; None while another worker holds it or if the job does not exist."""
        keys = JobKeys(job)
        args: list[str | int] = [self.name, int(ttl_s * 1e3)]
        token = self._acquire(keys=[keys.lease, FENCES], args=args)
        generation = self._redis.hget(keys.meta, "generation")
        if token is None or generation is None:
            return None
        return Lease(job, token, generation)

    def renew(self, lease: Lease, *, ttl_s: float) -> bool:
        """Extend a lease, or release it with 0 s; False if it was lost."""
        key = JobKeys(lease.job).lease
        return bool(self._renew(keys=[key], args=[lease.token, int(ttl_s * 1e3)]))

    def load(self, job: str) -> tuple[Job, Plan, dict[str, bytes]] | None:
        """A job, its plan 0 and its saved state (empty if never saved); None if deleted."""
        keys = JobKeys(job)
        with self._redis.pipeline() as pipe:
            pipe.hget(keys.meta, "job").hget(keys.plans, "0").hgetall(keys.state)
            document, plan, state = pipe.execute()
        if document is None or plan is None:
            return None
        saved = {name.decode(): value for name, value in state.items()}
        return from_json(Job, json.loads(document)), plan_from_json(loads(plan)), saved

    def predictor(self, job: Job) -> bytes | None:
        """The predictor stored for jobs of this kind; None if there is none yet."""
        stored: bytes | None = self._redis.hget(PREDICTORS, predictor_key(job))
        return stored

    def keep_predictor(self, job: Job, predictor: bytes) -> None:
        """Store a predictor for the next job of this kind; none without a model description."""
        if job.model is not None:
            self._redis.hset(PREDICTORS, predictor_key(job), predictor)

    def claim(self, lease: Lease, applied: str) -> Iterator[JobMessage]:
        """Messages after `applied` that a worker has read and no saved state contains, in order."""
        key, start = JobKeys(lease.job).messages, "0-0"
        while True:
            start, items, *_ = self._redis.xautoclaim(key, GROUP, self.name, 0, start, count=16)
            for identity, fields in items:
                if fields and stream_order(identity.decode()) > stream_order(applied):
                    yield message_of((identity, fields))
                else:  # in the saved state: its reader died between the commit and XACK
                    self._redis.xack(key, GROUP, identity)
            if start in (b"0-0", "0-0"):
                break
        self._remove_idle_consumers(key)

    def _remove_idle_consumers(self, key: str) -> None:
        for consumer in self._redis.xinfo_consumers(key, GROUP):
            if consumer["name"].decode() != self.name and not consumer["pending"]:
                self._redis.xgroup_delconsumer(key, GROUP, consumer["name"])

    def read(
        self, leases: Mapping[str, Lease], *, count: int, block_ms: int
    ) -> Iterator[tuple[str, JobMessage]]:
        """New messages of the leased jobs as (job, message), in order within each job."""
        streams = {JobKeys(job).messages: ">" for job in leases}
        names = {JobKeys(job).messages.encode(): job for job in leases}
        answer = self._redis.xreadgroup(GROUP, self.name, streams, count=count, block=block_ms)
        for key, items in answer or ():
            for item in items:
                yield names[key], message_of(item)

    def commit(self, lease: Lease, commit: Commit) -> None:
        """Save a state and publish the changes that led to it, in one transaction.

        Raises `LeaseLostError`; nothing was written then.
        """

        def queue(pipe: Any, keys: JobKeys) -> None:
            self._queue(pipe, keys, commit)
            if commit.changes.plans:
                pipe.publish(PLANS, lease.job)

        self._fenced(lease, queue)

    def publish(self, lease: Lease, status: Mapping[str, Any], steps: list[dict[str, Any]]) -> None:
        """Show steps and status before the commit that saves them. Raises `LeaseLostError`.

        Records the newest step shown, so that a replay of the messages does not show it again.
        """

        def queue(pipe: Any, keys: JobKeys) -> None:
            pipe.hset(keys.state, "published_step", steps[-1]["step"])
            self._queue_status(pipe, keys, status, steps)

        self._fenced(lease, queue)

    def _fenced(self, lease: Lease, queue: Callable[[Any, JobKeys], None]) -> None:
        keys = JobKeys(lease.job)
        with self._redis.pipeline() as pipe:
            while True:
                pipe.watch(keys.lease, keys.meta)
                generation = pipe.hget(keys.meta, "generation")
                if pipe.get(keys.lease) != lease.token or generation != lease.generation:
                    raise LeaseLostError(lease.job)
                pipe.multi()
                queue(pipe, keys)
                pipe.publish(NEWS, lease.job)
                try:
                    pipe.execute()
                except redis.WatchError:
                    continue  # this worker's own thread may have renewed the lease meanwhile
                return

    def _queue(self, pipe: Any, keys: JobKeys, commit: Commit) -> None:
        changes = commit.changes
        pipe.hset(keys.state, mapping=dict(commit.state))
        self._queue_status(pipe, keys, commit.status, changes.steps)
        for plan in changes.plans:
            pipe.hset(keys.plans, str(plan.version), dumps(plan_json(plan)))
            pipe.hset(keys.digests, str(plan.version), plan.digest)
        pipe.hset(keys.meta, "plan", commit.newest)
        for kind, document in changes.events:
            fields = {"kind": kind, "body": dumps(document)}
            pipe.xadd(keys.events, fields, maxlen=self._keep_events, approximate=True)
        for name, value in changes.counts().items():
            pipe.hincrby(keys.counts, name, value)
        if changes.applied:
            pipe.hset(keys.state, "applied", changes.applied[-1])
            pipe.xack(keys.messages, GROUP, *changes.applied)
            pipe.hincrby(keys.counts, "backlog_bytes", -changes.applied_bytes)
            milliseconds, sequence = stream_order(changes.applied[-1])
            pipe.xtrim(keys.messages, minid=f"{milliseconds}-{sequence + 1}", approximate=False)

    def _queue_status(
        self, pipe: Any, keys: JobKeys, status: Mapping[str, Any], steps: list[dict[str, Any]]
    ) -> None:
        pipe.hset(keys.status, mapping={k: dumps(v) for k, v in status.items()})
        for step in steps:
            fields = {"kind": "step", "body": dumps(step)}
            pipe.xadd(keys.steps, fields, maxlen=self._keep_steps, approximate=True)
