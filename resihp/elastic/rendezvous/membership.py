"""Membership of the ranks of a job, observed through a store that no rank hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from resihp.contracts import JobStoppedError, PeerLostError

from ..process_groups.abortable import ProcessGroupFactory, WaitClock
from ..process_groups.communicators import CPU
from . import keys
from .heartbeats import REQUESTS_PER_S, Heartbeats, prepare
from .store import StorePool, Timeouts

_LONGEST_PAUSE_S = 0.02
_JOIN_S = 0.01


@dataclass(frozen=True)
class _Scope:
    """Work of one thread that only a loss among `ranks` interrupts."""

    work: str
    ranks: tuple[int, ...]
    thread: int


class Rendezvous:
    """One rank's view of the members of its job. `start` begins to watch the store in a thread.

    Once the store is gone (`stores.is_cut_off`) training continues in the present generation; a
    loss then stops the job. A loss shows in an exchange that fails. gloo may not notice that the
    peer of an exchange has died: on the same host the kernel tells it, between hosts it shows after
    `Timeouts.exchange`.

    host      address by which peers reach this rank
    ranks     all members; none for a joiner, which sends no heartbeats before `enter`: another
              process with its rank may still be a member
    alive     members of the present generation
    recovery  number of recoveries so far
    is_joining  a joiner whose first generation is not committed: the members do not count it yet
    """

    def __init__(
        self,
        open_store: Callable[[], dist.Store],
        rank: int,
        ranks: Collection[int],
        timeouts: Timeouts,
        *,
        host: str = "127.0.0.1",
    ) -> None:
        self.host = host
        self.rank, self.timeouts = rank, timeouts
        self.alive = tuple(sorted(ranks))
        self.recovery = 0
        self.is_joining = False
        self.stores = StorePool(open_store)
        self.stores.ask(lambda: prepare(self.stores.store), None)
        self._heartbeats, self._is_entering = Heartbeats(rank, timeouts), False
        self._broken: str | None = None
        self._scope: _Scope | None = None
        self._broken_in_scope: str | None = None
        self._has_ended = False
        self._stopped: str | None = None
        self._changed = threading.Condition()
        self._closed, self._woken = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="resihp-rendezvous", daemon=True)

    def start(self, model: str = "", *, part: int = 0) -> None:
        """Start to watch the store and to send heartbeats.

        model  description of the model that this process trains; a joiner's must be the same
        part   of the model that this process holds, where it is only a part

        A member has beaten when this returns, so that peers apply `Timeouts.heartbeat` to it from
        now on, and no longer `Timeouts.connect`.
        """
        if self.rank in self.alive:
            stores = self.stores
            stores.ask(lambda: stores.store.compare_set(keys.model(part), "", model), b"")
            stores.ask(lambda: self._heartbeats.enter(stores.store), None)
        self._watcher.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._woken.set()
        self._watcher.join(timeout=5)
        self._heartbeats.close()

    # Members.

    def enter(self, recovery: int, alive: tuple[int, ...], *, is_joining: bool = False) -> None:
        """Be one of the members `alive` after `recovery` recoveries.

        Failures before that do not count.
        """
        with self._changed:
            self.recovery, self.alive, self.is_joining = recovery, alive, is_joining
            self._is_entering, self._broken = True, None

    def change_members(self, alive: tuple[int, ...]) -> None:
        """Continue with the members `alive`, without a failure; outside of them no heartbeats."""
        with self._changed:
            self.alive, self.is_joining = alive, False

    def barrier(
        self, name: str, ranks: Collection[int], cancelled: threading.Event, *, is_starting: bool
    ) -> None:
        """Return when all `ranks`, this one included, have called this with the same `name`.

        A group's constructor blocks in the store until all peers have published their addresses,
        and cannot be cancelled; so no rank calls it before all ranks have arrived here. Each rank
        calls this once for a name. At the start of a job processes come at their own pace. Raises
        `PeerLostError` once `cancelled`, after a failure, if a rank will not arrive, and after
        `Timeouts.exchange`.
        """
        start, pause_s = time.monotonic(), 0.001
        longest_s = max(_LONGEST_PAUSE_S, len(ranks) / REQUESTS_PER_S)
        key, store, timeout = keys.arrivals(name), self.stores.store, self.timeouts.exchange
        arrived = store.add(key, 1)
        while arrived < len(ranks):
            waited_s = time.monotonic() - start
            if cancelled.is_set():
                raise PeerLostError("cancelled")
            self.check(tuple(ranks), 0.0)
            lost = self.lost(ranks, self._silence_s(waited_s, is_starting=is_starting))
            if lost:
                raise PeerLostError(f"ranks {lost} are dead or do not answer")
            if waited_s > timeout.total_seconds():
                raise PeerLostError(f"{arrived} of {len(ranks)} ranks arrived within {timeout}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
            arrived = store.add(key, 0)

    @contextmanager
    def group_factory(
        self,
        waited: WaitClock,
        *,
        cancelled: threading.Event | None = None,
        connect: timedelta | None = None,
        device: torch.device = CPU,
    ) -> Iterator[ProcessGroupFactory]:
        """Factory whose groups abort with the generation, or when `cancelled` is set."""
        store = self.stores.borrow()

        def broken(ranks: Sequence[int], waited_s: float) -> str | None:
            is_cancelled = cancelled is not None and cancelled.is_set()
            return "cancelled" if is_cancelled else self.broken(ranks, waited_s)

        yield ProcessGroupFactory(
            store,
            self.rank,
            broken=broken,
            timeout=self.timeouts.exchange,
            connect=connect or self.timeouts.connect,
            waited=waited,
            host=self.host,
            device=device,
        )
        # Not after an exception: a thread of the failed attempt may be blocked in the store.
        self.stores.give_back(store)

    # Failures.

    @property
    def is_broken(self) -> bool:
        """True once this rank has learned of a failure in the present generation."""
        return self._broken is not None

    def broken(self, ranks: Sequence[int], waited_s: float) -> str | None:
        """Reason to give up waiting for `ranks`, or None; every wait of any thread asks this."""
        scope = self._scope
        if scope is not None and scope.thread != threading.get_ident():
            scope = None
        known = self._broken if scope is None else self._broken_in_scope
        if known is None and waited_s > 1.0:
            silent = self.lost(ranks if scope is None else scope.ranks, waited_s)
            if silent:
                reason = f"ranks {silent} do not answer"
                if scope is not None:
                    self._broken_in_scope = reason
                self.request_recovery(reason)
        return self._broken if scope is None else self._broken_in_scope

    def lost(self, ranks: Collection[int], waited_s: float) -> list[int]:
        """Return those of `ranks` that are dead or do not answer, `waited_s` seconds into a wait.

        A rank that has not started yet is waited for until `Timeouts.connect` has passed. The store
        is asked by the watching thread, so a store that is silent delays no wait; until it answers
        no rank is known to be lost. Ask again while you wait. After `close` this thread asks it.
        """
        if self.stores.is_cut_off:
            return self._heartbeats.ended_on_host(ranks)
        if self._closed.is_set():
            beats, stores, members = self._heartbeats, self.stores, len(self.alive)
            return stores.ask(lambda: beats.silent(stores.store, ranks, waited_s, members), [])
        lost = self._heartbeats.known_silent(ranks, waited_s)
        if self._heartbeats.is_refresh_due(len(self.alive)):
            self._woken.set()
        return lost

    @property
    def pause_s(self) -> float:
        """Time between two requests of a rank that waits for a key."""
        return max(0.005, len(self.alive) / REQUESTS_PER_S)

    def check(self, ranks: Sequence[int], waited_s: float) -> None:
        """Raise `PeerLostError` with the reason to give up waiting for `ranks`, if there is one."""
        reason = self.broken(ranks, waited_s)
        if reason is not None:
            raise PeerLostError(reason)

    def join(self, thread: threading.Thread, ranks: Sequence[int], *, is_starting: bool) -> None:
        """Wait for a thread that builds groups of `ranks`. Raises `PeerLostError`.

        At the start of a job processes come at their own pace: one that has not come is no loss.
        """
        waited_s = 0.0
        while thread.is_alive():
            thread.join(_JOIN_S)
            waited_s += _JOIN_S
            self.check(ranks, self._silence_s(waited_s, is_starting=is_starting))

    def _silence_s(self, waited_s: float, *, is_starting: bool) -> float:
        """Return the wait to tell `lost`: at the start never so long that it awaits no newcomer."""
        return min(waited_s, self.timeouts.connect.total_seconds()) if is_starting else waited_s

    @contextmanager
    def failure_scope(self, work: str, ranks: Sequence[int]) -> Iterator[None]:
        """Confine failures to `ranks` while the calling thread does `work`.

        Inside, `broken` returns a reason only once one of these ranks is lost or has abandoned
        `work`. Other failures are reported after the work.
        """
        self._broken_in_scope = None
        self._scope = _Scope(work, tuple(ranks), threading.get_ident())
        try:
            yield
        finally:
            self._scope = None

    def request_recovery(self, reason: str, abandoned: Collection[str] = ()) -> None:
        """Make every rank leave the present generation; this rank gives up its `abandoned` work.

        Raises `JobStoppedError` if the store is gone or its launcher ends the job.
        """
        self._broken = reason
        if self.stores.is_cut_off:
            raise JobStoppedError(f"{reason}; survivors cannot agree: the store is gone")
        with self.stores.required(f"{reason}; survivors cannot agree") as store:
            self._read_stopped(store)
            self.check_stopped()
            for work in abandoned:
                store.set(keys.abandoned(self.recovery, work), "1")
            store.compare_set(keys.broken(self.recovery), "", reason)
            store.add(keys.SIGNAL, 1)

    def check_stopped(self) -> None:
        """Raise `JobStoppedError` if the launcher that hosts the store ends the job."""
        if self._stopped is not None:
            raise JobStoppedError(self._stopped)

    def is_stopping(self) -> bool:
        """Return whether the launcher that hosts the store ends the job."""
        return bool(self.stores.ask(lambda: self.stores.store.check([keys.STOPPED]), False))

    # The end of the job.

    def finish(self, ranks: Collection[int]) -> str | None:
        """End the job: release idle ranks, and wait until all `ranks` that live have completed it.

        Returns the reason for which one of them asks for a recovery meanwhile; call it again after
        that. A rank that lost a peer in the last step may need what the others know of it.
        """
        if self.stores.is_cut_off:
            return None
        store, due = self.stores.store, len(set(ranks) & set(self.alive or ranks))
        deadline = time.monotonic() + self.timeouts.heartbeat.total_seconds()
        with suppress(dist.DistError):  # its host has ended first
            if not self._has_ended:
                store.set(keys.FINISHED, "1")
                store.add(keys.SIGNAL, 1)
                store.add(keys.ENDED, 1)
                self._has_ended = True
            while store.add(keys.ENDED, 0) < due and time.monotonic() < deadline:
                if self._broken is not None:
                    return self._broken
                time.sleep(0.01)
        return None

    def is_finished(self) -> bool:
        """True once the job has finished. Raises `JobStoppedError` if the store is gone."""
        is_set = self.stores.ask(lambda: self.stores.store.check([keys.FINISHED]), False)
        if self.stores.is_cut_off:
            raise JobStoppedError("the store is gone: an idle rank cannot take part any more")
        return bool(is_set)

    # Changes in the store.

    def wait_for_change(self) -> None:
        """Sleep until the store's signal changes, at most for a second."""
        with self._changed:
            self._changed.wait(timeout=1.0)

    def _read_stopped(self, store: dist.Store) -> None:
        if self._stopped is None and store.check([keys.STOPPED]):
            self._stopped = store.get(keys.STOPPED).decode()

    def _watch(self) -> None:
        store: dist.Store | None = None
        try:
            store = self.stores.open()
        except (dist.DistError, JobStoppedError) as error:
            self.stores.cut_off(error)
        while store is not None and not self._closed.is_set():
            try:
                self._watch_store(store)
            except dist.DistError as error:
                store = self.stores.reopen(store, error)
                self.stores.is_there()  # the other connection has broken at the same time
        self._watch_host()

    def _beat(self, store: dist.Store) -> float:
        """Beat as a member, and take part in the watch of the others.

        Returns seconds until it is to be called again.
        """
        beats, poll_s = self._heartbeats, self.timeouts.poll.total_seconds()
        if self.rank not in self.alive:
            self._is_entering = True
            return poll_s
        if self._is_entering:
            self._is_entering = False
            try:
                beats.enter(store)
            except dist.DistError:
                self._is_entering = True
                raise
        beats.beat()
        if beats.due_s() <= 0.0:
            beats.watch(store)
        return min(poll_s, max(beats.due_s(), 0.0))

    def _watch_store(self, store: dist.Store) -> None:
        seen, next_s, pause_s = (0, 0), time.monotonic(), self.timeouts.poll.total_seconds()
        while not self._is_closed_within(pause_s):
            pause_s, now_s = self._beat(store), time.monotonic()
            self._heartbeats.refresh(store, len(self.alive))
            if now_s >= next_s:
                poll_s = self.timeouts.poll.total_seconds()
                next_s = now_s + max(poll_s, len(self.alive) / REQUESTS_PER_S)
                seen = self._read_changes(store, seen)
            pause_s = min(pause_s, max(next_s - time.monotonic(), 0.0))

    def _watch_host(self) -> None:
        """Beat, and watch the processes of this host, without a store."""
        beats, pause_s = self._heartbeats, self.timeouts.poll.total_seconds()
        while not self._closed.is_set():
            beats.beat()
            if beats.due_s() <= 0.0:
                beats.watch_host()
            self._is_closed_within(pause_s)

    def _is_closed_within(self, pause_s: float) -> bool:
        self._woken.wait(pause_s)
        self._woken.clear()
        return self._closed.is_set()

    def _read_changes(self, store: dist.Store, seen: tuple[int, int]) -> tuple[int, int]:
        """Read the store if its signal is not the one `seen`; returns the present one."""
        # A failure of the next generation may have been reported before this rank's recovery.
        now = (store.add(keys.SIGNAL, 0), self.recovery)
        if now == seen and not (self._broken and self._scope):
            return seen
        self._read_stopped(store)
        (_, recovery), scope, broken = now, self._scope, self._broken
        if broken is None and store.check([keys.broken(recovery)]):
            broken = store.get(keys.broken(recovery)).decode()
        is_abandoned = scope is not None and store.check([keys.abandoned(recovery, scope.work)])
        with self._changed:  # not held while the store is asked: `enter` takes it
            if recovery == self.recovery:
                self._broken = self._broken or broken
                if is_abandoned and scope is self._scope:
                    self._broken_in_scope = self._broken
            self._changed.notify_all()
        return now
