"""The life of one rank: train, take on new plans between two steps, survive the loss of others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from resihp.contracts import ContractError, FencedOutError, PeerLostError, Plan

from .checkpointing import Checkpoints
from .checkpointing.protocol import NoCheckpoints, StateManager
from .planning.publisher import PlanPublisher
from .planning.sources import PlanSource
from .process_groups.abortable import WaitClock
from .recovery import Recovery, passes
from .rendezvous.joiners import Joiners
from .rendezvous.membership import Rendezvous
from .reshard.buffers import ReshardBudget
from .reshard.coordinator import ReshardCoordinator
from .state.events import Callbacks, LayoutChange
from .state.phases import Phase, PhaseMachine
from .state.runtime_state import RuntimeState
from .step import Engine, Setup
from .step.schedule import check_plan


class Trainer:
    """Runs one rank of a job whose layout may change between any two steps.

    Every rank of the job (idle ones included) makes one with the same arguments but its own rank,
    and calls `run`. Raises `ContractError` for a plan that cannot be run; `run` raises
    `JobStoppedError` or `StateLostError` when the job cannot go on, and `FencedOutError` when the
    others have gone on without this rank.
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
        check_plan(plan, setup.model.parameters, plan.microbatches)
        self.setup, self.rank = setup, rendezvous.rank
        self._present = RuntimeState(plan)
        self._rendezvous, self._plans = rendezvous, plans
        self._callbacks = callbacks or Callbacks()
        self._machine = PhaseMachine()
        self._steps = 0
        self._is_coming_in = self._leaves = False
        self._keeper = _state_manager(checkpoints, setup, rendezvous)
        self._switching = ReshardCoordinator(
            setup,
            self._present,
            rendezvous,
            WaitClock(),
            self._enter,
            replace(self._callbacks, on_layout_change=self._switched),
            self._keeper,
            memory=memory or ReshardBudget(),
        )
        self._recovery = Recovery(
            setup,
            self._present,
            rendezvous,
            plans,
            self._switching,
            self._complete,
            can_restore=self._keeper.can_restore,
        )
        self._agent = PlanPublisher(
            plans, rendezvous, self._present, self._is_settled, self._refusal
        )

    @property
    def plan(self) -> Plan:
        """The plan of the present generation."""
        return self._present.plan

    @property
    def generation(self) -> int:
        """Counts the generations taken on."""
        return self._present.generation

    @property
    def completed(self) -> int:
        """Steps whose update has been made."""
        return self._present.completed

    @property
    def engine(self) -> Engine | None:
        """What runs this rank's part of a step; None while it has no place in the layout."""
        return self._present.engine

    @property
    def is_prepared(self) -> bool:
        """Whether the next generation stands ready to be taken on."""
        return self._switching.is_prepared

    def look_for_plan(self) -> None:
        """Begin to prepare the next generation's generation if its plan has been published."""
        self._switching.look_for_plan()

    def run(self, steps: int) -> None:
        """Train until `steps` updates have been made, those of checkpoints found included."""
        self._steps = steps
        self._rendezvous.start()
        self._live(self._begin)

    def join(self, steps: int) -> None:
        """Take a place in a job that is running, as soon as a plan has one for this rank.

        Everything that is slow the first time is done before, beside the job. The rendezvous of
        a joiner is made without ranks. Returns when the job ends, too.
        """
        self._steps = steps
        self._rendezvous.start()
        self._switching.warm_up()
        if self._come_in():
            self._live(lambda: None)
        else:
            self._rendezvous.close()

    def _come_in(self) -> bool:
        """Wait for an invitation; whether one came before the job's end, or a warning."""
        self._switching.paused_at = None
        self._rendezvous.withdraw()
        standbys = Joiners(self._rendezvous.stores.store)
        number = standbys.announce(self.rank)
        invitation = standbys.await_invitation(self.rank, number, lambda: self._leaves)
        if invitation is None:
            return False
        self._rendezvous.enter(invitation.recovery, invitation.alive)
        self._present.generation, self._present.plan = invitation.generation, invitation.plan
        self._is_coming_in = True
        return True

    def leave(self) -> None:
        """Hand over and return from `run` as soon as a plan does without this rank.

        For a warning of the platform; safe in a signal handler. If the process ends before, it
        counts as dead. Where all ranks are told so, the job ends with the step under way, which
        is saved where it has checkpoints.
        """
        self._leaves = True
        self._agent.leave()

    def _begin(self) -> None:
        self._switching.begin()
        if self.engine is not None:
            groups, shard = self.engine.groups, self.engine.shard
            self._present.completed = self._keeper.resume(groups.everyone, shard)

    def _live(self, begin: Callable[[], None]) -> None:
        steps, is_done = self._steps, False
        try:
            begin()
            self._agent.start()
            broken: str | None = None
            while broken or not self._is_over(steps):
                try:
                    if broken:
                        self._enter(Phase.RECOVERING)
                        self._recovery.recover(broken)
                    else:
                        self._advance()
                    broken = None
                except PeerLostError as error:
                    broken = str(error)
                except FencedOutError:
                    # The others lost a rank while this one came in, and went on without it.
                    if not self._is_coming_in:
                        raise
                    self._switching.forget()
                    broken = None
                    if not self._come_in():
                        break
            has_place = self.engine is not None
            is_done = has_place and (self.completed >= steps or not self._rendezvous.alive)
            if is_done:
                self._rendezvous.finish(len(self.plan.layout.ranks))
        finally:
            self._switching.forget()
            self._enter(Phase.STOPPED)
            self._agent.close()
            self._keeper.close(is_done=is_done)
            self._rendezvous.close()

    def _is_over(self, steps: int) -> bool:
        if self.rank not in self._rendezvous.alive:
            return True
        if self.engine is None:
            return self._rendezvous.is_finished()
        return self.completed >= steps

    # One step.

    def _advance(self) -> None:
        if self.engine is None:
            self._idle()
            return
        step, start = self.completed, time.perf_counter()
        self._enter(Phase.ACCUMULATING)
        groups = self.engine.groups
        self._keeper.prepare(self.plan, self.generation, self.engine.shard)
        replica = self.plan.layout.replicas[groups.place.dp]
        with self._rendezvous.failure_scope(passes(self.generation, groups, step), replica.ranks):
            self.engine.accumulate(step, lambda: self._rendezvous.is_broken)
        if not self.engine.is_accumulated:
            raise PeerLostError("another replica is hurt")
        self._enter(Phase.REDUCING)
        ready = self._switching.ready_generation(step + 1)
        reduced = self.engine.reduce(step, ready, is_due=self._is_due(step))
        self._present.norm, plan = (step, reduced.norm), self.plan
        is_switching = self._switching.is_filling
        if is_switching:
            self._switching.switch(norm=reduced.norm)
        self._enter(Phase.IDLE if self.engine is None else Phase.UPDATING)
        self._complete(step, reduced.norm)
        if reduced.is_due and not is_switching:  # ranks that have just come do not know of it
            self._keeper.save(step, self.engine.shard)
        self._callbacks.on_step(reduced, (time.perf_counter() - start) * 1e3, plan)
        if self._switching.everyone_ready(reduced) and self.completed < self._steps:
            self._switching.proceed()

    def _is_due(self, step: int) -> bool:
        """Whether this rank asks all others to save the state after `step`."""
        if self.rank != min(self.plan.layout.ranks):
            return False
        is_last = step + 1 == self._steps or self._switching.is_ending
        return is_last or self._keeper.is_due(step)

    def _complete(self, step: int, norm: float) -> None:
        """Make the update of a step whose gradients are whole everywhere."""
        self._keeper.fence()
        if self.engine is not None:
            self.engine.update(norm, step)
        self._present.completed = step + 1

    def _idle(self) -> None:
        if self._machine.phase is not Phase.IDLE:
            self._enter(Phase.IDLE)
        self._rendezvous.wait_for_change()
        self._callbacks.on_idle()
        reason = self._rendezvous.broken((), 0.0)
        if reason is not None:
            raise PeerLostError(reason)
        if self._switching.follow():
            norm = self._switching.switch()
            if norm is not None and self.engine is not None:
                self._enter(Phase.UPDATING)
            if norm is not None:
                self._complete(self.completed, norm)

    def _switched(self, switch: LayoutChange) -> None:
        self._is_coming_in = False
        self._callbacks.on_layout_change(switch)
        self._agent.acknowledge(switch)

    def _refusal(self, plan: Plan) -> str | None:
        """Why this job will not change to `plan`, if it will not."""
        try:
            check_plan(plan, self.setup.model.parameters, self.plan.microbatches)
        except ContractError as error:
            return str(error)
        return self._switching.refusal(plan)

    def _is_settled(self) -> bool:
        return self._machine.phase not in (Phase.STREAMING, Phase.VOTING, Phase.RECOVERING)

    def _enter(self, phase: Phase) -> None:
        self._machine.enter(phase)
        self._callbacks.on_phase(phase, self.completed)


def _state_manager(
    checkpoints: Checkpoints | None, setup: Setup, rendezvous: Rendezvous
) -> StateManager:
    if checkpoints is None:
        return NoCheckpoints()
    from .checkpointing.manager import CheckpointManager  # needs resihp[checkpoint]

    store = rendezvous.stores.store
    return CheckpointManager(checkpoints, setup, rendezvous.rank, store, host=rendezvous.host)
