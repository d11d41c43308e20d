"""The worker: takes jobs by lease, feeds their sessions, commits what comes out."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from math import ceil

import redis

from ..errors import LeaseLostError
from ..logs import logger
from ..settings import Settings
from ..store.worker_store import Commit, Lease, WorkerStore
from .adapters import Adapters
from .outbox import Outbox
from .planning import Planner
from .predictor_cache import cache_key
from .session import Session

log = logger("resihp.worker")

_BATCH = 16  # entries taken at a time: bounds memory, and how long a heartbeat waits
_BLOCK_MS = 100
_LONGEST_TICK_S = 1.0  # a worker that was held up does not blame the ranks for it
_DIAGNOSE_EVERY_S = 2.0
# Saving may take this share of a worker's time at most: a costly state is saved less often.
_SAVE_SHARE = 0.1
# Nor may it write more than this to the append-only file; what is not saved can be replayed.
_SAVE_BYTES_PER_S = 4e6
_URGENT = frozenset({"verdict", "plan", "planning", "plan_applied"})


@dataclass
class _OwnedJob:
    """A job that this worker owns."""

    lease: Lease
    session: Session
    committed_s: float
    save_cost_s: float = 0.0
    saved_bytes: int = 0
    published_s: float = float("-inf")
    ticked_s: float = field(default_factory=time.monotonic)
    diagnosed_s: float = float("-inf")
    diagnosed_step: int = -1

    def diagnosis_is_due(self, now_s: float) -> bool:
        """Whether there are steps that the last diagnosis, of some time ago, does not know."""
        is_old = now_s - self.diagnosed_s > _DIAGNOSE_EVERY_S
        return is_old and self.session.last_step > self.diagnosed_step


class Worker:
    """Works until `stop` is set; run it in a thread or as the main of a process."""

    def __init__(self, url: str, settings: Settings, adapters: Adapters) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._settings = settings
        self._adapters = adapters
        self._planner = Planner(adapters, time_limit_s=settings.plan_time_limit_s)
        self._store = WorkerStore(
            url, self.name, keep_events=settings.keep_events, keep_steps=settings.keep_steps
        )
        self._held: dict[str, _OwnedJob] = {}
        self._broken: dict[str, bytes] = {}
        self._balanced_s = float("-inf")
        self._alive_s = time.monotonic()

    def run(self, stop: threading.Event) -> None:
        """Work until `stop`; then commit, give the leases back and close."""
        log.info("worker started", worker=self.name)
        keeper = threading.Thread(target=self._keep_leases, args=(stop,), name="leases")
        keeper.start()
        while not stop.is_set():
            try:
                self._round(stop)
            except redis.RedisError as error:
                log.warning("redis is away, starting from the saved state", error=str(error))
                self._held.clear()
                stop.wait(0.5)
            except Exception:  # the boundary: whatever one job does, the others are served on
                log.exception("unexpected error, starting from the saved state")
                self._held.clear()
                stop.wait(1.0)
        keeper.join()
        self._leave()
        log.info("worker stopped", worker=self.name)

    def _round(self, stop: threading.Event) -> None:
        self._alive_s = now_s = time.monotonic()
        if now_s - self._balanced_s > min(1.0, self._settings.lease_s / 4):
            self._balance()
            self._balanced_s = now_s
        if not self._held:
            stop.wait(_BLOCK_MS / 1e3)
            return
        taken = self._read()
        for job, held in list(self._held.items()):
            self._tick(held, drained=taken[job] < _BATCH)
            if self._is_due(held):
                self._commit(job)
            elif held.session.outbox.steps:
                self._publish(job, held)

    def _read(self) -> Counter[str]:
        leases = {job: held.lease for job, held in self._held.items()}
        taken: Counter[str] = Counter()
        try:
            for job, entry in self._store.read(leases, count=_BATCH, block_ms=_BLOCK_MS):
                taken[job] += 1
                self._held[job].session.apply(entry)
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self._drop_lost()
        return taken

    def _drop_lost(self) -> None:
        """A job was deleted or reset: its message stream is another one, or none."""
        for job, held in list(self._held.items()):
            if not self._store.renew(held.lease, ttl_s=self._settings.lease_s):
                del self._held[job]

    def _tick(self, held: _OwnedJob, *, drained: bool) -> None:
        elapsed_s, held.ticked_s = time.monotonic() - held.ticked_s, time.monotonic()
        if drained:
            held.session.tick(min(elapsed_s, _LONGEST_TICK_S))

    def _is_due(self, held: _OwnedJob) -> bool:
        outbox, since_s = held.session.outbox, time.monotonic() - held.committed_s
        if outbox.plans or any(kind in _URGENT for kind, _ in outbox.events):
            return True
        least_s = max(
            self._settings.commit_every_s,
            held.save_cost_s / _SAVE_SHARE,
            held.saved_bytes / _SAVE_BYTES_PER_S,
        )
        news = outbox.applied or outbox.events or held.diagnosis_is_due(time.monotonic())
        return bool(news) and since_s >= least_s

    def _commit(self, job: str) -> None:
        held = self._held[job]
        begun_s = time.monotonic()
        outbox, held.session.outbox = held.session.outbox, Outbox()
        try:
            self._store.commit(held.lease, self._commit_of(held, outbox))
        except LeaseLostError:
            log.warning("lease lost", job=job, worker=self.name)
            del self._held[job]
            return
        if (learned := held.session.learned()) is not None:
            self._store.keep_predictor(*learned)
        held.committed_s = held.published_s = time.monotonic()
        held.save_cost_s = held.committed_s - begun_s

    def _publish(self, job: str, held: _OwnedJob) -> None:
        """Show the steps and the status of a job whose state is too large to be saved often."""
        now_s = time.monotonic()
        if now_s - held.published_s < self._settings.commit_every_s:
            return
        outbox = held.session.outbox
        outbox.steps, steps = [], outbox.steps
        try:
            self._store.publish(held.lease, held.session.status(), steps)
        except LeaseLostError:
            del self._held[job]
        held.published_s = now_s

    def _commit_of(self, held: _OwnedJob, outbox: Outbox) -> Commit:
        detector, rest = held.session.save()
        state = {"detector": detector, "session": rest}
        held.saved_bytes = len(detector) + len(rest)
        if outbox.applied:
            state["applied"] = outbox.applied[-1].encode()
        status = held.session.status()
        now_s = time.monotonic()
        if held.diagnosis_is_due(now_s):
            if (diagnosis := held.session.diagnosis()) is not None:
                status["diagnosis"] = diagnosis
            held.diagnosed_s, held.diagnosed_step = now_s, held.session.last_step
        counts = {
            "applied_messages": len(outbox.applied),
            "applied_records": outbox.records,
            "plans": len(outbox.plans),
            "verdicts": sum(kind == "verdict" for kind, _ in outbox.events),
            "errors": sum(kind == "error" for kind, _ in outbox.events),
        }
        return Commit(
            applied=outbox.applied,
            applied_bytes=outbox.applied_bytes,
            state=state,
            status=status,
            events=outbox.events,
            steps=outbox.steps,
            plans=outbox.plans,
            newest=held.session.plan.version,
            counts=counts,
        )

    def _balance(self) -> None:
        """Take jobs that nobody works on, and give some away if other workers have fewer."""
        workers = self._store.workers(time.time(), ttl_s=self._settings.lease_s)
        jobs = self._store.jobs()
        share = ceil(len(jobs) / max(workers, 1))
        for job in [job for job in self._held if job not in jobs]:
            del self._held[job]
        for job in list(self._held)[share:]:
            self._give_back(job)
        for job in jobs:
            if job not in self._held and len(self._held) < share:
                self._try_to_take(job)

    def _try_to_take(self, job: str) -> None:
        lease = self._store.acquire(job, ttl_s=self._settings.lease_s)
        if lease is None or self._broken.get(job) == lease.generation:
            return
        try:
            self._take(job, lease)
        except redis.RedisError:
            raise
        except Exception:  # a state or entry that cannot be read, in whatever way it fails
            log.exception("job left alone until it is registered anew", job=job)
            self._broken[job] = lease.generation
            self._held.pop(job, None)

    def _take(self, job: str, lease: Lease) -> None:
        loaded = self._store.load(job)
        if loaded is None:
            return
        description, plan, saved = loaded
        kind = cache_key(description)
        stored = self._store.predictor(kind) if kind is not None else None
        session = Session(description, plan, self._adapters, self._planner, stored)
        if saved:
            session.resume(saved["detector"], saved["session"])
        self._held[job] = _OwnedJob(lease, session, committed_s=time.monotonic())
        for entry in self._store.claim(lease, saved.get("applied", b"0-0").decode()):
            session.apply(entry)
        published = int(saved.get("published_step", b"-1"))
        replayed = session.outbox
        replayed.steps = [step for step in replayed.steps if step["step"] > published]
        log.info("job taken", job=job, worker=self.name, replayed=len(session.outbox.applied))

    def _give_back(self, job: str) -> None:
        self._commit(job)
        held = self._held.pop(job, None)
        if held is not None:
            self._store.renew(held.lease, ttl_s=0)

    def _keep_leases(self, stop: threading.Event) -> None:
        """Renew the leases while the worker is at it, however long one batch takes; a worker
        that is stuck for good loses them."""
        stuck_s = 12 * self._settings.lease_s
        while not stop.wait(self._settings.lease_s / 3):
            if time.monotonic() - self._alive_s > stuck_s:
                continue
            for held in list(self._held.values()):
                try:
                    self._store.renew(held.lease, ttl_s=self._settings.lease_s)
                except redis.RedisError:
                    break

    def _leave(self) -> None:
        try:
            for job in list(self._held):
                self._give_back(job)
            self._store.leave()
        except redis.RedisError as error:
            log.warning("redis is away, leases run out by themselves", error=str(error))
        self._planner.close()
        self._store.close()
