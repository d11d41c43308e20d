"""Ranks that wait for a place in a running job, and ranks that have been told to leave it.

A standby is no member yet: nobody waits for it. Once a plan gives it a place it is invited, which
tells it where the job stands; from then on it is like an idle rank. Keys in the store: `standbys`
lists announcements, `invitation/R/N` answers the N-th of rank R, `leaving` lists those who leave.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch.distributed as dist

from resihp.contracts import Plan, from_json, to_json

from .store import announce_death


@dataclass(frozen=True)
class Invitation:
    """Where the job stands when a standby comes in.

    recovery  how many recoveries there have been
    generation     world that holds
    plan      its plan
    alive     all members, the invited rank among them
    """

    recovery: int
    generation: int
    plan: Plan
    alive: tuple[int, ...]


class Joiners:
    """One process's view; it needs a connection to the store of its own."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def announce(self, rank: int) -> int:
        """Say that `rank` waits for a place; the number of the announcement."""
        number = self._store.add(f"announced/{rank}", 1)
        self._tell("standbys", f"{rank}:{number}:{self._deaths(rank)}")
        return number

    def waiting(self) -> dict[int, int]:
        """Who waits, with the number of the last announcement; who has died since does not."""
        latest: dict[int, tuple[int, int]] = {}
        for entry in self._told("standbys"):
            rank, number, deaths = map(int, entry.split(":"))
            latest[rank] = (number, deaths)
        return {
            rank: number
            for rank, (number, deaths) in latest.items()
            if not self._store.check([f"invitation/{rank}/{number}"])
            and self._deaths(rank) == deaths
        }

    def welcome(self, ranks: Collection[int]) -> None:
        """Forget those who had these ranks before; to be called once, before they come in."""
        for rank in ranks:
            self._store.delete_key(f"dead/{rank}")
            self._store.delete_key(f"beat/{rank}")

    def invite(self, rank: int, number: int, invitation: Invitation) -> None:
        """Answer an announcement."""
        document = json.dumps({**vars(invitation), "plan": to_json(invitation.plan)})
        self._store.set(f"invitation/{rank}/{number}", document)

    def await_invitation(
        self, rank: int, number: int, leaves: Callable[[], bool]
    ) -> Invitation | None:
        """Wait for the answer; None if the job ends before, or this rank `leaves`."""
        key = f"invitation/{rank}/{number}"
        while not self._store.check([key]):
            if self._store.check(["finished"]):
                return None
            if leaves():
                announce_death(self._store, rank)  # a rank that is invited all the same is missed
                return None
            time.sleep(0.02)
        document = json.loads(self._store.get(key))
        plan, alive = from_json(Plan, document["plan"]), tuple(document["alive"])
        return Invitation(document["recovery"], document["generation"], plan, alive)

    def leave(self, rank: int) -> None:
        """Say that `rank` has been told to leave."""
        self._tell("leaving", str(rank))

    def leaving(self) -> tuple[int, ...]:
        """Who has been told to leave."""
        return tuple(sorted({int(entry) for entry in self._told("leaving")}))

    def _deaths(self, rank: int) -> int:
        return self._store.add(f"deaths/{rank}", 0)

    def _tell(self, key: str, entry: str) -> None:
        self._store.append(key, f"{entry},")  # type: ignore[attr-defined]
        self._store.add("signal", 1)

    def _told(self, key: str) -> list[str]:
        if not self._store.check([key]):
            return []
        return self._store.get(key).decode().rstrip(",").split(",")
