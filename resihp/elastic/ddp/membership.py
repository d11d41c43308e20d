"""Membership of replicas in a user's training loop, their assignments, and joining."""

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
from .step import ReplicaCoordinates

_log = logging.getLogger("resihp.elastic")

Quotas = Callable[[Sequence[int]], Sequence[int]]
"""Returns the microbatches of each of the given replicas, in their order; their sum is constant."""


class ReplicaMembership:
    """Replicas that take part and their assignments: a pure function of decisions.

    alive          indices of the replicas that take part
    without_state  those of them that have no state yet and compute nothing until they have
    shares         assignment of each of `alive` in the step in progress
    """

    def __init__(
        self, coordinates: ReplicaCoordinates, microbatches: int, quotas: Quotas | None
    ) -> None:
        self.coordinates, self._microbatches = coordinates, microbatches
        self._quotas = quotas or (lambda alive: even_quotas(microbatches, len(alive)))
        self.alive = list(range(coordinates.replicas))
        self.without_state = self.alive[1:]
        self.plan = self._plan_for(self.alive)
        self.shares = full_assignments(self.plan)

    @property
    def place(self) -> int:
        """Position of this process's replica in `alive`."""
        return self.alive.index(self.coordinates.replica)

    @property
    def share(self) -> Assignment:
        """Assignment of this replica."""
        return self.shares[self.place]

    @property
    def state_source(self) -> int:
        """Rank that sends its state to the ranks of the same index in replicas without state."""
        return self.data_parallel([r for r in self.alive if r not in self.without_state])[0]

    def data_parallel(self, replicas: Sequence[int]) -> list[int]:
        """Ranks with this process's index in each of `replicas`: they hold the same shards."""
        return [self.coordinates.ranks(replica)[self.coordinates.index] for replica in replicas]

    def ranks(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """All processes of `replicas`."""
        return tuple(rank for replica in replicas for rank in self.coordinates.ranks(replica))

    def next_step(self) -> None:
        """Assign the microbatches of a whole step."""
        self.shares = full_assignments(self.plan)

    def apply(self, decision: RecoveryDecision) -> None:
        """Apply the decision of the survivors of a loss.

        Raises `FencedOutError` if this replica has lost a member, and `StateLostError` if no
        surviving replica holds the state.
        """
        here, coordinates = set(decision.survivors), self.coordinates
        replicas = sorted({rank // coordinates.members for rank in here})
        self.alive = [r for r in replicas if here.issuperset(coordinates.ranks(r))]
        if coordinates.replica not in self.alive:
            raise FencedOutError(f"replica {coordinates.replica} has lost a member")
        blank = set(decision.stateless)
        self.without_state = [r for r in self.alive if not blank.isdisjoint(coordinates.ranks(r))]
        if self.without_state == self.alive:
            if decision.completed:
                raise StateLostError("no surviving replica holds the state of the job")
            self.without_state = self.alive[1:]
        before, self.plan = self.plan.layout, self._plan_for(self.alive)
        computing = [r for r in self.alive if r not in self.without_state]
        self.shares = remaining_assignments(self._plan_for(computing), before, decision.kept)

    def _plan_for(self, computing: Sequence[int]) -> Plan:
        """Return the plan of all replicas alive, with quotas for those that are `computing`."""
        layout = Layout(
            tuple(Replica((Stage(tuple(self.coordinates.ranks(r)), (0, 1)),)) for r in self.alive)
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


class ReplicaJoiner:
    """Joining of replicas to a running loop, on either side.

    A replica joins when all of its processes wait. The first process alive looks for joiners at
    every step; all processes invite, so that a loss in between leaves no joiner without an answer.
    """

    def __init__(self, rendezvous: Rendezvous, coordinates: ReplicaCoordinates) -> None:
        self._rendezvous, self._coordinates = rendezvous, coordinates
        self._joiners = Joiners(rendezvous.stores.borrow())
        self._is_closed = False

    def enter(self, model: str) -> tuple[Plan, RecoveryDecision] | None:
        """Wait for an invitation; None if the job ends before.

        Returns the plan of the replicas that were alive before, and the decision behind it.
        """
        rank = self._coordinates.rank
        invitation = self._joiners.await_invitation(rank, model, lambda: False)
        if invitation is None:
            return None
        self._rendezvous.enter(invitation.recovery, invitation.alive)
        return invitation.plan, past_decision(self._rendezvous, invitation.recovery - 1)

    def waiting(self, alive: Sequence[int]) -> tuple[int, ...]:
        """Return the replicas that can join now; empty on all processes but the first alive."""
        rendezvous = self._rendezvous
        if (
            self._is_closed
            or rendezvous.stores.is_cut_off
            or rendezvous.rank != rendezvous.alive[0]
        ):
            return ()
        try:
            ranks = self._joiners.waiting()
        except dist.DistError as error:
            self._is_closed = True
            _log.error("the store is gone; no replica can join any more: %s", error)
            return ()
        replicas = sorted({rank // self._coordinates.members for rank in ranks} - set(alive))
        return tuple(r for r in replicas if set(self._coordinates.ranks(r)) <= set(ranks))

    def invite(self, ranks: Sequence[int], plan: Plan) -> None:
        """Invite those of `ranks` that wait to join."""
        waiting = self._joiners.waiting()
        new = [rank for rank in ranks if rank in waiting]
        self._joiners.reset(new)
        rendezvous = self._rendezvous
        for rank in new:
            invitation = Invitation(rendezvous.recovery, 0, plan, rendezvous.alive)
            self._joiners.invite(rank, waiting[rank], invitation)
