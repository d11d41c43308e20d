"""Ranks that wait for a place in a running job, and ranks that are to leave it.

A joiner announces itself in the store and is not a member: no rank waits for it. The first rank
alive invites it once a plan has a place for it; from then on it is a member like an idle rank.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch.distributed as dist

from resihp.contracts import JobStoppedError, JoinRefusedError, Plan, from_json, to_json

from . import keys
from .arguments import check_joiner
from .liveness import ProcessHistory
from .store import announce_death

_log = logging.getLogger("resihp.elastic")
_LONGEST_PAUSE_S = 0.1
"""Time between two looks of a joiner; it is to see the job end before the store is gone."""


@dataclass(frozen=True)
class Invitation:
    """State of the job when a joiner becomes a member.

    recovery    number of recoveries so far
    generation  current generation
    plan        its plan
    alive       all members, the invited rank included
    """

    recovery: int
    generation: int
    plan: Plan
    alive: tuple[int, ...]


class Joiners:
    """Announcements and invitations in `store`."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    # The joiner.

    def announce(self, rank: int) -> int:
        """Announce that `rank` waits for a place; returns the number of the announcement."""
        number = self._store.add(keys.announced(rank), 1)
        self._append(keys.ANNOUNCEMENTS, f"{rank}:{number}:{self._history().ends[rank]},")
        return number

    def await_invitation(
        self,
        rank: int,
        model: str,
        is_leaving: Callable[[], bool],
        *,
        part: int = 0,
        arguments: Mapping[str, object] | None = None,
    ) -> Invitation | None:
        """Announce that `rank`, which trains `model`, waits for a place, and wait for the answer.

        part       of the model that this process trains
        arguments  of a job whose members have called `check_arguments`

        Returns None if the job ends first, or once `is_leaving()`. Raises `JoinRefusedError` if
        model or arguments are not those of the job, and `JobStoppedError` if the store is gone.
        """
        try:
            if not self._await_key(keys.model(part), is_leaving):
                return None
            if (trained := self._store.get(keys.model(part)).decode()) != model:
                raise JoinRefusedError(f"the job trains {trained}, this process trains {model}")
            if arguments is not None:
                if not self._await_key(keys.ARGUMENTS, is_leaving):
                    return None
                check_joiner(self._store.get(keys.ARGUMENTS), arguments)
            key = keys.invitation(rank, self.announce(rank))
            if not self._await_key(key, is_leaving):
                announce_death(self._store, rank)  # an invitation at this moment finds it dead
                return None
            return from_json(Invitation, json.loads(self._store.get(key)))
        except dist.DistError as error:
            raise JobStoppedError("no place in the job: the store is gone") from error

    def _await_key(self, key: str, is_leaving: Callable[[], bool]) -> bool:
        """Wait until `key` is set; False if the job ends first, or once `is_leaving()`."""
        pause_s = 0.02
        while not self._store.check([key]):
            if self._store.check([keys.FINISHED]) or self.is_stopped():
                _log.info("the job has ended before it had a place for this process")
                return False
            if is_leaving():
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    # The first rank alive.

    def waiting(self) -> dict[int, int]:
        """Waiting ranks with the number of their last announcement; dead ones are left out."""
        latest, history = dict[int, tuple[int, int]](), self._history()
        for entry in self._entries(keys.ANNOUNCEMENTS):
            rank, number, ends = map(int, entry.split(":"))
            latest[rank] = (number, ends)
        return {
            rank: number
            for rank, (number, ends) in latest.items()
            if history.ends[rank] == ends and not self._store.check([keys.invitation(rank, number)])
        }

    def reset(self, announcements: Mapping[int, int]) -> None:
        """Make what is known of earlier processes with these ranks void, before `invite`."""
        for rank, number in announcements.items():
            self._append(keys.PROCESS_HISTORY, ProcessHistory.invitation(rank, number))

    def invite(self, rank: int, number: int, invitation: Invitation) -> None:
        """Answer announcement `number` of `rank`."""
        self._store.set(keys.invitation(rank, number), json.dumps(to_json(invitation)))

    # Ranks that leave.

    def leave(self, rank: int, *, hands_over: bool = True) -> None:
        """Announce that `rank` is to leave; it is lost then, unless it `hands_over` before."""
        number = self._history().invitations[rank]
        self._append(keys.LEAVING, f"{rank}:{number}:{int(hands_over)},")

    def is_stopped(self) -> bool:
        """True once the launcher that hosts the store ends the job."""
        return bool(self._store.check([keys.STOPPED]))

    def leaving(self) -> dict[int, bool]:
        """Ranks whose present process is to leave, and whether it hands over before."""
        invitations, leaving = self._history().invitations, dict[int, bool]()
        for entry in self._entries(keys.LEAVING):
            rank, number, hands_over = map(int, entry.split(":"))
            if number == invitations[rank]:
                leaving[rank] = bool(hands_over)
        return leaving

    def _history(self) -> ProcessHistory:
        key = keys.PROCESS_HISTORY
        return ProcessHistory(self._store.get(key) if self._store.check([key]) else b"")

    def _append(self, key: str, entry: str) -> None:
        self._store.append(key, entry)  # type: ignore[attr-defined]
        self._store.add(keys.SIGNAL, 1)

    def _entries(self, key: str) -> list[str]:
        if not self._store.check([key]):
            return []
        return self._store.get(key).decode().rstrip(",").split(",")


def describe_model(shapes: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Description of a model by the names and unsharded shapes of its parameters.

    >>> describe_model([("weight", (2, 3)), ("bias", (2,))])
    'a model with 2 parameters and 8 elements (2fd9a503)'
    """
    listed = sorted((name, tuple(shape)) for name, shape in shapes)
    digest = hashlib.sha256(repr(listed).encode()).hexdigest()[:8]
    elements = sum(prod(shape) for _, shape in listed)
    return f"a model with {len(listed)} parameters and {elements:,} elements ({digest})"
