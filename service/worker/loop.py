"""A worker: acquires jobs by lease, feeds their sessions, commits the changes."""

from __future__ import annotations

import gc
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

import redis

from ..errors import LeaseLostError, NoRedisError, StartError
from ..logs import logger
from ..settings import Settings
from ..store.connection import check_redis, without_password
from ..store.documents import JobMessage, MessageKind, stream_order
from ..store.embedded_redis import socket_path
from ..store.faults import store_fault
from ..store.worker_store import Lease, WorkerStore
from .adapters import AdapterFactory, Adapters, load_adapters
from .load import LoadMeter, TimeShare, WorkerLoads
from .owned_job import SHOW_EVERY_S, OwnedJob
from .planning import MOST_PLANS, Planner
from .session import JobSession

log = logger("resihp.worker")

_BATCH = 16  # messages of a job in one answer of Redis
_READ_BYTES = 8 << 20  # messages applied at a time: bounds memory, and the delay of a heartbeat
# A worker that keeps up reads so often: telemetry and heartbeats that arrive meanwhile are applied
# together, which costs less. Other messages wake it.
_READ_EVERY_S = 0.25
_PLANNING_PAUSE_S = 0.01  # instead, while a plan is awaited
_IDLE_S = 0.1  # without jobs
# Saving takes at most this share of a worker's time: costly states are saved less often. The same
# holds for diagnoses, which look at all records of the last steps.
_SAVE_SHARE = 0.06
_MOST_UNSAVED = 0.25  # of the backlog that a job may have: then its state is saved at any cost
_DIAGNOSE_EVERY_S, _DIAGNOSE_SHARE = 5.0, 0.03
_MOST_EVENTS = 20_000  # of a job that wait to be stored: bounds memory and the length of a commit
_LEAVE_S = 3.0  # for saving states when the worker ends; other messages stay in the stream
_HUNG_LEASES = 12  # times of a lease without progress
_MEASURE_EVERY_S = 0.25  # the delay of the API
_LONGEST_ROUND_S = 1.0  # that counts as delay
_BROKEN_S, _MOST_BROKEN_S = 60.0, 3_600.0  # after an error of one job, until it is tried again
_PATIENCE_S = 30.0  # a sidecar started at the same time may not have started its Redis yet
_POLL_S = 0.2
_COLLECT_AFTER = 20_000
"""New objects after which garbage is looked for: a message makes thousands that no cycle holds, and
a full collection goes through the sessions of all jobs."""
_NICE = 5
"""Priority of a process of a worker: where processors are short an API process comes first. It can
ask senders for fewer messages, and a worker that is behind cannot."""


@dataclass(frozen=True)
class _Broken:
    """A job that is not worked on for `delay_s`, by its registration (None: not known)."""

    generation: bytes | None
    until_s: float
    delay_s: float

    def is_for(self, lease: Lease) -> bool:
        """Return whether that holds under this lease."""
        return lease.generation == self.generation and time.monotonic() < self.until_s


