"""Membership of replicas in a user's training loop, their assignments, and joining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from resihp.contracts import (
    FencedOutError,
    Layout,
    Plan,
    Replica,
    Stage,
    StateLostError,
    even_quotas,
)

from ..microbatches.assignment import Assignment, assignments_by_work, remaining_assignments
from ..microbatches.balancing import StepWork, quotas_by_speed, work_of_step
from ..microbatches.ledger import SurvivingSum
from ..rendezvous.consensus import RecoveryDecision, past_decision
from ..rendezvous.joiners import Invitation, Joiners
from ..rendezvous.membership import Rendezvous
from .step import ReplicaCoordinates


class _Quotas(NamedTuple):
    """Quotas of a plan, and the speed of each replica; none: the quotas are the measure."""

    plan: Plan
    speeds: Mapping[int, float]


class _Rest(NamedTuple):
    """Microbatches left in a step: all but those in the sums `kept` of the layout `before`."""

    plan: Plan
    before: Layout
    kept: Sequence[SurvivingSum] = ()


class ReplicaMembership:
    """Replicas that take part and their assignments: a pure function of decisions and votes.

    alive          indices of the replicas that take part
    without_state  those of them that have no state yet and compute nothing until they have
    plan           quotas of `alive`; its version is that of the plan that they come from, 0: even
    step           number of the step in progress
    summed_buckets leading gradient buckets that need not travel again in the step in progress
    """

    def __init__(
        self, coordinates: ReplicaCoordinates, microbatches: int, work: StepWork | None = None
    ) -> None:
        self.coordinates, self._microbatches, self._work = coordinates, microbatches, work
        self.alive = list(range(coordinates.replicas))
        self.without_state = self.alive[1:]
        self.plan = self._plan(self.alive, even_quotas(microbatches, len(self.alive)), 0)
        self.step = self.summed_buckets = 0
        self._speeds: Mapping[int, float] = {}
        self._learned: _Quotas | None = None  # in the vote of the present step
        self._pending: _Quotas | None = None  # in the vote before: all ranks alive have learned it
        self._shares: tuple[Assignment, ...] | None
        self._assign_all()

    @property
    def place(self) -> int:
        """Position of this process's replica in `alive`."""
        return self.alive.index(self.coordinates.replica)

    @property
    def shares(self) -> tuple[Assignment, ...]:
        """Assignment of each of `alive` in the step in progress.

        Raises `ContractError` if the work of its microbatches is not usable.
        """
        if self._shares is None:  # by now the step is sure to be run
            self._shares = self._assign(self._rest)
        return self._shares

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

    def learn(self, version: int, quotas: Sequence[int], speeds: Sequence[float] = ()) -> None:
        """Take new quotas of `alive`, and their speeds, from the vote of a step.

        They hold once a later step is committed. That needs a vote of all ranks, so that all have
        learned them; a rank that learns only from survivors that the step was committed applies
        the same. A recovery drops what not all may have learned.
        """
        if version > self.plan.version:
            plan = replace(self.plan, version=version, quotas=tuple(quotas))
            self._learned = _Quotas(plan, dict(zip(self.alive, speeds, strict=False)))

    def next_step(self) -> None:
        """Apply the quotas that are due, and assign the microbatches of a whole step."""
        if self._pending is not None:
            self.plan, self._speeds = self._pending
        self._pending, self._learned = self._learned, None
        if self._pending is not None and self._pending.plan.version <= self.plan.version:
            self._pending = None  # proposed once more while it was pending
        self.step += 1
        self._assign_all()

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
        self._learned = self._pending = None
        if self.without_state:
            self._speeds = {}  # who joins does not know them
        before, self.plan = self.plan, self._plan_for(self.alive)
        computing = [r for r in self.alive if r not in self.without_state]
        self.step = decision.completed
        buckets = dict(zip(decision.survivors, decision.buckets, strict=False))
        self.summed_buckets = min(buckets.get(rank, 0) for rank in self.data_parallel(self.alive))
        self._rest = _Rest(self._plan_for(computing, before), before.layout, decision.kept)
        self._shares = None

    def restricted(self, quotas: Mapping[int, int], replicas: Sequence[int]) -> tuple[int, ...]:
        """Return the quotas of `replicas` with the same sum, as many for each as it is fast.

        A quota is the measure of a replica's speed. One that has none joined later and counts as
        fast as the fastest.
        """
        if set(quotas) == set(replicas):
            return tuple(quotas[replica] for replica in replicas)
        fastest = max(quotas.values())
        speeds = [float(quotas.get(replica, fastest)) for replica in replicas]
        return quotas_by_speed(self._microbatches, speeds)

    def _assign_all(self) -> None:
        """Assign the microbatches of a whole step."""
        self._rest = _Rest(self.plan, self.plan.layout)
        self._shares = None

    def _assign(self, rest: _Rest) -> tuple[Assignment, ...]:
        """Return the assignments by count, or by work with the same sums kept."""
        counted = remaining_assignments(*rest)
        if self._work is None:
            return counted
        return assignments_by_work(
            counted,
            rest.plan.quotas,
            work_of_step(self._work, self.step, self._microbatches),
            speeds=[self._speeds.get(replica, 0.0) for replica in self.alive],
            may_idle=bool(rest.kept),
        )

    def _plan_for(self, computing: Sequence[int], before: Plan | None = None) -> Plan:
        """Return the plan of all replicas alive, with quotas for those that are `computing`.

        The quotas are those of the plan `before`, restricted to them.
        """
        before = before or self.plan
        if before.version == 0:
            given = even_quotas(self._microbatches, len(computing))
        else:
            members = self.coordinates.members
            known = [replica.ranks[0] // members for replica in before.layout.replicas]
            given = self.restricted(dict(zip(known, before.quotas, strict=True)), computing)
        by_replica = dict(zip(computing, given, strict=True))
        quotas = tuple(by_replica.get(replica, 0) for replica in self.alive)
        return self._plan(self.alive, quotas, before.version)

    def _plan(self, replicas: Sequence[int], quotas: Sequence[int], version: int) -> Plan:
        ranks = [tuple(self.coordinates.ranks(replica)) for replica in replicas]
        layout = Layout(tuple(Replica((Stage(each, (0, 1)),)) for each in ranks))
        return Plan(version=version, layout=layout, quotas=tuple(quotas))


class ReplicaJoiner:
    """Joining of replicas to a running loop, on either side.

    A replica joins when all of its processes wait. The first process alive looks for joiners at
    every step; all processes invite, so that a loss in between leaves no joiner without an answer.
    """

    def __init__(self, rendezvous: Rendezvous, coordinates: ReplicaCoordinates) -> None:
        self._rendezvous, self._coordinates = rendezvous, coordinates

    def enter(self, model: str) -> tuple[Plan, RecoveryDecision] | None:
        """Wait for an invitation; None if the job ends before.

        Returns the plan of the replicas that were alive before, and the decision behind it.
        """
        rank, part = self._coordinates.rank, self._coordinates.index
        invitation = self._joiners.await_invitation(rank, model, lambda: False, part=part)
        if invitation is None:
            return None
        self._rendezvous.enter(invitation.recovery, invitation.alive)
        return invitation.plan, past_decision(self._rendezvous, invitation.recovery - 1)

    def waiting(self, alive: Sequence[int]) -> tuple[int, ...]:
        """Return the replicas that can join now; empty on all processes but the first alive."""
        rendezvous = self._rendezvous
        if rendezvous.rank != rendezvous.alive[0]:
            return ()
        ranks: dict[int, int] = rendezvous.stores.ask(self._waiting, {})
        replicas = sorted({rank // self._coordinates.members for rank in ranks} - set(alive))
        return tuple(r for r in replicas if set(self._coordinates.ranks(r)) <= set(ranks))

    def invite(self, ranks: Sequence[int], plan: Plan) -> None:
        """Invite those of `ranks` that wait to join."""
        self._rendezvous.stores.ask(lambda: self._invite(ranks, plan), None)

    def _waiting(self) -> dict[int, int]:
        return self._joiners.waiting()  # of a new connection, where the pool asks once more

    def _invite(self, ranks: Sequence[int], plan: Plan) -> None:
        rendezvous, joiners = self._rendezvous, self._joiners
        waiting = joiners.waiting()
        new = {rank: waiting[rank] for rank in ranks if rank in waiting}
        joiners.reset(new)
        invitation = Invitation(rendezvous.recovery, 0, plan, rendezvous.alive)
        for rank, number in new.items():
            joiners.invite(rank, number, invitation)

    @property
    def _joiners(self) -> Joiners:
        return Joiners(self._rendezvous.stores.store)
