"""The training loop of one rank, whose layout may change between any two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf, nan

import torch

from resihp.contracts import (
    ContractError,
    FencedOutError,
    JobStoppedError,
    PeerLostError,
    Plan,
    PreemptedError,
)
from resihp.layout import Param

from .checkpointing.protocol import StateManager
from .checkpointing.settings import Checkpoints
from .coordinator import ReshardCoordinator
from .planning.publisher import PlanPublisher
from .planning.sources import PlanSource
from .process_groups.abortable import WaitClock
from .process_groups.selection import select_communicators
from .recovery import Recovery, passes
from .rendezvous.arguments import check_arguments
from .rendezvous.claims import StoreClaims
from .rendezvous.joiners import Joiners
from .rendezvous.membership import Rendezvous
from .reshard.buffers import ReshardBudget
from .reshard.build import ReshardContext
from .reshard.spreading import CopyPace
from .reshard.warmup import warm_up
from .state.departure import Departure, HandOverCost, HandOverMeter
from .state.events import Callbacks, LayoutChange
from .state.phases import Phase
from .state.runtime_state import RuntimeState
from .step import Engine, IteratorData, ReducedStep, Setup
from .step.schedule import check_plan


class Trainer:
    """Runs one rank of a job.

    Every rank of the job (idle ones included) makes one with the same arguments but its own
    rendezvous, and calls `run`. Raises `ContractError` for a plan that cannot be run, for an
    `IteratorData` with another number of microbatches, and for process groups that torch or the
    device lack. `run` raises `ContractError` for arguments that differ between ranks, and `join`
    `JoinRefusedError` in the joiner alone; both raise `JobStoppedError` or `StateLostError` when
    the job cannot go on, and `FencedOutError` when the other ranks have continued without this one.
    """

    def __init__(
        self,
        setup: Setup,
        plan: Plan,
        rendezvous: Rendezvous,
        plans: PlanSource,
        *,
        callbacks: Callbacks | None = None,
        checkpoints: Checkpoints | None = None,
        memory: ReshardBudget | None = None,
    ) -> None:
        check_plan(plan, setup.model.parameters, plan.microbatches, setup.max_in_flight)
        if isinstance(setup.data, IteratorData) and setup.data.microbatches != plan.microbatches:
            held = setup.data.microbatches
            raise ContractError(
                "data", f"takes {held} microbatches per step, the job has {plan.microbatches}"
            )
        select_communicators(setup.device)  # raises here, instead of in the first build
        self.setup, self.rank = setup, rendezvous.rank
        self._rendezvous = rendezvous
        self._callbacks = callbacks or Callbacks()
        self._state = RuntimeState(plan, self._callbacks.on_phase)
        self._steps = 0
        self._is_joining = False
        self._begun = (plan, 0.0)  # the last step
        self._unreported: tuple[ReducedStep, Plan, float] | None = None
        self._is_owed = False  # a save, since a step in which the layout changed
        self._departure: Departure | None = None
        self._meter = HandOverMeter()
        self._checkpoints = StateManager()
        if checkpoints is not None:
            from .checkpointing.manager import CheckpointManager  # needs the extra `checkpoint`

            self._checkpoints = CheckpointManager(checkpoints, setup, rendezvous)
        context = ReshardContext(setup, rendezvous, WaitClock(), memory or ReshardBudget())
        self._coordinator = ReshardCoordinator(
            context,
            self._state,
            replace(self._callbacks, on_layout_change=self._changed),
            self._checkpoints,
        )
        self._recovery = Recovery(
            context,
            self._state,
            plans,
            self._coordinator,
            can_restore=checkpoints is not None,
        )
        self._claims = StoreClaims(rendezvous) if setup.steal_ahead is not None else None
        self._publisher = PlanPublisher(plans, rendezvous, self._state, self._coordinator.refusal)

    @property
    def plan(self) -> Plan:
        """The plan of the present generation."""
        return self._state.plan

    @property
    def generation(self) -> int:
        """Number of changes of layout so far, aborted ones included."""
        return self._state.generation

    @property
    def completed(self) -> int:
        """Steps whose update has been made."""
        return self._state.completed

    @property
    def engine(self) -> Engine | None:
        """Runs this rank's part of a step; None while it has no place in the layout."""
        return self._state.engine

    @property
    def tensors(self) -> Mapping[Param, torch.Tensor]:
        """Parameters that this rank holds, each in its range; none without a place.

        Where the optimizer's state is sharded over replicas, they are whole from `on_step` on to
        the next update.
        """
        return {} if self.engine is None else self.engine.shard.tensors

    @property
    def is_prepared(self) -> bool:
        """True when the next generation is built."""
        return self._state.prepared is not None

    def poll_proposal(self) -> None:
        """Start to build the next generation if it has been proposed."""
        self._coordinator.poll_proposal()

    def run(self, steps: int) -> None:
        """Train until `steps` updates have been made, those in a resumed checkpoint included."""
        self._steps = _checked(steps)
        self._rendezvous.start(self.setup.described_model)
        self._live(self._start)

    def join(self, steps: int) -> None:
        """Join a running job as soon as a plan has a place for this rank.

        What is slow the first time is done before, while the job trains. The rendezvous of a
        joiner is made without ranks. Returns when the job ends, too.
        """
        self._steps = _checked(steps)
        self._rendezvous.start()
        warm_up(self.setup, self._rendezvous)
        if self._await_invitation():
            self._live(lambda: None)
        else:
            self._rendezvous.close()

    def leave(self, until_s: float = inf) -> None:
        """Hand over and return from `run` as soon as a plan has no place for this rank.

        until_s  `time.monotonic` at which the process is killed; inf: not known

        For a notice of the platform; safe in a signal handler. Where the time left is too short for
        a hand-over, by what the last ones and the last steps took, the rank trains on, and `run`
        raises `PreemptedError` between two steps before the time is over: it counts as lost then,
        as it does if the process ends by itself. If all ranks leave, the job ends with the step in
        progress, which is saved if it has checkpoints.
        """
        if self._departure is None:
            self._departure = Departure.at_notice(until_s, time.monotonic(), self._cost())
            self._publisher.leave(hands_over=self._departure.hands_over)

    def _start(self) -> None:
        check_arguments(self._rendezvous.stores, self.rank, self._arguments())
        self._coordinator.start_job()
        if self.engine is not None:
            groups, shard = self.engine.groups, self.engine.shard
            self._state.resume(self._checkpoints.resume(groups.everyone, shard))
            if self.completed:  # initial values are whole
                self._gather()

    def _arguments(self) -> dict[str, object]:
        """Arguments without which ranks would wait for each other, or train something else."""
        setup, plan, form = self.setup, self.plan, self.setup.optimizer.form
        return {
            "steps": self._steps,
            "microbatches": plan.microbatches,
            "plan": plan.digest,
            "model": setup.described_model,
            "optimizer": f"one that keeps {', '.join(form.moments + form.scalars) or 'nothing'}",
            "deterministic": setup.deterministic,
            "recompute": setup.recompute,
            "compile_backend": setup.compile_backend,
            "optimizer_replicas": setup.optimizer_replicas,
            "ranks_per_node": setup.ranks_per_node,
            "compute_dtype": str(setup.compute_dtype),
            "bucket_bytes": setup.bucket_bytes,
            "max_in_flight": setup.max_in_flight,
            "steal_ahead": setup.steal_ahead,
        }

    def _await_invitation(self) -> bool:
        """Wait for an invitation; False if the job ends, or this rank is to leave, before."""
        self._state.rejoin()
        self._rendezvous.change_members(())
        joiners = Joiners(self._rendezvous.stores.store)
        invitation = joiners.await_invitation(
            self.rank,
            self.setup.described_model,
            lambda: self._departure is not None,
            arguments=self._arguments(),
        )
        if invitation is None:
            return False
        self._rendezvous.enter(invitation.recovery, invitation.alive, is_joining=True)
        self._state.follow(invitation.generation, invitation.plan)
        self._is_joining = True
        return True

    def _live(self, start: Callable[[], None]) -> None:
        steps, is_done = self._steps, False
        try:
            start()
            self._publisher.start()
            broken: str | None = None
            while broken or not self._is_over(steps) or (broken := self._finish()):
                try:
                    if broken:
                        self._note_sums()
                        self._state.enter(Phase.RECOVERING)
                        self._recovery.recover(broken, steps)
                        self._gather()
                        self._report()
                    else:
                        self._advance()
                    broken = None
                except PeerLostError as error:
                    broken = str(error)
                except (FencedOutError, JobStoppedError) as error:
                    if self._is_done and self._is_gathered:
                        break  # and cannot help the others any more
                    # The others lost a rank while this one joined, and continued without it.
                    if not (self._is_joining and isinstance(error, FencedOutError)):
                        raise
                    self._coordinator.abort()
                    broken = None
                    if not self._await_invitation():
                        break
            is_done = self._is_done
        finally:
            self._coordinator.abort()
            self._state.enter(Phase.STOPPED)
            self._publisher.close()
            self._checkpoints.close(is_done=is_done)
            if self._claims is not None:
                self._claims.close()
            self._coordinator.abort_groups()  # those of devices would wait for peers at exit
            self._rendezvous.close()

    @property
    def _is_done(self) -> bool:
        """True if this rank has completed the job, or its part of one that all ranks leave."""
        is_left = self.completed >= self._steps or not self._rendezvous.alive
        return self.engine is not None and is_left

    @property
    def _is_gathered(self) -> bool:
        """True if this rank's parameters, of which it has some, are whole."""
        return self.engine is not None and self.engine.is_gathered

    def _finish(self) -> str | None:
        """End the job for this rank; returns why another one still needs it, if one does."""
        if not self._is_done:
            return None
        reason = self._rendezvous.finish(self.plan.layout.ranks)
        return reason if self.completed >= self._steps else None

    def _is_over(self, steps: int) -> bool:
        if self.rank not in self._rendezvous.alive:
            return True
        if self.engine is None:
            return self._rendezvous.is_finished()
        return self.completed >= steps

    # One step.

    def _advance(self) -> None:
        state, coordinator = self._state, self._coordinator
        if self.engine is None:
            self._idle()
            return
        self._end_if_preempted()
        step, start, plan = self.completed, time.perf_counter(), self.plan
        self._begun = (plan, start)
        reduced = self._sum_gradients(self.engine, step)
        self._unreported = (reduced, plan, start)
        is_resharding = coordinator.ends_transfer()
        if is_resharding:
            coordinator.reshard(norm=reduced.norm)
        state.enter(Phase.IDLE if self.engine is None else Phase.UPDATING)
        coordinator.update(step, reduced.norm)
        coordinator.continue_transfer(self._pace())
        if reduced.is_due:
            # Ranks that have just received a place do not know that it is due.
            self._is_owed = is_resharding
        if reduced.is_due and not is_resharding and self.engine is not None:
            self._checkpoints.save(step, self.engine.shard)
        self._gather()
        self._meter.step(time.perf_counter() - start)
        self._report()
        if coordinator.all_ready(reduced) and self.completed < self._steps:
            coordinator.start_reshard(self._pace())

    def _sum_gradients(self, engine: Engine, step: int) -> ReducedStep:
        """The passes of this rank's microbatches, and the sum over all replicas."""
        self._state.enter(Phase.ACCUMULATING)
        self._checkpoints.prepare(self.plan, self.generation, engine.shard)
        replica = self.plan.layout.replicas[engine.groups.place.dp]
        name = passes(self.generation, engine.groups, step)
        claims = self._step_claims(engine, step)
        with self._rendezvous.failure_scope(name, replica.ranks):
            engine.accumulate(step, lambda: self._rendezvous.is_broken, claims)
        if not engine.is_accumulated:
            raise PeerLostError("a rank of another replica is lost")
        self._state.enter(Phase.REDUCING)
        ready = self._ready_generation(step + 1)
        can_claim = self._claims is not None and self._claims.is_answering
        reduced = engine.reduce(step, ready, is_due=self._is_due(step), can_claim=can_claim)
        self._state.reduced(step, reduced.norm)
        return reduced

    def _step_claims(self, engine: Engine, step: int) -> StoreClaims | None:
        """Return the claims of a step; None if microbatches stay with their replicas."""
        if self._claims is None or not engine.can_claim or self.plan.layout.dp == 1:
            return None
        place = engine.groups.place
        self._claims.begin(self.generation, step, place.dp if place.tp == 0 else None)
        return self._claims

    def _ready_generation(self, next_step: int) -> int:
        """The generation that this rank could receive during `next_step`; 0 if there is none.

        A rank that would be gone before the commit is not ready: no change begins. Neither does one
        in the last step, which is saved.
        """
        ready, prepared = self._coordinator.ready_generation(next_step), self._state.prepared
        departure, now_s = self._departure, time.monotonic()
        if not ready or prepared is None or prepared.keeps_layout:
            return ready
        if next_step + 1 >= self._steps:
            return 0
        if departure is None:
            return ready
        self._departure = departure.at_vote(now_s, self._cost())
        if departure.hands_over and not self._departure.hands_over:
            self._publisher.leave(hands_over=False)
        return ready if departure.may_commit(now_s, self._cost()) else 0

    def _end_if_preempted(self) -> None:
        """Raise `PreemptedError` if this process is killed in the next step.

        Where the whole job ends, it ends with that step, if there is time.
        """
        departure, coordinator = self._departure, self._coordinator
        if departure is None or coordinator.commits_next or coordinator.is_ending:
            return
        left_s = departure.until_s - time.monotonic()
        if departure.ends(time.monotonic(), self._cost()) and not self._rendezvous.is_stopping():
            raise PreemptedError(f"taken away in {left_s:.1f} s, too soon for a hand-over")

    def _cost(self) -> HandOverCost:
        """Cost of handing over what this rank holds."""
        tensors = self.engine.shard.tensors.values() if self.engine is not None else ()
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return self._meter.cost(held * self.setup.optimizer.copies)

    def _pace(self) -> CopyPace:
        """Pace of a copy from now on: it ends before the last step, or this rank leaves."""
        most = 1 if self._departure is not None else self._steps - 1 - self.completed
        return CopyPace(step_s=self._meter.step_s, most_steps=most)

    def _is_due(self, step: int) -> bool:
        """Return whether this rank asks all others to save the state after `step`."""
        if self._is_owed:
            return True
        if self.rank != min(self.plan.layout.ranks):
            return False
        is_last = step + 1 == self._steps or self._coordinator.is_ending
        return is_last or self._checkpoints.is_due(step)

    def _idle(self) -> None:
        state = self._state
        if state.phase is not Phase.IDLE:
            state.enter(Phase.IDLE)
        self._rendezvous.wait_for_change()
        self._callbacks.on_idle()
        self._rendezvous.check((), 0.0)
        if self._coordinator.poll_idle():
            norm = self._coordinator.reshard()
            if norm is not None and self.engine is not None:
                state.enter(Phase.UPDATING)
            if norm is not None:
                self._coordinator.update(self.completed, norm)
            self._gather()

    def _report(self) -> None:
        """Report the last step, unless it has been; its parameters are gathered now.

        One that a recovery has given up is done again.
        """
        if self._unreported is not None and self._unreported[0].step >= self.completed:
            self._unreported = None
        if self._unreported is not None:
            phase = self._state.phase
            if phase in (Phase.VOTING, Phase.RECOVERING):  # which is over for plans, too
                is_idle = self.engine is None or phase is Phase.RECOVERING  # at the job's end
                self._state.enter(Phase.IDLE if is_idle else Phase.UPDATING)
            reduced, plan, start = self._unreported
            self._unreported = None
            assert self._state.norm is not None
            reduced = replace(reduced, norm=self._state.norm[1])
            self._callbacks.on_step(reduced, (time.perf_counter() - start) * 1e3, plan)

    def _note_sums(self) -> None:
        """Keep the loss of a step that is summed here: the recovery may complete it."""
        if self._unreported is None and self.engine is not None and self.engine.total is not None:
            summed = ReducedStep(self.completed, self.engine.loss, norm=nan, ready=(0, 0))
            self._unreported = (summed, *self._begun)

    def _gather(self) -> None:
        """Fill parameters that other ranks have updated, where they hold the optimizer state."""
        if self.engine is not None:
            self.engine.gather()

    def _changed(self, change: LayoutChange) -> None:
        self._is_joining = False
        self._meter.prepared(change.prepare_ms / 1e3)
        self._meter.changed(change.received_bytes, change.copy_ms / 1e3, change.pause_ms / 1e3)
        self._callbacks.on_layout_change(change)
        self._publisher.acknowledge(change)


def _checked(steps: int) -> int:
    if steps < 0:
        raise ContractError("steps", f"must be 0 or more, not {steps}")
    return steps