class Worker:
    """Works until `stop` is set; runs in a thread or as the main loop of a process.

    name  that of the leases: a worker with the name of one that has died resumes its jobs at once
    """

    def __init__(self, url: str, settings: Settings, adapters: Adapters, name: str) -> None:
        self.name = name
        self._settings = settings
        self._adapters = adapters
        self._planner = Planner(adapters, time_limit_s=settings.plan_time_limit_s)
        self._store = WorkerStore(
            url, self.name, keep_events=settings.keep_events, keep_steps=settings.keep_steps
        )
        self._owned: dict[str, OwnedJob] = {}
        self._meter = LoadMeter()
        self._saving, self._diagnosing = TimeShare(_SAVE_SHARE), TimeShare(_DIAGNOSE_SHARE)
        self._broken: dict[str, _Broken] = {}
        self._balanced_s = float("-inf")
        self._alive_s = time.monotonic()  # last progress
        self._api_delay_s, self._measured_s = math.inf, float("-inf")

    @property
    def hangs(self) -> bool:
        """True if it has made no progress for so long that its leases are not renewed."""
        return time.monotonic() - self._alive_s > _HUNG_LEASES * self._settings.lease_s

    def run(self, stop: threading.Event) -> None:
        """Work until `stop`; then commit what is quickly saved, release the leases and close."""
        log.info("worker started", worker=self.name)
        keeper = threading.Thread(target=self._renew_leases, args=(stop,), name="leases")
        keeper.start()
        while not stop.is_set():
            try:
                self._round(stop)
            except redis.RedisError as error:
                log.warning("redis unavailable, resuming from the saved state", error=str(error))
                self._owned.clear()
                stop.wait(0.5)
            except Exception:  # an error in one job must not end the service of the others
                log.exception("unexpected error, resuming from the saved state")
                self._owned.clear()
                stop.wait(1.0)
        keeper.join()
        self._leave()
        log.info("worker stopped", worker=self.name)

    def _round(self, stop: threading.Event) -> None:
        self._alive_s = now_s = time.monotonic()
        if now_s - self._balanced_s > min(1.0, self._settings.lease_s / 4):
            self._balance(stop)
            self._balanced_s = now_s
            if stop.is_set():  # a job may be resumed in part: later messages must wait
                return
        if not self._owned:
            stop.wait(_IDLE_S)
            return
        if now_s - self._measured_s >= _MEASURE_EVERY_S:
            self._api_delay_s, self._measured_s = self._store.api_delay_s(), now_s
        behind = self._read()
        self._spent(None)
        for job, owned in list(self._owned.items()):
            if stop.is_set():
                return
            owned.session.take_plan()
            if owned.read_s >= now_s:  # else its messages wait for their turn
                owned.tick(drained=job not in behind, delay_s=self._delay_s())
            if owned.is_urgent():
                self._spent(None)
                self._commit(job)
        self._spent(None)
        self._commit_due()
        for job, owned in list(self._owned.items()):
            if owned.session.changes.steps:
                self._publish(job, owned)
        self._spent(None)
        if not behind:
            pause_s = _PLANNING_PAUSE_S if self._is_planning() else _READ_EVERY_S
            self._store.wait_for_urgent(now_s + pause_s - time.monotonic())

    def _delay_s(self) -> float:
        """Age of the oldest request that may not have been read, at rounds of ordinary length."""
        return self._api_delay_s + min(time.monotonic() - self._measured_s, _LONGEST_ROUND_S)

    def _is_planning(self) -> bool:
        return any(owned.session.is_planning for owned in self._owned.values())

    def _read(self) -> Collection[str]:
        """Read new messages, first of the jobs for which it was done longest ago, and apply those
        of each job together; the jobs that may have more."""
        messages: dict[str, list[JobMessage]] = {}
        in_turn = self._longest_ago(lambda owned: owned.read_s)
        more = {job: self._owned[job].lease for job in in_turn}
        size = 0
        while more and size < _READ_BYTES:
            read = self._store.read(more, count=_BATCH, size=_READ_BYTES - size)
            for job, unread in read.items():
                self._owned[job].read_s = time.monotonic()
                lease = more.pop(job)
                if isinstance(unread, redis.ResponseError):
                    with self._by_itself(job, lease):
                        raise unread
                elif unread:
                    size += sum(len(message.body) for message in unread)
                    messages.setdefault(job, []).extend(unread)
                    if len(unread) == _BATCH or size >= _READ_BYTES:
                        more[job] = lease
        self._spent(None)
        for job, unread in messages.items():
            if job in self._owned:
                self._apply(job, unread)
                self._spent(job)
        return more

    def _apply(self, job: str, messages: Iterable[JobMessage]) -> None:
        """Apply messages of a job, and save its state in between where they lead to very many
        events: a message may be of a hundred thousand ranks."""
        for kind, group in groupby(messages, attrgetter("kind")):
            alike = list(group)
            parts = [alike] if kind is MessageKind.TELEMETRY else [[each] for each in alike]
            for part in parts:
                session = self._owned[job].session
                session.apply(*part)
                if len(session.changes.events) >= _MOST_EVENTS:
                    self._commit(job)
                    if job not in self._owned:
                        return

    def _commit_due(self) -> None:
        """Diagnose jobs and save their states, those first for which it was done longest ago, as
        long as that keeps within its share of the time, or new messages would be refused."""
        every_s = self._settings.commit_every_s
        for job in self._longest_ago(lambda owned: owned.diagnosed_s):
            if not self._diagnosing.has_time(time.monotonic()):
                break
            owned = self._owned[job]
            if owned.diagnosis_is_due(_DIAGNOSE_EVERY_S, commit_every_s=every_s):
                self._commit_in_turn(job, diagnose=True)
        for job in self._longest_ago(lambda owned: owned.committed_s):
            owned, has_time = self._owned[job], self._saving.has_time(time.monotonic())
            if self._is_full(owned) or (has_time and owned.commit_is_due(every_s)):
                self._commit_in_turn(job)

    def _commit_in_turn(self, job: str, *, diagnose: bool = False) -> None:
        """Commit a job. A save for which there is no time, but that has to be, does not count: else
        a job with many of them would keep the others from being saved."""
        owned, has_time = self._owned[job], self._saving.has_time(time.monotonic())
        self._commit(job, diagnose=diagnose)
        if has_time:
            self._saving.spend(owned.save_cost_s, time.monotonic())

    def _is_full(self, owned: OwnedJob) -> bool:
        """Return whether messages that are applied take much of the job's room for others."""
        changes, settings = owned.session.changes, self._settings
        return (
            len(changes.applied) > _MOST_UNSAVED * settings.max_backlog
            or changes.applied_bytes > _MOST_UNSAVED * settings.max_backlog_bytes
        )

    def _longest_ago(self, when: Callable[[OwnedJob], float]) -> list[str]:
        return sorted(self._owned, key=lambda job: when(self._owned[job]))

    def _commit(self, job: str, *, diagnose: bool = False) -> None:
        owned = self._owned[job]
        with self._by_itself(job, owned.lease):
            self._save(job, owned, diagnose=diagnose)

    def _save(self, job: str, owned: OwnedJob, *, diagnose: bool) -> None:
        begun_s = time.monotonic()
        diagnosis = owned.diagnose() if diagnose else None
        diagnosed_s = time.monotonic()
        commit = owned.commit()
        if diagnosis is not None:
            commit = replace(commit, status={**commit.status, "diagnosis": diagnosis})
        try:
            self._store.commit(owned.lease, commit)
        except LeaseLostError:
            self._drop(job)
            return
        self._broken.pop(job, None)
        if (fitted := owned.session.new_predictor()) is not None:
            self._store.keep_predictor(owned.session.job, fitted)
        owned.committed_s = owned.published_s = now_s = time.monotonic()
        owned.save_cost_s = now_s - diagnosed_s
        self._diagnosing.spend(diagnosed_s - begun_s, now_s)
        self._spent(job)

    def _publish(self, job: str, owned: OwnedJob) -> None:
        """Show the steps and the status of a job whose state is saved less often."""
        now_s = time.monotonic()
        if now_s - owned.published_s < min(self._settings.commit_every_s, SHOW_EVERY_S):
            return
        changes = owned.session.changes
        changes.steps, steps = [], changes.steps
        with self._by_itself(job, owned.lease):
            try:
                self._store.publish(owned.lease, owned.changed_status(), steps, changes.applied[-1])
            except LeaseLostError:
                self._drop(job)
        owned.published_s = now_s

    def _drop(self, job: str) -> None:
        """Drop a job that was deleted or registered anew, or was given to another worker while this
        one stood still."""
        log.info("job dropped: its lease has ended", job=job, worker=self.name)
        del self._owned[job]

    def _balance(self, stop: threading.Event) -> None:
        """Acquire the free jobs that fall to this worker; release jobs if it has too much load."""
        self._spent(None)
        loads = self._meter.measure(self._owned, time.monotonic())
        shared = self._store.share_loads(loads, ttl_s=self._settings.lease_s)
        table = WorkerLoads(*shared)
        for job in list(self._owned):
            if table.owners.get(job) != self.name:
                self._drop(job)
        self._broken = {job: since for job, since in self._broken.items() if job in table.owners}
        given = table.jobs_to_give(self.name)
        for job in self._owned.keys() & given:
            log.info("job given away", job=job, worker=self.name, load=round(table.load(job), 3))
            self._release(job)
        # Leases that this worker has, without the job since it lost the connection.
        held = {job for job, owner in table.owners.items() if owner == self.name}
        for job in [*table.jobs_to_take(self.name), *sorted(held.difference(given))]:
            if job not in self._owned and not stop.is_set():
                self._meter.take(job, table.load(job))
                self._acquire(job, stop)
        self._meter.begin(time.thread_time(), time.monotonic())

    def _spent(self, job: str | None) -> None:
        self._meter.add(job, time.thread_time())

    def _acquire(self, job: str, stop: threading.Event) -> None:
        lease = None
        with self._by_itself(job):
            lease = self._store.acquire(job, ttl_s=self._settings.lease_s)
        broken = self._broken.get(job)
        if lease is None or (broken is not None and broken.is_for(lease)):
            return
        with self._by_itself(job, lease):
            try:
                self._resume(job, lease, stop)
            except LeaseLostError:
                self._drop(job)

    @contextmanager
    def _by_itself(self, job: str, lease: Lease | None = None) -> Iterator[None]:
        """Keep an error of one job from the others: it is not worked on for a while, unless it is
        registered again. After another error than of its keys in Redis, which may be put right at
        any time, the while grows as long as it fails."""
        try:
            yield
        except Exception as error:  # any from a state or message that cannot be read or told
            if isinstance(error, redis.RedisError) and store_fault(error) is not None:
                raise
            generation = None if lease is None else lease.generation
            known = self._broken.get(job)
            delay_s = _BROKEN_S
            if known is None or generation not in (None, known.generation):
                log.exception("job is not worked on", job=job)
                self._store.note_error(job, f"not worked on: {type(error).__name__}: {error}")
            else:
                generation = known.generation
                if not isinstance(error, redis.RedisError):
                    delay_s = min(2.0 * known.delay_s, _MOST_BROKEN_S)
            self._broken[job] = _Broken(generation, time.monotonic() + delay_s, delay_s)
            self._owned.pop(job, None)

    def _resume(self, job: str, lease: Lease, stop: threading.Event) -> None:
        loaded = self._store.load(job)
        if loaded is None:
            return
        description, plan, saved = loaded
        predictor = self._store.predictor(description)
        session = JobSession(description, plan, self._adapters, self._planner, predictor)
        shown = stream_order(saved.pop("shown", b"0-0").decode())  # known before a state is saved
        if not (saved and session.resume(saved)):
            known = self._store.shown_state(job, most_plans=MOST_PLANS)
            if known.plans[-1].version > plan.version:
                session.go_on(known)
        self._owned[job] = OwnedJob(lease, session, frozenset(saved))
        claimed = self._store.claim(lease, saved.get("applied", b"0-0").decode())
        while (messages := _first_bytes(claimed, _READ_BYTES)) and not stop.is_set():
            old = [message for message in messages if stream_order(message.id) <= shown]
            if old:
                session.apply(*old)
                session.changes.steps = []
            self._apply(job, messages[len(old) :])
            self._alive_s = time.monotonic()
            if job not in self._owned:
                return
        replayed = len(session.changes.applied)
        log.info("job acquired", job=job, worker=self.name, replayed=replayed)

    def _release(self, job: str, *, commit: bool = True) -> None:
        """Give up the lease of a job; messages that are not committed stay in its stream."""
        if commit:
            self._commit(job)
        owned = self._owned.pop(job, None)
        if owned is not None:
            self._store.renew(owned.lease, ttl_s=0)

    def _renew_leases(self, stop: threading.Event) -> None:
        """Renew the leases during long rounds too; a worker that hangs loses them."""
        while not stop.wait(self._settings.lease_s / 3):
            if self.hangs:
                continue
            leases = [owned.lease for owned in list(self._owned.values())]
            with suppress(redis.RedisError):
                self._store.renew(*leases, ttl_s=self._settings.lease_s)

    def _leave(self) -> None:
        deadline_s = time.monotonic() + _LEAVE_S
        try:
            for job, owned in list(self._owned.items()):
                self._release(job, commit=time.monotonic() + owned.save_cost_s < deadline_s)
            self._store.leave()
        except redis.RedisError as error:
            log.warning("redis unavailable, the leases expire", error=str(error))
        self._planner.close()
        self._store.close()


