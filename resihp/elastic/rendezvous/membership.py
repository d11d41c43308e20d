"""How ranks find each other and agree, through a store that no rank hosts.

Keys (under the job's prefix): `signal` counts events, so that a rank polls one key and looks
closer only when it moved; `plan/K/E` is the plan of generation E after K recoveries, first writer
wins, and `go/K/E` tells idle ranks that the switch to it begins; `broken/K` calls for recovery K;
`left/K/W` tells that a rank has left the work W, which the others of its replica cannot finish
without it; `report/K/R` and `decision/K` are that recovery's reports and outcome; `dead/R` and
`beat/R` are a rank's death notice and heartbeat; `met/W` counts who has come to build world W;
`finished` and `done` end the job.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch.distributed as dist

from resihp.contracts import FencedOutError, JobStoppedError, PeerLostError

from .consensus import RecoveryDecision, SurvivorReport, collect_reports, decide, read_decision
from .heartbeats import Heartbeats
from .proposals import Proposal, read_offer, write_offer
from .store import StorePool, Timeouts


@dataclass(frozen=True)
class _Among:
    """One thread's work that concerns some ranks alone."""

    work: str
    ranks: tuple[int, ...]
    thread: int


class Rendezvous:
    """One rank's view of the others. `start` begins to watch the store in a thread.

    Without the store (`is_cut_off`) training goes on in the present world, but it cannot change
    any more: a loss stops the job. `host` is the address by which peers reach this rank. `ranks`
    are all members; none for a rank that is to `come_in`, which does not beat before: it may have
    the number of a rank that the others have not yet given up.
    """

    def __init__(
        self,
        open_store: Callable[[], dist.Store],
        rank: int,
        ranks: Collection[int],
        t: Timeouts,
        *,
        host: str = "127.0.0.1",
    ) -> None:
        self.host = host
        self.rank, self.timeouts = rank, t
        self.alive = tuple(sorted(ranks))
        self.recovery = 0
        self.link = StorePool(open_store)
        self._store = self.link.store
        self._broken: str | None = None
        self._among: _Among | None = None
        self._hurt: str | None = None
        self._heartbeats = Heartbeats(self._store, rank, t)
        self._comers = Heartbeats(self._store, rank, t)  # looks of its own: they are counted
        self._looking = threading.Lock()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="resihp-rendezvous", daemon=True)

    def start(self) -> None:
        """Begin to watch and to beat.

        A member's first beat is there before this returns: one that stops right afterwards is
        missed after a heartbeat's time-out, not after that of a rank that is still starting.
        """
        if self.rank in self.alive:
            self.link.ask(lambda: self._store.set(f"beat/{self.rank}", "1"), None)
        self._watcher.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._watcher.join(timeout=5)

    # The present world.

    @property
    def is_broken(self) -> bool:
        """Whether this rank knows of a loss, wherever it is."""
        return self._broken is not None

    def broken(self, ranks: Sequence[int], waited_s: float) -> str | None:
        """Why the present world is to be given up, if it is; asked by every wait of any thread."""
        with self._looking:
            among = self._scope()
            if self._reason(among) is None and waited_s > 1.0:
                with_monitor, none = ranks if among is None else among.ranks, list[int]()
                silent = self.link.ask(lambda: self._heartbeats.look(with_monitor, waited_s), none)
                if silent:
                    reason = f"ranks {silent} do not answer"
                    if among is not None:
                        self._hurt = reason
                    self.call_recovery(reason)
            return self._reason(among)

    def absent(self, ranks: Collection[int], waited_s: float) -> list[int]:
        """Those of `ranks` that will not come to the next world; the present one goes on."""
        none = list[int]()
        with self._looking:
            return self.link.ask(lambda: self._comers.look(ranks, waited_s), none)

    @contextmanager
    def among(self, work: str, ranks: Sequence[int]) -> Iterator[None]:
        """Work that concerns `ranks` alone, which a loss elsewhere does not disturb.

        Inside, waits of the calling thread end only when one of these ranks is lost or has left
        this `work`. What else has broken the world shows when the work is done.
        """
        self._hurt = None
        self._among = _Among(work, tuple(ranks), threading.get_ident())
        try:
            yield
        finally:
            self._among = None

    def call_recovery(self, reason: str, leaves: Collection[str] = ()) -> None:
        """Make every rank leave the present world; work that this rank `leaves` at once."""
        self._broken = reason
        if self.link.is_cut_off:
            raise JobStoppedError(f"{reason}; survivors cannot agree, the store is gone")
        for work in leaves:
            self._store.set(f"left/{self.recovery}/{work}", "1")
        self._store.compare_set(f"broken/{self.recovery}", "", reason)
        self._store.add("signal", 1)

    def agree(
        self, report: SurvivorReport, microbatches: int, *, bound: Collection[Collection[int]] = ()
    ) -> RecoveryDecision:
        """Agree with all survivors on what holds. Raises `FencedOutError` if we are not one.

        Every rank that is alive calls this once per recovery. It may come late, when its replica
        has finished its share; those that are dead or do not beat any more are not waited for,
        nor are the others of their `bound` set, who cannot go on without them.
        """
        prefix, key = f"report/{self.recovery}", f"decision/{self.recovery}"
        self._store.set(f"{prefix}/{self.rank}", json.dumps(asdict(report)))
        reports = collect_reports(
            self._store, self._heartbeats, self.alive, prefix=prefix, decided=key, bound=bound
        )
        if not self._store.check([key]):
            proposal = json.dumps(asdict(decide(reports, microbatches)))
            self._store.compare_set(key, "", proposal)
        decision = read_decision(self._store.get(key))
        if self.rank not in decision.survivors:
            raise FencedOutError(f"rank {self.rank} was given up by the others")
        with self._changed:
            self.recovery += 1
            self.alive = decision.survivors
            self._broken = None
        return decision

    def decided(self, recovery: int) -> RecoveryDecision:
        """What was decided in a recovery that is over."""
        return read_decision(self._store.get(f"decision/{recovery}"))

    def broke(self, recovery: int) -> str:
        """Why recovery number `recovery` was called for."""
        return str(self._store.get(f"broken/{recovery}").decode())

    def stay_out(self) -> None:
        """Be no member, and do not beat."""
        with self._changed:
            self.alive = ()

    def come_in(self, recovery: int, alive: tuple[int, ...]) -> None:
        """Become a member of a job that is running; what broke in it before does not count."""
        with self._changed:
            self.recovery, self.alive = recovery, alive
            self._broken = None

    # Plans and the end.

    def publish(self, generation: int, offer: Proposal | str) -> None:
        """Publish the proposal of `generation` (or a reason to stop). The first writer wins."""
        key = f"plan/{self.recovery}/{generation}"
        self._store.compare_set(key, "", write_offer(offer))
        self._store.add("signal", 1)

    def published(self, generation: int, *, recoveries_ago: int = 0) -> Proposal | None:
        """The proposal of `generation`, or None. Raises `JobStoppedError` if the job is to stop."""
        key = f"plan/{self.recovery - recoveries_ago}/{generation}"
        if not self.link.ask(lambda: self._store.check([key]), False):
            return None
        offer = read_offer(self._store.get(key))
        if isinstance(offer, str):
            raise JobStoppedError(offer)
        return offer

    def go(self, generation: int) -> None:
        """Tell idle ranks that the switch to `generation` begins."""
        self._store.set(f"go/{self.recovery}/{generation}", "1")
        self._store.add("signal", 1)

    def may_go(self, generation: int) -> bool:
        """Whether the switch to `generation` has begun."""
        return bool(self._store.check([f"go/{self.recovery}/{generation}"]))

    def await_offer(self, generation: int) -> Proposal:
        """Wait for the offer of `generation`. Raises `PeerLostError` if another rank is lost."""
        start = time.monotonic()
        while True:
            offer = self.published(generation)
            if offer is not None:
                return offer
            waited = time.monotonic() - start
            if (reason := self.broken(self.alive[:1], waited)) is not None:
                raise PeerLostError(reason)
            time.sleep(0.01)

    def finish(self, ranks: int) -> None:
        """End idle ranks, and let no rank of the last world leave while another still needs it."""
        if self.link.is_cut_off:
            return
        self._store.set("finished", "1")
        self._store.add("signal", 1)
        self._store.add("done", 1)
        deadline = time.monotonic() + self.timeouts.heartbeat.total_seconds()
        while self._store.add("done", 0) < ranks and time.monotonic() < deadline:
            time.sleep(0.01)

    def finished(self) -> bool:
        """Whether the job is done. Raises `JobStoppedError` if nobody can tell any more."""
        done = self.link.ask(lambda: self._store.check(["finished"]), False)
        if self.link.is_cut_off:
            raise JobStoppedError("the store is gone: an idle rank cannot be called in any more")
        return bool(done)

    def wait_for_change(self) -> None:
        """Sleep until the store's signal moves, at most for a second."""
        with self._changed:
            self._changed.wait(timeout=1.0)

    # Inside.

    def _scope(self) -> _Among | None:
        """To what the calling thread's waits are confined."""
        among = self._among
        return among if among and among.thread == threading.get_ident() else None

    def _reason(self, among: _Among | None) -> str | None:
        """Why to give up the present work."""
        return self._hurt if among else self._broken

    def _watch(self) -> None:
        try:
            self._watch_store(self.link.open())
        except dist.DistError as error:
            self.link.cut_off(error)

    def _watch_store(self, store: dist.Store) -> None:
        beat, seen = 1, (0, 0)
        while not self._closed.wait(self.timeouts.poll.total_seconds()):
            if self.rank in self.alive:
                beat += 1
                store.set(f"beat/{self.rank}", str(beat))
            # The others may have broken the next world before this rank has come to it.
            now = (store.add("signal", 0), self.recovery)
            if now == seen and not (self._broken and self._among):
                continue
            seen = now
            with self._changed:
                key = f"broken/{self.recovery}"
                if self._broken is None and store.check([key]):
                    self._broken = store.get(key).decode()
                among = self._among
                if among is not None and store.check([f"left/{self.recovery}/{among.work}"]):
                    self._hurt = self._broken
                self._changed.notify_all()
