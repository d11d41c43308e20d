"""Recovery inside a step for a training loop of your own: DDP, FSDP2 or HSDP, one model a replica.

A replica is whatever computes gradients of the whole model by itself: one process, or several
with FSDP2 or tensor parallelism among them. ResiHP sums the gradients over the replicas, and hands
out the microbatches: each replica its quota, and after a loss the lost share to the survivors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from resihp.contracts import ContractError, PeerLostError

from ..microbatches.counts import MicrobatchReport, StepCounts, count_rows, read_counts
from ..microbatches.ledger import GradientHolding, spans
from ..process_groups.close import close_groups
from ..rendezvous.consensus import RecoveryDecision, SurvivorReport, agree
from ..rendezvous.environment import Environment
from ..rendezvous.store import Timeouts
from .checks import check_model, check_optimizers, fingerprint
from .gradients import LoopGradients
from .groups import ReplicaGroups, connect_replica_groups
from .membership import Quotas, ReplicaJoin, ReplicaMembership
from .state_sync import StateBroadcast, Stateful, take
from .step import ReplicaRank, Step


class Replicas:
    """Hands out microbatches and sums gradients over the replicas that are alive.

    Every process makes one with the same arguments before the first step. All begin with the
    state of replica 0, and a replica that comes (back) later gets that of a living one. The store
    must outlive any replica. A process whose replica loses another one of its members gets
    `FencedOutError`: it ends, the others go on.

    microbatches   of a step, over all replicas; the number never changes
    members        processes of a replica: consecutive ranks
    state          what else a newcomer needs to go on like the others: LR schedules, a gradient
                   scaler, averages, a cursor
    overlap        send gradients while the last backward pass of a share still runs; not where a
                   replica has several members. Needs one backward pass a microbatch
    deterministic  sum gradients in an order fixed by microbatch index, so that a loss changes no
                   bit of the training; holds about log2(quota) gradients more
    environment    who this process is; default: what torchrun or our launcher says
    interface      address by which other hosts reach this one; default: the one towards the store
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        microbatches: int,
        members: int = 1,
        state: Mapping[str, Stateful] | None = None,
        quotas: Quotas | None = None,
        timeouts: Timeouts | None = None,
        bucket_bytes: int = 25 << 20,
        overlap: bool = True,
        deterministic: bool = False,
        environment: Environment | None = None,
        interface: str | None = None,
    ) -> None:
        environment = environment or Environment.read(os.environ)
        timeouts = timeouts or Timeouts()
        self.seat, self.completed, self.recoveries = ReplicaRank.of(environment, members), 0, 0
        check_model(model, self.seat)
        self._model = model
        self._state: dict[str, Stateful] = {"model": model, "optimizer": optimizer, **(state or {})}
        self._optimizers = [
            one for one in self._state.values() if isinstance(one, torch.optim.Optimizer)
        ]
        check_optimizers(model, self._optimizers)
        for one in self._optimizers:
            one.register_step_pre_hook(self._refuse_half_sums)
        self._microbatches = microbatches
        self._roster = ReplicaMembership(self.seat, microbatches, quotas)
        self._sums = LoopGradients(
            model.parameters(),
            microbatches,
            bucket_bytes=bucket_bytes,
            overlap=overlap and members == 1,
            ordered=deterministic,
        )
        self._server = environment.host_store(timeouts)
        ranks = range(self.seat.replicas * members)
        self._rendezvous = environment.rendezvous(ranks, timeouts, interface=interface)
        self._door = ReplicaJoin(self._rendezvous, self.seat)
        self._peers: ReplicaGroups | None = None
        self._has_begun = False
        self._giving: StateBroadcast | None = None
        self._account: StepCounts | None = None
        self._committed: tuple[int, float] | None = None
        self._due: str | None = None
        self._is_open = False

    @property
    def alive(self) -> tuple[int, ...]:
        """The replicas that take part."""
        return tuple(self._roster.alive)

    def steps(self, count: int) -> Iterator[Step]:
        """Steps up to `count` completed ones, each to be iterated to its end.

        A newcomer waits for its place first; its steps begin where the others are.
        """
        if self._has_begun:
            raise ContractError("steps", "call it once, with the number of all steps")
        self._has_begun = True
        self._rendezvous.start()
        try:
            if not self._take_place():
                return
            while self.completed < count:
                step = Step(self.completed, iter(()))
                step.microbatches = self._work(step)
                yield step
                if self.completed == step.number:
                    raise ContractError("step", "not all of its microbatches were taken")
            self._rendezvous.finish(len(self._rendezvous.alive))
        finally:
            self._rendezvous.close()

    # One step.

    def _work(self, step: Step) -> Iterator[int]:
        """The microbatches of this replica, and what it redoes of others."""
        self._is_open = True
        self._sums.begin()
        broken, self._due = self._due, None
        while broken is not None or self.completed == step.number:
            try:
                if broken is not None:
                    self._recover(broken, step)
                    broken = None
                if self.completed == step.number:
                    self._share_state()
                    yield from self._compute(step)
                    self._reduce(step)
            except PeerLostError as error:
                broken = str(error)
        self._is_open = False

    def _compute(self, step: Step) -> Iterator[int]:
        assert self._peers is not None
        todo = [index for index in self._roster.share.todo if index not in step.done]
        for index in todo:
            with self._sums.adding(index, self._peers, is_last=index == todo[-1]):
                yield index
            step.done.setdefault(index, MicrobatchReport())

    def _reduce(self, step: Step) -> None:
        """Sum out of place; the last exchange tells all that all hold whole sums."""
        peers, self._account = self._peers, None
        assert peers is not None
        counted = count_rows(step.done, self._microbatches, members=self.seat.members)
        counting = peers.everyone.start_all_reduce(counted)  # on its way while the sums are
        self._sums.sum_over(peers, self._roster.shares, self._roster.place)
        peers.everyone.wait(counting)
        self._account = read_counts(counted)
        if self._giving is not None:
            self._giving.finish()
        self._vote(peers)
        self._complete(step)

    def _vote(self, peers: ReplicaGroups) -> None:
        """The point of no return; also, whether replicas wait to come in, and are all alike."""
        alike, waiting = fingerprint(self._optimizers), self._door.waiting(self.alive)
        vote = torch.tensor([alike, -alike, float(bool(waiting))], dtype=torch.float64)
        most, least, is_due = peers.everyone.all_reduce_max(vote).tolist()
        if most != -least:
            raise ContractError(
                "optimizer",
                "its settings differ between replicas: set them alike, and give `state` the LR "
                "schedules, so that newcomers go on with them",
            )
        self._due = "replicas come in" if is_due else None

    def _complete(self, step: Step) -> None:
        """Put the whole sums in place of this replica's own."""
        assert self._account is not None
        step.loss, step.weight = self._account.loss, self._account.weight
        self._sums.use(step.weight)
        self._committed, self._giving = (self.completed, 0.0), None
        self._roster.next_step()
        self.completed += 1

    def _refuse_half_sums(self, *_: Any) -> None:
        if self._is_open:
            raise ContractError("step", "an update before all of its microbatches were taken")

    # Losses.

    def _recover(self, reason: str, step: Step) -> None:
        """Agree with the survivors on what is kept, and share out the rest."""
        self.recoveries += 1
        self._rendezvous.request_recovery(reason)
        if self._giving is not None:
            self._giving.abandon()
            self._giving = None
        replicas = [self.seat.ranks(replica) for replica in self.alive]
        decision = agree(self._rendezvous, self._report(step), self._microbatches, bound=replicas)
        if decision.completed > self.completed:
            self._complete(step)
        self._enter(decision)
        if self.completed == step.number:
            self._keep(step)
        self._connect()

    def _report(self, step: Step) -> SurvivorReport:
        if self._roster.is_taker:
            return SurvivorReport(generation=0, completed=self.completed, idle=True)
        held = GradientHolding(0, self._roster.place, self.seat.members)
        if self.completed == step.number:
            # Without its own account a sum is of no use: a peer may be lost between the two.
            summed = self._sums.total is not None and self._account is not None
            held = GradientHolding(0, held.replica, held.members, spans(step.done), summed)
        return SurvivorReport(
            generation=0,
            completed=self.completed,
            holdings=(held,),
            norm=self._committed,
            joiners=self._roster.ranks(self._door.waiting(self.alive)),
        )

    def _enter(self, decision: RecoveryDecision) -> None:
        """Go on with the replicas that are whole, and let newcomers in."""
        roster, before = self._roster, self._roster.plan
        roster.enter(decision)
        self.completed = decision.completed
        self._rendezvous.alive = roster.ranks(roster.alive)
        self._door.invite(roster.ranks(roster.takers), before)

    def _keep(self, step: Step) -> None:
        """Bring account and sums to what was decided that they are."""
        share = self._roster.share
        if not share.inherited:
            step.done.clear()
        elif share.inherited[0].total:
            assert self._account is not None
            step.done.update(self._account.reports())
        self._sums.keep(share)

    # Worlds.

    def _take_place(self) -> bool:
        """At the beginning. False: the job has ended before it let this newcomer in."""
        decision = self._door.enter() if self.seat.joins else None
        if self.seat.joins and decision is None:
            return False
        try:
            if decision is not None:
                assert self._door.plan is not None
                self._roster.plan = self._door.plan
                self._enter(decision)
            self._connect(is_starting=decision is None)
        except PeerLostError as error:
            self._due = str(error)
        return True

    def _share_state(self) -> None:
        """Give or take the state, where there are replicas without it."""
        if not self._roster.takers:
            return
        assert self._peers is not None
        group, giver = self._peers.state, self._roster.giver
        if group is not None and self.seat.rank == giver:
            self._giving = StateBroadcast(group, giver, self._state)
        elif group is not None:
            take(group, giver, self._state, list(self._model.parameters()))
        self._roster.takers = []

    def _connect(self, *, is_starting: bool = False) -> None:
        """Build the groups of those alive. At the start a peer's silence means nothing yet."""
        rendezvous, roster = self._rendezvous, self._roster
        if self._peers is not None:
            close_groups(self._peers.groups)
            self._peers = None
        state = [roster.giver, *roster.mirrors(roster.takers)] if roster.takers else []
        self._peers = connect_replica_groups(
            rendezvous,
            (rendezvous.alive, roster.mirrors(roster.alive), state),
            is_starting=is_starting,
        )