def _first_bytes(messages: Iterator[JobMessage], most: int) -> list[JobMessage]:
    """The next messages, until their bodies have `most` bytes."""
    taken, size = list[JobMessage](), 0
    for message in messages:
        taken.append(message)
        size += len(message.body)
        if size >= most:
            break
    return taken


def unique_name() -> str:
    """A name that no other worker has."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def work(
    settings: Settings,
    stop: threading.Event,
    adapters: AdapterFactory = load_adapters,
    *,
    name: str | None = None,
    alive: Callable[[], None] = lambda: None,
    patience_s: float = _PATIENCE_S,
) -> None:
    """Run a worker as a process of its own until `stop` is set; `alive` is called at its start, and
    again and again while it does not hang.

    `name` is that of a worker that has died, whose leases it takes over; else it has its own.
    Raises `StartError` if no Redis answers within `patience_s`.
    """
    url = settings.redis_url or f"unix://{socket_path(settings.data)}"
    if not _answers(url, stop, patience_s):
        return
    os.nice(_NICE)
    made = adapters(settings)
    gc.freeze()  # what was imported stays, and need not be looked through
    gc.set_threshold(_COLLECT_AFTER)
    # Signal handlers run in the main thread, which therefore only waits.
    worker = Worker(url, settings, made, name or unique_name())
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    while thread.is_alive():
        if not worker.hangs:
            alive()
        thread.join(0.2)


def _answers(url: str, stop: threading.Event, patience_s: float) -> bool:
    """Wait until Redis answers; False if `stop` is set first. Raises `StartError`."""
    deadline_s = time.monotonic() + patience_s
    is_logged = False
    while not stop.is_set():
        try:
            check_redis(url)
        except NoRedisError:
            if time.monotonic() >= deadline_s:
                raise StartError(
                    f"no Redis answers at {without_password(url)}; "
                    "start `resihp serve` with the same --data or --redis"
                ) from None
            if not is_logged:
                log.info("waiting for Redis", url=without_password(url))
            is_logged = True
            stop.wait(_POLL_S)
        else:
            return True
    return False
