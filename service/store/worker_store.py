"""Blocking access to Redis for one worker: leases, message streams and commits."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from resihp.contracts import ContractError, Job, Plan, Verdict, from_json

from ..errors import LeaseLostError
from ..logs import logger
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
from .schema import (
    ACQUIRE,
    API_DELAY,
    APIS,
    COMMIT,
    FENCES,
    GROUP,
    JOBS,
    KEEP_PREDICTOR,
    LOADS,
    NEWS,
    NOTE_ERROR,
    PLANS,
    PREDICTOR,
    READ,
    REMOVE_IDLE,
    RENEW,
    REPORT_LOADS,
    RESTORE_GROUP,
    URGENT,
    WORKERS,
    JobKeys,
    Subject,
    edition,
    keys_of,
)

log = logger("resihp.store")

_Part = str | bytes | int | float
_Command = tuple[_Part, ...]
_Event = tuple[str, Mapping[str, Any]]

_MOST_PARTS = 1_000
_KEEP_PLANS = 100
_KEEP_PREDICTORS_S = 90 * 86_400  # since a job last took or made one


@dataclass(frozen=True)
class Lease:
    """The exclusive right to work on a job; every commit checks both fields, and that it follows
    the last one of this worker.

    token       changes with every acquisition, also by the same worker
    generation  changes when the job is registered with other content
    """

    job: str
    token: bytes
    generation: bytes


@dataclass(frozen=True)
class ShownState:
    """Plans and verdicts of a job that are stored apart from its saved state, at the same time.

    plans     the active plan and the newest later ones, oldest first
    verdicts  those that are not of ordinary healthy ranks
    """

    plans: tuple[Plan, ...]
    verdicts: tuple[Verdict, ...]


def _owner(token: bytes | None) -> str | None:
    """Name of the worker that holds a lease."""
    return None if token is None else token.decode().partition(":")[2]


class WorkerStore:
    """Reads and writes of one worker, whose unique name in Redis is `name`."""

    def __init__(self, url: str, name: str, *, keep_events: int, keep_steps: int) -> None:
        self.name = name
        self._redis: Any = redis.Redis.from_url(url, protocol=2, socket_timeout=15)
        self._keep_events = keep_events
        self._keep_steps = keep_steps
        self._acquire = self._redis.register_script(ACQUIRE)
        self._renew = self._redis.register_script(RENEW)
        self._read = self._redis.register_script(READ)
        self._remove_idle = self._redis.register_script(REMOVE_IDLE)
        self._commit = self._redis.register_script(COMMIT)
        self._keep_predictor = self._redis.register_script(KEEP_PREDICTOR)
        self._report_loads = self._redis.register_script(REPORT_LOADS)
        self._api_delay = self._redis.register_script(API_DELAY)
        self._note_error = self._redis.register_script(NOTE_ERROR)
        self._restore_group = self._redis.register_script(RESTORE_GROUP)
        self._urgent: Any = None  # the subscription, once there is one
        self._commits: dict[str, int] = {}  # number of those of each job acquired, as far as known

    def close(self) -> None:
        """Close every connection."""
        if self._urgent is not None:
            self._urgent.close()
        self._redis.close()

    def share_loads(
        self, loads: Mapping[str, float], *, ttl_s: float
    ) -> tuple[list[str], dict[str, str | None], dict[str, float]]:
        """Report the loads of this worker's jobs.

        Returns the workers with a report in the last `ttl_s`, the owner of each job (None: no
        worker) and the last reported load of each.
        """
        args: list[str | float] = [self.name, ttl_s, json.dumps(loads)]
        with self._redis.pipeline(transaction=False) as pipe:
            self._report_loads(keys=[WORKERS, LOADS], args=args, client=pipe)
            pipe.zrange(WORKERS, 0, -1).smembers(JOBS).hgetall(LOADS)
            _, workers, names, known = pipe.execute()
        jobs = sorted(name.decode() for name in names)
        if ended := set(known) - names:
            self._redis.hdel(LOADS, *ended)
        self._commits = {job: made for job, made in self._commits.items() if job.encode() in names}
        leases = self._redis.mget([keys_of(job).lease for job in jobs]) if jobs else []
        return (
            [worker.decode() for worker in workers],
            dict(zip(jobs, map(_owner, leases), strict=True)),
            {job.decode(): float(load) for job, load in known.items() if job in names},
        )

    def api_delay_s(self) -> float:
        """Age in seconds of the oldest request that an API process may not have stored; infinite
        without an API process."""
        delay_ms = self._api_delay(keys=[APIS])
        return delay_ms / 1e3 if delay_ms >= 0 else math.inf

    def leave(self) -> None:
        """Remove this worker from the list of workers."""
        self._redis.zrem(WORKERS, self.name)

    def acquire(self, job: str, *, ttl_s: float) -> Lease | None:
        """The lease of a job; None while another worker holds it or if the job does not exist."""
        keys = keys_of(job)
        args: list[str | int] = [self.name, int(ttl_s * 1e3)]
        token = self._acquire(keys=[keys.lease, FENCES], args=args)
        generation, commits = self._redis.hmget(keys.meta, "generation", "commits")
        if token is None or generation is None:
            return None
        self._commits[job] = int(commits or 0)
        return Lease(job, token, generation)

    def renew(self, *leases: Lease, ttl_s: float) -> bool:
        """Extend leases, or release them with 0 s; False if one was lost."""
        with self._redis.pipeline(transaction=False) as pipe:
            for lease in leases:
                args: list[bytes | int] = [lease.token, int(ttl_s * 1e3)]
                self._renew(keys=[keys_of(lease.job).lease], args=args, client=pipe)
            return all(pipe.execute())

    def load(self, job: str) -> tuple[Job, Plan, dict[str, bytes]] | None:
        """A job, its plan 0 and its saved state (empty if never saved); None if deleted."""
        keys = keys_of(job)
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(keys.meta, "job").hget(keys.plans, "0").hgetall(keys.state)
            document, plan, state = pipe.execute()
        if document is None or plan is None:
            return None
        saved = {name.decode(): value for name, value in state.items()}
        return from_json(Job, json.loads(document)), plan_from_json(loads(plan)), saved

    def shown_state(self, job: str, *, most_plans: int) -> ShownState:
        """The plans and verdicts of a job that the API shows, so many of the plans."""
        keys = keys_of(job)
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hkeys(keys.plans).hmget(keys.status, "rollout", "verdicts")
            known, (rollout, verdicts) = pipe.execute()
        versions = sorted(map(int, known))
        active = loads(rollout)["active"] if rollout else versions[-1]
        later = [version for version in versions if version > active]
        kept = [active, *later[1 - most_plans :]] if active in versions else versions[-1:]
        plans = tuple(map(plan_from_json, map(loads, self._redis.hmget(keys.plans, kept))))
        try:
            found = tuple(from_json(Verdict, each) for each in json.loads(verdicts or "[]"))
        except ContractError:  # those of another version of the service
            found = ()
        return ShownState(plans, found)

    def predictor(self, job: Job) -> bytes | None:
        """The predictor stored for jobs of this kind; None if there is none yet."""
        key = PREDICTOR + predictor_key(job)
        stored: bytes | None = self._redis.get(key)
        self._redis.expire(key, _KEEP_PREDICTORS_S)
        return stored

    def keep_predictor(self, job: Job, predictor: bytes) -> None:
        """Store a predictor for the next job of this kind; none without a model description."""
        if job.model is not None:
            key = PREDICTOR + predictor_key(job)
            self._keep_predictor(keys=[key], args=[predictor, _KEEP_PREDICTORS_S])

    def claim(self, lease: Lease, applied: str) -> Iterator[JobMessage]:
        """Messages after `applied` that a worker has read and no saved state contains, in order.
        Each is read when it is asked for, as a few may be large together.

        Raises `LeaseLostError` if the job was deleted meanwhile.
        """
        key, start = keys_of(lease.job).messages, "0-0"
        while True:
            try:
                start, items, *_ = self._redis.xautoclaim(key, GROUP, self.name, 0, start, count=1)
            except redis.ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                if not self._go_on_reading(lease):
                    raise LeaseLostError(lease.job) from None
                continue
            for identity, fields in items:
                if identity is None:  # Redis 6 gives those that are deleted so
                    continue
                if fields and stream_order(identity.decode()) > stream_order(applied):
                    yield message_of((identity, fields))
                else:  # in the saved state: its reader died between the commit and XACK
                    self._redis.xack(key, GROUP, identity)
            if start in (b"0-0", "0-0"):
                break
        args: list[bytes | str] = [lease.token, GROUP, self.name]
        self._remove_idle(keys=[keys_of(lease.job).lease, key], args=args)

    def _go_on_reading(self, lease: Lease) -> bool:
        """Read a stream that Redis has deleted, or evicted, from its new beginning; False if the
        lease was lost."""
        keys = keys_of(lease.job)
        is_ours = self._restore_group(
            keys=[keys.lease, keys.meta, keys.messages],
            args=[lease.token, lease.generation, GROUP],
        )
        if is_ours:
            log.warning("messages lost: Redis has deleted the stream of a job", job=lease.job)
        return bool(is_ours)

    def note_error(self, job: str, detail: str) -> None:
        """Count and show why a job is not worked on."""
        keys = keys_of(job)
        self._note_error(keys=[keys.meta, keys.counts, keys.status], args=[dumps(detail)])

    def read(
        self, leases: Mapping[str, Lease], *, count: int, size: int
    ) -> dict[str, list[JobMessage] | redis.ResponseError]:
        """New messages of each of the leased jobs, at most `count` of each, in order, or the error
        that its keys lead to; none of those whose leases are lost. Once the bodies have `size`
        bytes, no more are read, and the jobs that follow are left out."""
        if not leases:
            return {}
        keys, args = list[str](), list[_Part]([GROUP, self.name, count, size])
        for job, lease in leases.items():
            names = keys_of(job)
            keys += [names.lease, names.meta, names.messages]
            args += [lease.token, lease.generation]
        looked_at, answer = self._read(keys=keys, args=args)
        jobs = list(leases)[:looked_at]
        found: dict[str, list[JobMessage] | redis.ResponseError] = {job: [] for job in jobs}
        for number, messages in answer:
            job = jobs[number - 1]
            if isinstance(messages, bytes) and b"NOGROUP" in messages:
                self._go_on_reading(leases[job])
                continue
            found[job] = (
                redis.ResponseError(messages.decode())
                if isinstance(messages, bytes)
                else [
                    message_of((identity, dict(zip(fields[::2], fields[1::2], strict=True))))
                    for identity, fields in messages
                ]
            )
        return found

    def wait_for_urgent(self, timeout_s: float) -> None:
        """Wait for a message other than telemetry and heartbeats, of any job, until the time-out.
        One since the call before counts."""
        if self._urgent is None:
            urgent = self._redis.pubsub(ignore_subscribe_messages=True)
            urgent.subscribe(URGENT)
            urgent.get_message(timeout=None)  # that it is subscribed
            self._urgent = urgent
        if self._urgent.get_message(timeout=max(0.0, timeout_s)) is not None:
            while self._urgent.get_message() is not None:
                pass

    def commit(self, lease: Lease, commit: Commit) -> None:
        """Save a state and publish the changes that led to it, in one step.

        Raises `LeaseLostError`, also where Redis has lost the commit before, on which this one
        builds; nothing was written then.
        """
        keys, changes = keys_of(lease.job), commit.changes
        commands: list[_Command] = [
            *(("HSET", keys.state, part, saved) for part, saved in commit.state.items()),
            *(("HDEL", keys.state, *parts) for parts in _chunks(sorted(commit.dropped))),
            *self._shown(keys, commit.status, changes.steps),
            ("HSET", keys.meta, "plan", commit.newest),
        ]
        if changes.plans:  # without these the oldest go, except plan 0
            kept = sorted(map(int, self._redis.hkeys(keys.plans)))[1:]
            commands += [
                (command, key, version)
                for version in kept[: len(changes.plans) - _KEEP_PLANS]
                for command, key in (("HDEL", keys.plans), ("HDEL", keys.digests))
            ]
        for plan in changes.plans:
            commands += [
                ("HSET", keys.plans, plan.version, dumps(plan_json(plan))),
                ("HSET", keys.digests, plan.version, plan.digest),
                ("HINCRBY", keys.meta, edition("plans"), 1),
            ]
        for name, value in changes.counts().items():
            commands.append(("HINCRBY", keys.counts, name, value))
        if changes.applied:
            milliseconds, sequence = stream_order(changes.applied[-1])
            commands += [
                ("HSET", keys.state, "applied", changes.applied[-1]),
                ("HINCRBY", keys.counts, "backlog_bytes", -changes.applied_bytes),
                *(("XACK", keys.messages, GROUP, *ids) for ids in _chunks(changes.applied)),
                ("XTRIM", keys.messages, "MINID", f"{milliseconds}-{sequence + 1}"),
            ]
        if changes.plans:
            commands.append(("PUBLISH", PLANS, lease.job))
        self._fenced(lease, commands, changes.events)

    def publish(
        self, lease: Lease, status: Mapping[str, Any], steps: list[dict[str, Any]], applied: str
    ) -> None:
        """Show steps and status before the commit that saves them. Raises `LeaseLostError`.

        Records the newest message that is applied in them, so that a replay does not show its steps
        again.
        """
        keys = keys_of(lease.job)
        newest: _Command = ("HSET", keys.state, "shown", applied)
        self._fenced(lease, [newest, *self._shown(keys, status, steps)])

    def _shown(
        self, keys: JobKeys, status: Mapping[str, Any], steps: Sequence[dict[str, Any]]
    ) -> Iterator[_Command]:
        for name, document in status.items():
            yield "HSET", keys.status, name, dumps(document)
            yield "HINCRBY", keys.meta, edition(name), 1
        # Only those that would stay: Redis 6 takes a million arguments at a time.
        for step in steps[-self._keep_steps :]:
            entry = "*", "kind", "step", "body", dumps(step)
            yield "XADD", keys.steps, "MAXLEN", "~", self._keep_steps, *entry
        if steps:
            yield "HINCRBY", keys.meta, edition("steps"), 1

    def _fenced(
        self,
        lease: Lease,
        commands: Iterable[_Command],
        events: Sequence[_Event] = (),
    ) -> None:
        """Carry out commands and append events, all or nothing. Raises `LeaseLostError`."""
        keys, kept = keys_of(lease.job), self._newest(events)
        known = self._commits.get(lease.job, 0)
        args: list[_Part] = [lease.token, lease.generation, known, self._keep_events, len(kept)]
        for kind, document in kept:
            args += [keys.histories[Subject.of(kind)], kind, dumps(document)]
        for command in (*commands, ("PUBLISH", NEWS, lease.job)):
            args += [len(command), *command]
        if not self._commit(keys=[keys.lease, keys.meta], args=args):
            raise LeaseLostError(lease.job)
        self._commits[lease.job] = known + 1

    def _newest(self, events: Sequence[_Event]) -> list[_Event]:
        """Events that the histories would keep of those that are appended together: nobody reads
        the others, and Redis takes a million arguments at a time."""
        if len(events) <= self._keep_events:
            return list(events)
        counts, kept = Counter[Subject](), list[_Event]()
        for event in reversed(events):
            subject = Subject.of(event[0])
            counts[subject] += 1
            if counts[subject] <= self._keep_events:
                kept.append(event)
        return kept[::-1]


def _chunks(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Parts of `ids` that a script can pass to a command: its stack is limited."""
    return (ids[at : at + _MOST_PARTS] for at in range(0, len(ids), _MOST_PARTS))
