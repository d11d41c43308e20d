"""Which replicas of a user's loop take part, and who computes what of a step. Talks to nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

from ..membership.agreement import Decision
from .shares import Share, full_shares, rest_shares
from .user_loop import Seat

Quotas = Callable[[Sequence[int]], Sequence[int]]
"""Microbatches of each of the given replicas, in their order; the sum never changes."""


class Roster:
    """One process's view; that of all others is the same.

    alive   replicas that take part
    takers  those of them that have yet to be given the state, and compute nothing before
    shares  what each of `alive` has in the step in progress
    """

    def __init__(self, seat: Seat, microbatches: int, quotas: Quotas | None) -> None:
        self.seat, self._microbatches = seat, microbatches
        self._quotas = quotas or (lambda alive: even_quotas(microbatches, len(alive)))
        self.alive = list(range(seat.replicas))
        self.takers = self.alive[1:]
        self.plan = self._plan_for(self.alive)
        self.shares = full_shares(self.plan)

    @property
    def place(self) -> int:
        """This process's replica among those alive."""
        return self.alive.index(self.seat.replica)

    @property
    def share(self) -> Share:
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
        self.shares = full_shares(self.plan)

    def enter(self, decision: Decision) -> None:
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
        self.shares = rest_shares(self._plan_for(computing), before, decision.kept)

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
