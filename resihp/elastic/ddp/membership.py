"""Which replicas of a user's loop take part, and who computes what of a step. Talks to nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch.distributed as dist

from resihp.contracts import (
    ContractError,
    FencedOutError,
    Layout,
    Plan,
    Replica,
    Stage,
    StateLostError,
    even_quotas,
)

from ..microbatches.assignment import Assignment, full_assignments, remaining_assignments
from ..rendezvous.consensus import RecoveryDecision, past_decision
from ..rendezvous.joiners import Invitation, Joiners
from ..rendezvous.membership import Rendezvous
from .step import ReplicaRank

Quotas = Callable[[Sequence[int]], Sequence[int]]
"""Microbatches of each of the given replicas, in their order; the sum never changes."""


class ReplicaMembership:
    """One process's view; that of all others is the same.

    alive   replicas that take part
    takers  those of them that have yet to be given the state, and compute nothing before
    shares  what each of `alive` has in the step in progress
    """

    def __init__(self, seat: ReplicaRank, microbatches: int, quotas: Quotas | None) -> None:
        self.seat, self._microbatches = seat, microbatches
        self._quotas = quotas or (lambda alive: even_quotas(microbatches, len(alive)))
        self.alive = list(range(seat.replicas))
        self.takers = self.alive[1:]
        self.plan = self._plan_for(self.alive)
        self.shares = full_assignments(self.plan)

    @property
    def place(self) -> int:
        """This process's replica among those alive."""
        return self.alive.index(self.seat.replica)

    @property
    def share(self) -> Assignment:
        """This replica's own."""
        return self.shares[self.place]

    @property
    def is_taker(self) -> bool:
        """Whether this replica holds no state yet."""
        return self.seat.replica in self.takers

    @property
    def giver(self) -> int:
        """The rank that gives the state to those that stand at this process's place."""
        return self.mirrors([r for r in self.alive if r not in self.takers])[0]

    def mirrors(self, replicas: Sequence[int]) -> list[int]:
        """The ranks that stand at this process's place in `replicas`."""
        return [self.seat.ranks(replica)[self.seat.index] for replica in replicas]

    def ranks(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """All processes of `replicas`."""
        return tuple(rank for replica in replicas for rank in self.seat.ranks(replica))

    def next_step(self) -> None:
        """Everybody computes a whole share."""
        self.shares = full_assignments(self.plan)

    def enter(self, decision: RecoveryDecision) -> None:
        """Go on as the survivors of a loss decided.

        Raises `FencedOutError` if this replica has lost a member, and `StateLostError` if none
        that is left holds the state.
        """
        here, seat = set(decision.survivors), self.seat
        replicas = sorted({rank // seat.members for rank in here})
        self.alive = [r for r in replicas if here.issuperset(seat.ranks(r))]
        if seat.replica not in self.alive:
            raise FencedOutError(f"replica {seat.replica} has lost a member")
        blank = set(decision.stateless)
        self.takers = [r for r in self.alive if not blank.isdisjoint(seat.ranks(r))]
        if self.takers == self.alive:
            if decision.completed:
                raise StateLostError("no replica that is left holds the state of the job")
            self.takers = self.alive[1:]
        before, self.plan = self.plan.layout, self._plan_for(self.alive)
        computing = [r for r in self.alive if r not in self.takers]
        self.shares = remaining_assignments(self._plan_for(computing), before, decision.kept)

    def _plan_for(self, computing: Sequence[int]) -> Plan:
        """All who are alive, with quotas for those who are `computing`."""
        layout = Layout(
            tuple(Replica((Stage(tuple(self.seat.ranks(r)), (0, 1)),)) for r in self.alive)
        )
        given = list(self._quotas(computing))
        if len(given) != len(computing) or sum(given) != self._microbatches:
            raise ContractError(
                "quotas",
                f"must be {len(computing)} numbers with the sum {self._microbatches}, not {given}",
            )
        by_replica = dict(zip(computing, given, strict=True))
        quotas = tuple(by_replica.get(replica, 0) for replica in self.alive)
        return Plan(version=0, layout=layout, quotas=quotas)


_log = logging.getLogger("resihp.elastic")


class ReplicaJoin:
    """One process's view of those who wait before it; or waits itself.

    A replica is let in when all of its processes wait. The first process alive looks, at every
    step; all invite, so that a loss in between leaves nobody waiting.
    """

    def __init__(self, rendezvous: Rendezvous, seat: ReplicaRank) -> None:
        self._rendezvous, self._seat = rendezvous, seat
        self._joiners = Joiners(rendezvous.stores.borrow())
        self._is_shut = False
        self.plan: Plan | None = None

    def enter(self) -> RecoveryDecision | None:
        """Wait outside, then take part; what was decided. None if the job ends before.

        `plan` is then that of those who were there before.
        """
        rank = self._seat.rank
        invitation = self._joiners.await_invitation(
            rank, self._joiners.announce(rank), lambda: False
        )
        if invitation is None:
            return None
        self.plan = invitation.plan
        self._rendezvous.enter(invitation.recovery, invitation.alive)
        return past_decision(self._rendezvous, invitation.recovery - 1)

    def waiting(self, alive: Sequence[int]) -> tuple[int, ...]:
        """Replicas that could come in now; none for all processes but the first."""
        rendezvous = self._rendezvous
        if self._is_shut or rendezvous.stores.is_cut_off or rendezvous.rank != rendezvous.alive[0]:
            return ()
        try:
            ranks = self._joiners.waiting()
        except dist.DistError as error:
            self._is_shut = True
            _log.error("the store is gone; no replica can come in any more: %s", error)
            return ()
        replicas = sorted({rank // self._seat.members for rank in ranks} - set(alive))
        return tuple(r for r in replicas if set(self._seat.ranks(r)) <= set(ranks))

    def invite(self, ranks: Sequence[int], plan: Plan) -> None:
        """Tell `ranks` that the others count them in."""
        waiting = self._joiners.waiting()
        new = [rank for rank in ranks if rank in waiting]
        self._joiners.reset(new)
        rendezvous = self._rendezvous
        for rank in new:
            invitation = Invitation(rendezvous.recovery, 0, plan, rendezvous.alive)
            self._joiners.invite(rank, waiting[rank], invitation)
