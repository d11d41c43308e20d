"""Agreement of the processes of a replica on whether they go on, after what may fail in one alone.

A peer of another replica that dies in the middle of an exchange can be lost to one process of a
replica while its mate has completed the exchange. If the mate then goes on to a collective within
the replica, and this process to the recovery, they wait for each other. So both do the same. An
exchange within the replica fails only with a loss in it, which is the end of the replica anyway.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from resihp.contracts import FencedOutError, PeerLostError

from ..process_groups.abortable import AbortableProcessGroup, WaitClock
from ..rendezvous.membership import Rendezvous
from .step import ReplicaCoordinates


class MemberAgreement:
    """Agreement of this process with its mates; nothing where a replica is one process.

    All of them call the same methods in the same order. Losses in other replicas interrupt none.
    """

    def __init__(self, rendezvous: Rendezvous, coordinates: ReplicaCoordinates) -> None:
        self._rendezvous, self._coordinates = rendezvous, coordinates
        self._ranks = tuple(coordinates.ranks(coordinates.replica))
        self._group: AbortableProcessGroup | None = None

    def connect(self, *, is_starting: bool) -> None:
        """Build the group, once. Raises `FencedOutError` if a mate is lost.

        At the start of a job a mate that has not come yet does not count as lost.
        """
        if len(self._ranks) == 1:
            return
        thread = threading.Thread(
            target=self._build, args=(is_starting,), name="resihp-member-group", daemon=True
        )
        thread.start()
        try:
            with self._rendezvous.failure_scope("replica", self._ranks):
                self._rendezvous.join(thread, self._ranks, is_starting=is_starting)
        except PeerLostError as error:
            raise FencedOutError(f"replica {self._coordinates.replica}: {error}") from None
        if self._group is None:
            raise FencedOutError(f"replica {self._coordinates.replica} could not be connected")

    def _build(self, is_starting: bool) -> None:
        rendezvous = self._rendezvous
        name = f"replica{self._coordinates.replica}/{rendezvous.recovery}"
        timeouts = rendezvous.timeouts
        connect = timeouts.exchange if is_starting else timeouts.connect
        try:
            with rendezvous.group_factory(WaitClock(), connect=connect) as factory:
                self._group = factory.group(name, self._ranks)
        except (RuntimeError, dist.DistError):
            return  # a mate is lost

    @contextmanager
    def together(self) -> Iterator[None]:
        """Enclose work that succeeds in all members or in none: then it raises `PeerLostError`."""
        reason = ""
        try:
            yield
        except PeerLostError as error:
            reason = str(error)
        if self._group is None:
            if reason:
                raise PeerLostError(reason)
            return
        if reason:
            self._rendezvous.request_recovery(reason)  # no mate waits longer for those
        if self._most([float(bool(reason))])[0]:
            raise PeerLostError(reason or "another process of this replica has lost a peer")

    def outcome(self, voted: Sequence[float] | None, size: int) -> list[float] | None:
        """Return what any member knows of a vote; None if its outcome is known to none.

        voted  numbers that all ranks that have completed the vote know alike; None: this one has
               lost a peer in it
        size   their number
        """
        if self._group is None:
            return None if voted is None else list(voted)
        given = [0.0] + [-math.inf] * size if voted is None else [1.0, *voted]
        is_known, *told = self._most(given)
        return told if is_known else None

    def _most(self, numbers: Sequence[float]) -> list[float]:
        assert self._group is not None
        vector = torch.tensor(numbers, dtype=torch.float64, device=self._group.device)
        with self._rendezvous.failure_scope("replica", self._ranks):
            most: list[float] = self._group.all_reduce_max(vector).tolist()
        return most
