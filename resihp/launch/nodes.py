"""Place of this launcher among those of the job, by the store of the job."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

from resihp import __version__
from resihp._preemption import PreemptionNotice
from resihp.contracts import FencedOutError, JobStoppedError
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.environment import store_prefix
from resihp.elastic.rendezvous.store import (
    address_towards,
    announce_death,
    await_store,
    connect_store,
    host_store,
)

from .attempts import Attempt, AttemptEnd, EndKind, JobEnd, JobIdentity, NodeOffer
from .coordinator import AttemptCoordinator
from .heartbeats import LauncherHeartbeats
from .launcher_store import LauncherStore
from .options import NO_RUN, Options
from .replicated_store import open_replicated_store
from .restart_plans import RestartPlanPoller
from .store_url import StoreUrl

_log = logging.getLogger("resihp.launch")
T = TypeVar("T")


class Nodes:
    """Attempts of the job as this launcher sees them: it takes part, waits, or leaves.

    Raises `JobStoppedError` if the store is gone, as nodes cannot agree without it, and
    `FencedOutError` once the others have given this launcher up.

    id      of this launcher
    notice  whether this node is about to be taken away
    plans   asked once this launcher decides; None without a sidecar
    on_wait
            called again and again while a request waits for a store that does not answer
    """

    def __init__(
        self, options: Options, notice: PreemptionNotice, plans: RestartPlanPoller | None = None
    ) -> None:
        self._options, self._notice = options, notice
        self.id = f"{options.node}-{uuid.uuid4().hex[:8]}"
        self._plans = plans
        self.on_wait: Callable[[], object] = bool
        self._server: dist.TCPStore | None = None  # of the ranks of the newest attempt
        self._hosted: dist.TCPStore | None = None  # the same, as long as it is hosted here
        if not options.outlives_nodes:
            open_store = host_store
            if options.node or options.joins:
                await_store(options.host, options.port, options.connect)
                open_store = connect_store
            self._server = open_store(options.host, options.port, options.connect)
        self._of_launchers = self._server  # a store ends with the object that hosts it
        self._port = options.port if self._server is None else self._server.port
        self._of_ranks: dist.Store = self._server or dist.HashStore()
        opened = self._opened(self._waits)
        self._address = options.host
        if options.outlives_nodes:
            self._address = self.own_address
            self._forget_failed_run(LauncherStore(opened))
        self._store = LauncherStore(opened)  # keeps nothing of the run before
        self._options = options = replace(options, run=self._agreed_run())
        self._heartbeats: LauncherHeartbeats | None = None
        if options.nodes > 1 or options.outlives_nodes:
            self._heartbeats = LauncherHeartbeats(
                self._opened, self.id, options.heartbeat, self._store.restore
            )
        self._coordinator: AttemptCoordinator | None = None
        if not options.joins and (options.node == 0 or options.outlives_nodes):
            self._coordinate(after="")
        self._recovering: set[int] = set()
        self._gone_since_s = inf
        _log.info("store at %s:%d, of %d nodes", options.host, self._port, options.nodes)

    @property
    def run(self) -> str:
        """Identity of the job."""
        return self._options.run

    @property
    def own_address(self) -> str:
        """Address of this node on its route to the store: to its first server that has one.

        Raises `JobStoppedError` if there is none.
        """
        servers = [(self._options.host, self._options.port or 1)]
        if self._options.store_url is not None:
            servers = list(StoreUrl.parse(self._options.store_url).servers)
        for host, port in servers[:-1]:
            with suppress(JobStoppedError):  # such as a name that is gone with its server
                return address_towards(host, port)
        return address_towards(*servers[-1])

    @property
    def is_coordinator(self) -> bool:
        """True if this launcher decides about attempts."""
        return self._coordinator is not None

    # Attempts.

    def begin(self, offer: NodeOffer, on_standby: Callable[[], object]) -> Attempt | JobEnd:
        """Join the job; returns the first attempt that has a place for this node.

        on_standby  called if there is none yet
        """
        if self._options.joins:
            return self._joined()
        self._store.announce(offer)
        if self._coordinator is not None:
            return self._publish(0, self._coordinator.first()) or self._follow(0)
        return self._follow(self._store.newest(), on_standby=on_standby)

    def conclude(self, attempt: Attempt, offer: NodeOffer, step: int) -> Attempt | JobEnd:
        """Report that this node's ranks have ended; returns what follows.

        step  last step whose state this node keeps
        """
        number = attempt.number
        self._store.report(number, offer)
        if offer.leaves and (self._coordinator is None or self._options.outlives_nodes):
            return self._left()
        decided = None
        if self._coordinator is not None:
            decided = self._publish(number + 1, self._coordinator.next(attempt, step))
        return decided or self._follow(number + 1, after=(attempt, step))

    def attend(self, attempt: Attempt, step: int, *, takes_plans: bool) -> None:
        """Look for lost nodes and plans, as the coordinator; called again and again while ranks
        run.

        step         last step whose state this node keeps
        takes_plans  no rank has completed the job yet
        """
        if self._options.joins or self.recovers(attempt):
            return
        self._coordinate_if_needed(attempt)
        if self._coordinator is not None:
            self._coordinator.attend(attempt, step, takes_plans=takes_plans)

    def end_of(self, attempt: Attempt) -> AttemptEnd | None:
        """Reason to end the ranks of an attempt; None where the script itself goes on."""
        self._check()
        end = None if self._options.joins else self._store.end_of(attempt.number)
        return None if end is None or self.recovers(attempt) else end

    def end(self, attempt: Attempt, end: AttemptEnd) -> None:
        """End an attempt on all nodes, unless that was done for another reason."""
        self._store.end(attempt.number, end)

    def leave(self, attempt: Attempt) -> None:
        """End an attempt, as this node is about to be taken away: the next is without it."""
        why = f"node {self._options.node} leaves the job ({self._notice.why})"
        self.end(attempt, AttemptEnd(EndKind.NOTICE, why))
        if self._coordinator is None or self._options.outlives_nodes:
            self._store.mark(self.id, "leaves")

    def close(self) -> None:
        """Leave the job."""
        if self._heartbeats is not None:
            self._heartbeats.close()
            if self._options.outlives_nodes:
                self._store.set_timeout(timedelta(0))
            try:
                self._store.mark(self.id, "left")
            except dist.DistError:
                _log.debug("the store is gone")

    # Scripts of the elastic runtime, which go on without a lost rank.

    def announce_death(self, rank: int) -> None:
        """Tell the ranks of the elastic runtime that a rank has ended."""
        try:
            self._ask_ranks_store(lambda store: announce_death(store, rank))
        except dist.DistError as error:
            _log.warning("the death of rank %d is not announced: %s", rank, error)

    def recovers(self, attempt: Attempt) -> bool:
        """True if the script itself goes on without a lost rank, by ResiHP's elastic runtime."""
        number = attempt.number
        try:
            if number not in self._recovering and self._ask_ranks_store(
                lambda store: bool(store.check([keys.model()]))
            ):
                self._recovering.add(number)
        except dist.DistError:
            _log.debug("the host of the ranks' store is gone, or has begun the next attempt")
        return number in self._recovering

    def stop(self) -> None:
        """Let the ranks of the elastic runtime end after the current step."""

        def tell(store: dist.Store) -> None:
            store.set(keys.STOPPED, "the launcher was told to end the job")
            store.add(keys.SIGNAL, 1)

        try:
            self._ask_ranks_store(tell)
        except dist.DistError as error:
            _log.warning("the ranks are not told to end together: %s", error)

    def _ask_ranks_store(self, request: Callable[[dist.Store], T]) -> T:
        """Return the answer of the store of the attempt's ranks.

        Raises `DistError` if its host is gone, or does not answer although the launchers' store
        does: torch bounds no wait for a host that hangs.
        """
        store = self._of_ranks
        if not self._options.outlives_nodes:
            return self._answer(store, request)
        answers = SimpleQueue[T | dist.DistError]()

        def ask() -> None:
            try:
                answers.put(self._answer(store, request))
            except dist.DistError as error:
                answers.put(error)

        Thread(target=ask, daemon=True).start()
        try:
            answer = answers.get(timeout=self._options.heartbeat.total_seconds() / 2)
        except Empty:
            raise dist.DistError("the host of the ranks' store does not answer") from None
        if isinstance(answer, dist.DistError):
            raise answer
        return answer

    def _answer(self, store: dist.Store, request: Callable[[dist.Store], T]) -> T:
        """Return the answer of a store, which is not asked again if its host is gone."""
        try:
            return request(store)
        except dist.DistError:
            if self._of_ranks is store:
                self._of_ranks = dist.HashStore()
            raise

    # Steps of the agreement.

    def _opened(self, on_wait: Callable[[], object] = bool) -> dist.Store:
        """A connection to the launchers' store."""
        options = self._options
        if options.store_url is not None:
            return open_replicated_store(options.store_url, options.run, options.heartbeat, on_wait)
        store = connect_store(options.host, self._port, options.connect)
        return dist.PrefixStore("resihp-run", store)

    def _agreed_run(self) -> str:
        """Identity of the job, which a launcher without one takes from the store.

        Raises `JobStoppedError` where the store is of another job, or of another version.
        """
        options, own = self._options, JobIdentity(self._options.run, __version__)
        where = f"{options.host}:{self._port}"
        if options.outlives_nodes or not (options.node or options.joins):
            found = self._store.identify(own)
        else:
            try:
                found = self._store.job()
            except dist.DistError as error:
                raise JobStoppedError(f"no launcher has said whose store {where} is") from error
        if own.run not in (found.run, NO_RUN):
            raise JobStoppedError(f"{where} is the store of the job {found.run!r}, not {own.run!r}")
        if own.version != found.version:
            versions = f"{found.version}, this one {own.version}"
            raise JobStoppedError(f"launchers of the job {found.run!r} have ResiHP {versions}")
        return found.run

    def _waits(self) -> None:
        self.on_wait()

    def _forget_failed_run(self, store: LauncherStore) -> None:
        """Begin anew after an earlier run of the job that did not complete it, once the launchers
        of that one have left, or would be taken for lost."""
        deadline = time.monotonic() + self._options.heartbeat.total_seconds()
        while (status := store.failed_status()) is not None:
            if store.all_left() or time.monotonic() >= deadline:
                if store.forget_failed():
                    _log.info("the last run of this job ended with %d: it begins anew", status)
                return
            time.sleep(self._options.poll_s)

    def _coordinate(self, after: str, token: str = "") -> bool:
        """Become the coordinator; False if another launcher is."""
        if not self._store.coordinate(self.id, after):
            return False
        if self._heartbeats is not None:
            self._heartbeats.coordinates = True
        self._coordinator = AttemptCoordinator(
            self._options, self._store, self._heartbeats, self._plans, self._notice, token
        )
        if self._plans is not None:
            self._plans.start()
        return True

    def _stop_coordinating(self) -> None:
        """Go on as one launcher of many: after a pause of this one another decides."""
        _log.warning("another launcher decides from now on")
        self._coordinator = None
        if self._heartbeats is not None:
            self._heartbeats.coordinates = False

    def _coordinate_if_needed(self, attempt: Attempt | None) -> None:
        """Take the place of a coordinator that is gone; a standby lets nodes of the attempt go
        first."""
        is_replaced = self._heartbeats is not None and self._heartbeats.is_replaced
        if self._coordinator is not None and is_replaced:
            self._stop_coordinating()
        gone = self._heartbeats.silent_coordinator if self._heartbeats is not None else None
        if gone is None or self._coordinator is not None or not self._options.outlives_nodes:
            self._gone_since_s = inf
            return
        self._gone_since_s = min(self._gone_since_s, time.monotonic())
        is_standby = attempt is not None and attempt.index_of(self.id) is None
        waited_s = time.monotonic() - self._gone_since_s
        if is_standby and waited_s < self._options.heartbeat.total_seconds():
            return
        if self._coordinate(gone, attempt.token if attempt is not None else ""):
            _log.warning("launcher %s is gone: this one decides from now on", gone)
            if self._plans is not None and attempt is not None:
                self._plans.resume(attempt.world_size)

    def _publish(self, number: int, what: Attempt | JobEnd) -> Attempt | JobEnd | None:
        """Publish what comes next, as the coordinator; waits until the others know of the end.

        Returns None if another launcher decides: it has taken this one for gone.
        The ranks of the first attempt meet at the launchers' store if that is torch's, those of any
        other at a store of its own: torch expects no keys of another attempt there.
        """
        if isinstance(what, Attempt):
            if number or self._server is None:
                self._server = self._hosted = host_store(self._address, 0, self._options.connect)
            what = replace(what, host=self._address, port=self._server.port)
            self._of_ranks = self._ranks_store(number)
        if not self._store.publish(number, what):
            self._stop_coordinating()
            return None
        if isinstance(what, JobEnd) and self._heartbeats is not None:
            self._await_readers(number)
        return what

    def _await_readers(self, number: int) -> None:
        assert self._heartbeats is not None
        deadline = time.monotonic() + self._options.heartbeat.total_seconds()
        while time.monotonic() < deadline:
            silent = self._heartbeats.silent
            others = [
                offer.id
                for offer in self._store.announced()
                if offer.id not in silent and not self._store.is_marked(offer.id, "left")
            ]
            if self._store.note_read(number, 0) >= len(others) - 1:
                return
            time.sleep(self._options.poll_s)

    def _follow(
        self,
        number: int,
        *,
        after: tuple[Attempt, int] | None = None,
        on_standby: Callable[[], object] = bool,
    ) -> Attempt | JobEnd:
        """Wait for the first attempt from `number` on that has a place for this node; decide about
        it if the coordinator is gone.

        after  the attempt before, and the last step that this node keeps of it
        """
        is_standby = False
        while True:
            found = self._store.attempt(number)
            if isinstance(found, JobEnd):
                self._store.note_read(number)
                return found
            if found is not None and found.index_of(self.id) is not None:
                self._meet(found)
                return found
            if found is not None:
                number, after = number + 1, (found, -1)
                if not is_standby:
                    _log.info("this node waits as a standby: attempt %d runs", found.number)
                    on_standby()
                is_standby = True
                continue
            self._check()
            if self._notice.why is not None:
                return self._left()
            self._coordinate_if_needed(after[0] if after is not None else None)
            if self._coordinator is None:
                time.sleep(self._options.poll_s)
                continue
            decided = self._coordinator
            self._publish(number, decided.first() if after is None else decided.next(*after))

    def _joined(self) -> Attempt | JobEnd:
        """The attempt that joiners of the elastic runtime take part in, once there is one."""
        deadline = time.monotonic() + self._options.arrival_s
        while (found := self._store.attempt(self._store.newest())) is None:
            if self._notice.why is not None:
                return self._left()
            if time.monotonic() >= deadline:
                raise JobStoppedError("the job has not started")
            time.sleep(self._options.poll_s)
        if isinstance(found, JobEnd):
            raise JobStoppedError("the job has ended")
        self._meet(found)
        return found

    def _meet(self, attempt: Attempt) -> None:
        """Open the store of an attempt's ranks; without it, they fail by themselves."""
        try:
            host = attempt.host or self._options.host
            self._server = connect_store(host, attempt.port, self._options.connect)
            self._of_ranks = self._ranks_store(attempt.number)
        except JobStoppedError:
            if not self._options.outlives_nodes:
                raise
            self._of_ranks = dist.HashStore()

    def _left(self) -> JobEnd:
        why = f"{self._notice.why}: this node leaves the job"
        return JobEnd(self._notice.status, why, goes_on=True)

    def _ranks_store(self, number: int) -> dist.Store:
        assert self._server is not None
        return dist.PrefixStore(store_prefix(self._options.run, str(number)), self._server)

    def _check(self) -> None:
        if self._heartbeats is not None and self._heartbeats.is_given_up:
            silence = f"{self._options.heartbeat.total_seconds():g} s"
            raise FencedOutError(f"the others go on without this node: it was silent for {silence}")
