"""In-step failure recovery for a training loop of the user: DDP, FSDP2, HSDP or a pipeline.

A replica computes gradients of the whole model by itself: one process, or several with FSDP2,
tensor parallelism or pipeline stages among them. `Replicas` sums gradients over replicas and
assigns microbatches: to each replica its quota, and after a loss the lost microbatches to the
survivors (ReCoVer, arXiv 2605.11215).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from resihp.contracts import ContractError, PeerLostError, Plan

from ..microbatches.balancing import StepWork, speeds_of_quotas
from ..microbatches.counts import MicrobatchReport, StepCounts, count_rows, read_counts
from ..microbatches.ledger import GradientHolding, spans
from ..planning.quota_plans import PlanVersionHolder, QuotaPlanPoller, quotas_by_replica
from ..planning.sources import NoPlans, PlanSource
from ..process_groups.abortable import close_groups
from ..process_groups.selection import select_communicators
from ..process_groups.transport import ProcessGroupTransport
from ..rendezvous.consensus import RecoveryDecision, SurvivorReport, agree
from ..rendezvous.environment import Environment
from ..rendezvous.store import Timeouts
from .checks import (
    check_model,
    check_norms,
    check_optimizers,
    describe,
    norms_of,
)
from .comparison import ReplicaComparison
from .fsdp import reshard
from .gradients import LoopGradients
from .groups import ReplicaGroups, connect_replica_groups
from .member_agreement import MemberAgreement
from .member_loss import MemberLossWatch
from .membership import ReplicaJoiner, ReplicaMembership
from .state_sync import StateBroadcast, Stateful, receive_state
from .step import ReplicaCoordinates, Step


class Replicas:
    """Assigns microbatches and sums gradients over the replicas that are alive.

    Every process makes one with the same arguments before the first step. All replicas begin with
    the state of replica 0; a replica that joins later receives the state of a living one. The store
    must outlive all replicas. A process whose replica loses another member ends with
    `FencedOutError`, in a collective of torch too; the other replicas continue.

    microbatches   per step, over all replicas; constant
    members        processes of a replica: consecutive ranks
    state          further state of the loop: LR schedules, a gradient scaler, averages, a cursor
    plans          source of plans that change quotas, e.g. `ServicePlans`, which the first process
                   alive asks in a thread; after a loss the survivors' quotas keep their ratio.
                   Default: equal quotas
    work           microbatches are assigned by their work, not by their number alone: a function
                   from a step to the work of each of its microbatches, alike in every process
    monitor        takes over the version of a plan, so that the sidecar knows which plan later
                   records belong to
    overlap        all-reduce gradients during the last backward passes. Needs one backward pass per
                   microbatch
    deterministic  sum gradients in an order fixed by microbatch index, so that a loss changes no
                   bit of the training; holds about log2(quota) more gradients
    environment    rank and store of this process; default: the variables of the launcher
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
        plans: PlanSource | None = None,
        work: StepWork | None = None,
        monitor: PlanVersionHolder | None = None,
        timeouts: Timeouts | None = None,
        bucket_bytes: int = 25 << 20,
        overlap: bool = True,
        deterministic: bool = False,
        environment: Environment | None = None,
        interface: str | None = None,
    ) -> None:
        environment = environment or Environment.read(os.environ)
        timeouts = timeouts or Timeouts()
        select_communicators()  # raises here, instead of in the first step
        self.coordinates = ReplicaCoordinates.of(environment, members)
        self.completed = self.recoveries = 0
        if not isinstance(microbatches, int) or microbatches < 1:
            raise ContractError("microbatches", f"must be an integer of 1 or more: {microbatches}")
        reshard(model)
        check_model(model, self.coordinates)
        self._model, self._norms = model, norms_of(model)
        self._description = describe(
            model,
            microbatches=microbatches,
            members=members,
            deterministic=deterministic,
            bucket_bytes=bucket_bytes,
        )
        self._state = _whole_state(model, optimizer, state or {})
        self._optimizers = [
            one for one in self._state.values() if isinstance(one, torch.optim.Optimizer)
        ]
        check_optimizers(model, self._optimizers)
        for one in self._optimizers:
            one.register_step_pre_hook(self._check_update)
        self._microbatches = microbatches
        self._membership = ReplicaMembership(self.coordinates, microbatches, work)
        self._has_plans, self._monitor = plans is not None, monitor
        self._poller = QuotaPlanPoller(plans or NoPlans(), self.coordinates.rank, self._read)
        self._sums = LoopGradients(
            model,
            microbatches,
            bucket_bytes=bucket_bytes,
            overlap=overlap,
            ordered=deterministic,
        )
        self._comparison = ReplicaComparison(
            self._description, self._sums, self._optimizers, self.coordinates
        )
        self._server = environment.host_store(timeouts)
        ranks = range(self.coordinates.replicas * members)
        self._rendezvous = environment.rendezvous(ranks, timeouts, interface=interface)
        self._join = ReplicaJoiner(self._rendezvous, self.coordinates)
        self._members = MemberAgreement(self._rendezvous, self.coordinates)
        self._member_loss = MemberLossWatch(self._rendezvous, self.coordinates)
        self._groups: ReplicaGroups | None = None
        self._is_compared = False
        self._has_begun = False
        self._state_broadcast: StateBroadcast | None = None
        self._counts: StepCounts | None = None
        self._committed: tuple[int, float] | None = None
        self._pending_recovery: str | None = None
        self._is_in_step = False

    @property
    def alive(self) -> tuple[int, ...]:
        """Indices of the replicas that take part."""
        return tuple(self._membership.alive)

    def steps(self, count: int) -> Iterator[Step]:
        """Yield steps until `count` are completed; iterate over each to its end.

        A joiner waits for its invitation first; its steps begin where the others are.
        """
        if self._has_begun:
            raise ContractError("steps", "call it once, with the number of all steps")
        self._has_begun = True
        self._rendezvous.start(self._description, part=self.coordinates.index)
        self._member_loss.start()
        try:
            if not self._enter_job():
                return
            while self.completed < count:
                self._rendezvous.check_stopped()
                step = Step(self.completed, iter(()))
                step.microbatches = self._work(step)
                yield step
                if self.completed == step.number:
                    raise ContractError("step", "not all of its microbatches were taken")
            self._rendezvous.finish(self._rendezvous.alive)
        finally:
            self._member_loss.close()
            self._poller.close()
            self._rendezvous.close()

    # One step.

    def _work(self, step: Step) -> Iterator[tuple[int, ...]]:
        """Yield the microbatches of this replica, and those that it redoes after a loss."""
        self._is_in_step = True
        reshard(self._model)  # an evaluation leaves it gathered
        check_norms(self._norms)
        self._sums.begin()
        broken, self._pending_recovery = self._pending_recovery, None
        while broken is not None or self.completed == step.number:
            try:
                if broken is not None:
                    self._recover(broken, step)
                    broken = None
                if self.completed == step.number:
                    if not self._is_compared:
                        with self._members.together():
                            self._compare()
                    if self._membership.without_state:
                        with self._members.together():
                            self._share_state()
                    yield from self._compute(step)
                    self._reduce(step)
            except PeerLostError as error:
                broken = str(error)
        self._is_in_step = False

    def _compare(self) -> None:
        assert self._groups is not None
        has_state = self.coordinates.replica not in self._membership.without_state
        self._comparison.compare(self._groups.data_parallel, self.completed, has_state=has_state)
        self._is_compared = True

    def _compute(self, step: Step) -> Iterator[tuple[int, ...]]:
        assert self._groups is not None
        todo = tuple(index for index in self._membership.share.todo if index not in step.done)
        for batch in step.batches_of(todo):
            is_last = batch[-1] == todo[-1]
            with self._sums.adding(batch, self._groups, is_last=is_last, is_batch=step.is_batched):
                yield batch
            for index in batch:
                step.done.setdefault(index, MicrobatchReport())

    def _reduce(self, step: Step) -> None:
        """Sum out of place, and commit the step on all ranks: then all hold the whole sums."""
        voted, reason = None, "another process of this replica has lost a peer"
        try:
            self._sum(step)
            voted = self._vote()
        except PeerLostError as error:
            reason = str(error)
            self._rendezvous.request_recovery(reason)
        numbers = 2 * (2 * self.coordinates.members + 1 + len(self.alive))  # in a ballot
        voted = self._members.outcome(voted, numbers)
        if voted is None:
            raise PeerLostError(reason)
        self._learn(voted)
        self._complete(step)

    def _sum(self, step: Step) -> None:
        """Exchange counts and gradients."""
        groups, self._counts = self._groups, None
        assert groups is not None
        if self._state_broadcast is not None:
            self._state_broadcast.finish()  # its receivers take part in the sums behind it
        counted = count_rows(step.done, self._microbatches, members=self.coordinates.members).to(
            groups.everyone.device
        )
        counting = groups.everyone.start_all_reduce(counted)  # on its way while the sums are
        self._sums.sum_over(groups, self._membership.shares, self._membership.place)
        groups.everyone.wait(counting)
        self._counts = read_counts(counted)

    def _vote(self) -> list[float]:
        """Return the outcome of the vote, in which no rank takes part without the whole sums."""
        assert self._groups is not None
        everyone = self._groups.everyone
        ballot = torch.tensor(self._ballot(), dtype=torch.float64, device=everyone.device)
        voted: list[float] = everyone.all_reduce_max(ballot).tolist()
        return voted

    def _ballot(self) -> list[float]:
        """Return what this rank adds to the vote: settings, joiners, and quotas of a plan."""
        waiting = self._join.waiting(self.alive)
        return [*self._comparison.ballot(), float(bool(waiting)), *self._proposal()]

    def _learn(self, voted: Sequence[float]) -> None:
        """Compare settings and trained parameters; take note of joiners and quotas."""
        settings = 4 * self.coordinates.members
        self._comparison.check(voted[:settings])
        is_due, version, *told = voted[settings:]
        self._pending_recovery = "replicas join" if is_due else None
        quotas, speeds = told[: len(self.alive)], told[len(self.alive) :]
        self._membership.learn(int(version), list(map(int, quotas)), speeds)

    def _proposal(self) -> list[float]:
        """Return version, quotas and speeds of the newest plan; zeros where there is none."""
        membership, alive = self._membership, self.alive
        found = None
        if self._has_plans and self.coordinates.rank == self._rendezvous.alive[0]:
            self._poller.start(membership.plan.version)
            found = self._poller.newest(membership.plan.version, self.completed + 2)
        if found is None:
            return [0.0] * (1 + 2 * len(alive))
        quotas = membership.restricted(found.quotas, alive)
        speeds = speeds_of_quotas(quotas)
        if found.has_slow_ranks:
            speeds = tuple(found.speed(self.coordinates.ranks(replica)) for replica in alive)
        return [float(found.version), *map(float, quotas), *speeds]

    def _read(self, plan: Plan) -> dict[int, int]:
        quotas = quotas_by_replica(plan, self.coordinates.members, self._microbatches)
        if not set(self.alive) <= set(quotas):
            raise ContractError(
                "layout",
                f"of plan {plan.version} has the replicas {sorted(quotas)}: this loop changes "
                f"quotas alone, and its replicas {list(self.alive)} stay",
            )
        return quotas

    def _complete(self, step: Step) -> None:
        """Replace the local gradients by the whole sums."""
        assert self._counts is not None
        step.loss, step.weight = self._counts.loss, self._counts.weight
        self._sums.use(step.weight)
        self._committed, self._state_broadcast = (self.completed, 0.0), None
        before = self._membership.plan.version
        self._membership.next_step()
        self.completed += 1
        if self._membership.plan.version > before:
            self._use_plan(self._membership.plan.version)

    def _use_plan(self, version: int) -> None:
        """Tell monitor and source that the quotas of a plan hold from the next step on."""
        if self._monitor is not None:
            self._monitor.plan_version = version
        found = self._poller.newest(version - 1, self.completed)
        if found is not None and found.version == version:
            self._poller.acknowledge(found.plan, self.completed)

    def _check_update(self, _: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Check an update before it is made; a hook of the optimizers."""
        if self._is_in_step:
            raise ContractError("step", "an update before all of its microbatches were taken")
        if any(map(callable, (*args, *options.values()))):
            raise ContractError(
                "optimizer.step",
                "a closure would compute gradients that are not summed over the replicas: run all "
                "passes in the inner loop, and take an optimizer that needs none (not LBFGS)",
            )

    # Recovery.

    def _recover(self, reason: str, step: Step) -> None:
        """Agree with the survivors on the sums to keep, and assign the rest."""
        self.recoveries += 1
        self._rendezvous.request_recovery(reason)
        if self._groups is not None:
            self._groups.everyone.abort()
        if self._state_broadcast is not None:
            with suppress(PeerLostError):  # its thread notices that the groups are aborted
                self._state_broadcast.finish()
            self._state_broadcast = None
        replicas = [self.coordinates.ranks(replica) for replica in self.alive]
        decision = agree(self._rendezvous, self._report(step), self._microbatches, bound=replicas)
        if decision.completed > self.completed:
            self._complete(step)
        self._apply(decision)
        if self.completed == step.number:
            self._keep(step)
        with self._members.together():
            self._connect()

    def _report(self, step: Step) -> SurvivorReport:
        if self.coordinates.replica in self._membership.without_state:
            return SurvivorReport(generation=0, completed=self.completed, idle=True)
        held = GradientHolding(0, self._membership.place, self.coordinates.members)
        if self.completed == step.number:
            # A sum is usable with its counts only: a peer may be lost between the two exchanges.
            summed = self._sums.total is not None and self._counts is not None
            buckets = self._sums.stop()
            held = replace(held, finished=spans(step.done), summed=summed, buckets=buckets)
        return SurvivorReport(
            generation=0,
            completed=self.completed,
            holdings=(held,),
            norm=self._committed,
            joiners=self._membership.ranks(self._join.waiting(self.alive)),
        )

    def _apply(self, decision: RecoveryDecision) -> None:
        """Continue with the complete replicas, and invite joiners."""
        membership, before = self._membership, self._membership.plan
        membership.apply(decision)
        self.completed = decision.completed
        self._rendezvous.alive = membership.ranks(membership.alive)
        self._join.invite(membership.ranks(membership.without_state), before)

    def _keep(self, step: Step) -> None:
        """Bring counts and sums to the state that was decided."""
        share = self._membership.share
        if not share.inherited:
            step.done.clear()
        elif share.inherited[0].total:
            assert self._counts is not None
            step.done.update(self._counts.reports())
        self._sums.keep(share, self._membership.summed_buckets)

    # Groups and state.

    def _enter_job(self) -> bool:
        """Join or start the job; False if it ended before this process was invited."""
        invited = self._join.enter(self._description) if self.coordinates.joins else None
        if self.coordinates.joins and invited is None:
            return False
        self._members.connect(is_starting=invited is None)
        if invited is not None:
            self._membership.plan, decision = invited
            self._apply(decision)
            if self._monitor is not None:
                self._monitor.plan_version = self._membership.plan.version
        try:
            with self._members.together():
                self._connect(is_starting=invited is None)
        except PeerLostError as error:
            self._pending_recovery = str(error)
        return True

    def _share_state(self) -> None:
        """Send or receive the state where a replica lacks it."""
        assert self._groups is not None
        if self._groups.state is not None:
            source = self._membership.state_source
            transport = ProcessGroupTransport(self._groups.state, source)
            if self.coordinates.rank == source:
                self._state_broadcast = StateBroadcast(transport, self._state)
            else:
                receive_state(transport, self._state, list(self._model.parameters()))
        self._membership.without_state, self._is_compared = [], False

    def _connect(self, *, is_starting: bool = False) -> None:
        """Build the groups of the ranks alive."""
        rendezvous, membership = self._rendezvous, self._membership
        if self._groups is not None:
            close_groups(self._groups.groups)
            self._groups = None
        self._is_compared = False
        state = (
            [membership.state_source, *membership.data_parallel(membership.without_state)]
            if membership.without_state
            else []
        )
        self._groups = connect_replica_groups(
            rendezvous,
            (rendezvous.alive, membership.data_parallel(membership.alive), state),
            is_starting=is_starting,
        )


def _whole_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, more: Mapping[str, Stateful]
) -> dict[str, Stateful]:
    """Return what replicas without state get, by name; `ContractError` for a name used twice."""
    own: dict[str, Stateful] = {"model": model, "optimizer": optimizer}
    if not own.keys().isdisjoint(more):
        raise ContractError("state", "`model` and `optimizer` are taken: use other names")
    return {**own, **more}
