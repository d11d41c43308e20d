"""Proposals for the next generation, published in the store by the first rank alive."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from resihp.contracts import JobStoppedError, Plan, from_json, to_json

from . import keys
from .membership import Rendezvous


@dataclass(frozen=True)
class Proposal:
    """Plan of the next generation, and the ranks that take part in the change to it.

    members         all ranks alive, and joiners that become members
    leaving         those of them that leave the job when the plan is committed
    missing_state   names the state that no rank alive holds; "" if there is none. All state then
                    comes from the newest checkpoint
    """

    plan: Plan
    members: tuple[int, ...]
    leaving: tuple[int, ...] = ()
    missing_state: str = ""

    @property
    def staying(self) -> tuple[int, ...]:
        """Members of the next generation."""
        return tuple(rank for rank in self.members if rank not in self.leaving)


class ProposalBoard:
    """Reads and writes the proposals of a job."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous, self._stores = rendezvous, rendezvous.stores

    def publish(self, generation: int, proposal: Proposal | str) -> None:
        """Publish the proposal of `generation`, or a reason to stop. The first writer wins."""
        key = keys.proposal(self._rendezvous.recovery, generation)
        document = {"stop": proposal} if isinstance(proposal, str) else to_json(proposal)
        self._stores.store.compare_set(key, "", json.dumps(document))
        self._stores.store.add(keys.SIGNAL, 1)

    def read(self, generation: int, *, recoveries_ago: int = 0) -> Proposal | None:
        """The proposal of `generation`, or None. Raises `JobStoppedError` if the job stops."""
        key = keys.proposal(self._rendezvous.recovery - recoveries_ago, generation)

        def read() -> bytes | None:
            store = self._stores.store
            return store.get(key) if store.check([key]) else None

        written = self._stores.ask(read, None)
        if written is None:
            return None
        document = json.loads(written)
        if "stop" in document:
            raise JobStoppedError(document["stop"])
        return from_json(Proposal, document)

    def wait(self, generation: int) -> Proposal:
        """Wait for the proposal of `generation`. Raises `PeerLostError` if a rank is lost."""
        start = time.monotonic()
        while (proposal := self.read(generation)) is None:
            self._rendezvous.check(self._rendezvous.alive[:1], time.monotonic() - start)
            time.sleep(0.01)
        return proposal

    def start_reshard(self, generation: int) -> None:
        """Announce to idle ranks that the change to `generation` starts, if the store answers."""
        key = keys.reshard_started(self._rendezvous.recovery, generation)

        def announce() -> None:
            self._stores.store.set(key, "1")
            self._stores.store.add(keys.SIGNAL, 1)

        self._stores.ask(announce, None)

    def reshard_started(self, generation: int) -> bool:
        """True once `start_reshard(generation)` has been called by a rank."""
        key = keys.reshard_started(self._rendezvous.recovery, generation)
        return self._stores.ask(lambda: bool(self._stores.store.check([key])), False)
