"""Place of this launcher among those of the job, by the store that node 0 hosts."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from resihp.contracts import FencedOutError, JobStoppedError
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.environment import store_prefix
from resihp.elastic.rendezvous.store import announce_death, connect_store, host_store

from .attempts import Attempt, AttemptEnd, EndKind, JobEnd, NodeOffer
from .coordinator import AttemptCoordinator
from .heartbeats import LauncherHeartbeats
from .launcher_store import LauncherStore
from .options import Options
from .preemption import PreemptionNotice
from .restart_plans import RestartPlanPoller

_log = logging.getLogger("resihp.launch")


class Nodes:
    """Attempts of the job as this launcher sees them: it takes part, waits, or leaves.

    Raises `JobStoppedError` if the store is gone, as nodes cannot agree without it, and
    `FencedOutError` once node 0 has given this launcher up.

    id       of this launcher
    is_host  this launcher is node 0's: it hosts the store and decides
    notice   whether this node is about to be taken away
    plans    None on other nodes than 0, and without a sidecar
    """

    def __init__(
        self, options: Options, notice: PreemptionNotice, plans: RestartPlanPoller | None = None
    ) -> None:
        self._options, self._notice = options, notice
        self.id = f"{options.node}-{uuid.uuid4().hex[:8]}"
        self.is_host = options.node == 0 and not options.joins
        open_store = host_store if self.is_host else connect_store
        server = open_store(options.host, options.port, options.connect)
        self._server = server
        self._of_ranks: dist.Store = server
        self._store = LauncherStore(server)
        self._heartbeats: LauncherHeartbeats | None = None
        if options.nodes > 1:
            self._heartbeats = LauncherHeartbeats(
                lambda: connect_store(options.host, server.port, options.connect),
                self.id,
                options.heartbeat,
                reads_others=self.is_host,
            )
        self._coordinator: AttemptCoordinator | None = None
        if self.is_host:
            self._coordinator = AttemptCoordinator(
                options, self._store, self._heartbeats, plans, notice
            )
        self._recovering: set[int] = set()
        _log.info("store at %s:%d, of %d nodes", options.host, server.port, options.nodes)

    # Attempts.

    def begin(self, offer: NodeOffer, on_standby: Callable[[], object]) -> Attempt | JobEnd:
        """Join the job; returns the first attempt that has a place for this node.

        on_standby  called if there is none yet
        """
        if self._options.joins:
            return self._joined()
        self._store.announce(offer)
        if self._coordinator is not None:
            return self._publish(0, self._coordinator.first())
        return self._follow(self._store.newest(), on_standby)

    def conclude(self, attempt: Attempt, offer: NodeOffer, step: int) -> Attempt | JobEnd:
        """Report that this node's ranks have ended; returns what follows.

        step  last step whose state this node keeps
        """
        number = attempt.number
        self._store.report(number, offer)
        if self._coordinator is not None:
            following = self._coordinator.next(attempt, step)
            return self._publish(number + 1, following)
        if offer.leaves:
            return self._left()
        return self._follow(number + 1)

    def attend(self, attempt: Attempt, step: int, *, takes_plans: bool) -> None:
        """On node 0, look for lost nodes and plans; called again and again while ranks run.

        step         last step whose state this node keeps
        takes_plans  no rank has completed the job yet
        """
        if self._coordinator is not None and not self.recovers(attempt):
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
        if not self.is_host:  # which the job cannot go on without
            self._store.mark(self.id, "leaves")

    def close(self) -> None:
        """Leave the job."""
        if self._heartbeats is not None:
            self._heartbeats.close()
            try:
                self._store.mark(self.id, "left")
            except dist.DistError:
                _log.debug("the store is gone")

    # Scripts of the elastic runtime, which go on without a lost rank.

    def announce_death(self, rank: int) -> None:
        """Tell the ranks of the elastic runtime that a rank has ended."""
        try:
            announce_death(self._of_ranks, rank)
        except dist.DistError as error:
            _log.warning("the death of rank %d is not announced: %s", rank, error)

    def recovers(self, attempt: Attempt) -> bool:
        """True if the script itself goes on without a lost rank, by ResiHP's elastic runtime."""
        number = attempt.number
        if number not in self._recovering and self._of_ranks.check([keys.MODEL]):
            self._recovering.add(number)
        return number in self._recovering

    def stop(self) -> None:
        """Let the ranks of the elastic runtime end after the current step."""
        self._of_ranks.set(keys.STOPPED, "the launcher was told to end the job")
        self._of_ranks.add(keys.SIGNAL, 1)

    # Steps of the agreement.

    def _publish(self, number: int, what: Attempt | JobEnd) -> Attempt | JobEnd:
        """Publish what comes next, as the host; waits until the others know of the job's end.

        The ranks of the first attempt meet at the launchers' store, those of each later one at a
        store of its own: torch expects no keys of another attempt there.
        """
        if isinstance(what, Attempt):
            if number:
                self._server = host_store(self._options.host, 0, self._options.connect)
            what = replace(what, port=self._server.port)
            self._of_ranks = self._ranks_store(number)
        self._store.publish(number, what)
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

    def _follow(self, number: int, on_standby: Callable[[], object] = bool) -> Attempt | JobEnd:
        """Wait for the first attempt from `number` on that has a place for this node."""
        is_standby = False
        while True:
            found = self._store.attempt(number)
            if isinstance(found, JobEnd):
                self._store.note_read(number)
                return found
            if found is not None and found.index_of(self.id) is not None:
                self._server = connect_store(self._options.host, found.port, self._options.connect)
                self._of_ranks = self._ranks_store(number)
                return found
            if found is not None:
                number += 1
                if not is_standby:
                    _log.info("this node waits as a standby: attempt %d runs", found.number)
                    on_standby()
                is_standby = True
                continue
            self._check()
            if self._notice.why is not None:
                return self._left()
            time.sleep(self._options.poll_s)

    def _joined(self) -> Attempt | JobEnd:
        """The attempt that joiners of the elastic runtime take part in."""
        found = self._store.attempt(self._store.newest())
        if not isinstance(found, Attempt):
            raise JobStoppedError("the job has ended or has not started yet")
        if found.number:
            self._server = connect_store(self._options.host, found.port, self._options.connect)
        self._of_ranks = self._ranks_store(found.number)
        return found

    def _left(self) -> JobEnd:
        return JobEnd(self._notice.status, f"{self._notice.why}: this node leaves the job")

    def _ranks_store(self, number: int) -> dist.Store:
        return dist.PrefixStore(store_prefix(self._options.run, str(number)), self._server)

    def _check(self) -> None:
        if self._heartbeats is not None and self._heartbeats.is_given_up:
            silence = f"{self._options.heartbeat.total_seconds():g} s"
            raise FencedOutError(f"the others go on without this node: it was silent for {silence}")
