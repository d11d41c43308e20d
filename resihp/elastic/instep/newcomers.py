"""Replicas that come (back) to a user's loop: how the others find them, and how they come in."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from resihp.contracts import Plan

from ..membership.agreement import Decision
from ..membership.rendezvous import Rendezvous
from ..membership.standbys import Invitation, Standbys
from .user_loop import Seat

_log = logging.getLogger("resihp.elastic")


class Door:
    """One process's view of those who wait before it; or waits itself.

    A replica is let in when all of its processes wait. The first process alive looks, at every
    step; all invite, so that a loss in between leaves nobody waiting.
    """

    def __init__(self, rendezvous: Rendezvous, seat: Seat) -> None:
        self._rendezvous, self._seat = rendezvous, seat
        self._standbys = Standbys(rendezvous.link.borrow())
        self._is_shut = False
        self.plan: Plan | None = None

    def come_in(self) -> Decision | None:
        """Wait outside, then take part; what was decided. None if the job ends before.

        `plan` is then that of those who were there before.
        """
        rank = self._seat.rank
        invitation = self._standbys.await_invitation(
            rank, self._standbys.announce(rank), lambda: False
        )
        if invitation is None:
            return None
        self.plan = invitation.plan
        self._rendezvous.come_in(invitation.recovery, invitation.alive)
        return self._rendezvous.decided(invitation.recovery - 1)

    def waiting(self, alive: Sequence[int]) -> tuple[int, ...]:
        """Replicas that could come in now; none for all processes but the first."""
        rendezvous = self._rendezvous
        if self._is_shut or rendezvous.link.is_cut_off or rendezvous.rank != rendezvous.alive[0]:
            return ()
        try:
            ranks = self._standbys.waiting()
        except dist.DistError as error:
            self._is_shut = True
            _log.error("the store is gone; no replica can come in any more: %s", error)
            return ()
        replicas = sorted({rank // self._seat.members for rank in ranks} - set(alive))
        return tuple(r for r in replicas if set(self._seat.ranks(r)) <= set(ranks))

    def invite(self, ranks: Sequence[int], plan: Plan) -> None:
        """Tell `ranks` that the others count them in."""
        waiting = self._standbys.waiting()
        new = [rank for rank in ranks if rank in waiting]
        self._standbys.welcome(new)
        rendezvous = self._rendezvous
        for rank in new:
            invitation = Invitation(rendezvous.recovery, 0, plan, rendezvous.alive)
            self._standbys.invite(rank, waiting[rank], invitation)
