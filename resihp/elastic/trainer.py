"""The life of one rank: train, take on new plans between two steps, survive the loss of others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from resihp.contracts import InfeasibleError, Plan, StateLostError
from resihp.layout import moves

from .engine import Engine, Setup
from .engine.engine import holding
from .events import Hooks, Switch
from .handoff.switching import Switching
from .handoff.warmup import warm_up
from .membership.agent import PlanAgent
from .membership.agreement import Decision, Report
from .membership.offers import Offer
from .membership.phases import Phase, PhaseMachine
from .membership.plans import PlanSource
from .membership.rendezvous import Rendezvous
from .membership.standbys import Standbys
from .present import Present
from .worlds.comm import WaitClock, WorldBrokenError
from .worlds.world import World

_log = logging.getLogger("resihp.elastic")


class Trainer:
    """Runs one rank of a job whose layout may change between any two steps.

    Every rank of the job (idle ones included) makes one with the same arguments but its own rank,
    and calls `run`. Raises `StopError` or `StateLostError` when the job cannot go on, and
    `FencedOutError` when the others have gone on without this rank.
    """

    def __init__(
        self,
        setup: Setup,
        plan: Plan,
        rendezvous: Rendezvous,
        plans: PlanSource,
        *,
        hooks: Hooks | None = None,
        limit_bytes: int = 256 << 20,
    ) -> None:
        self.setup, self.rank = setup, rendezvous.rank
        self._present = Present(plan)
        self._rendezvous, self._plans = rendezvous, plans
        self._hooks = hooks or Hooks()
        self._machine = PhaseMachine()
        self._steps = 0
        self._norm: tuple[int, float] | None = None
        self._switching = Switching(
            setup,
            self._present,
            rendezvous,
            WaitClock(),
            self._enter,
            replace(self._hooks, on_switch=self._switched),
            limit_bytes=limit_bytes,
        )
        self._agent = PlanAgent(plans, rendezvous, self._present, self._is_settled)

    @property
    def plan(self) -> Plan:
        """The plan of the present world."""
        return self._present.plan

    @property
    def epoch(self) -> int:
        """Counts the worlds taken on."""
        return self._present.epoch

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
        """Whether the next world stands ready to be taken on."""
        return self._switching.is_prepared

    def look_for_plan(self) -> None:
        """Begin to prepare the next epoch's world if its plan has been published."""
        self._switching.look_for_plan()

    def run(self, steps: int) -> None:
        """Train until `steps` updates have been made."""
        self._steps = steps
        self._rendezvous.start()
        self._live(self._switching.begin)

    def join(self, steps: int) -> None:
        """Take a place in a job that is running, as soon as a plan has one for this rank.

        Everything that is slow the first time is done before, beside the job. The rendezvous of
        a joiner is made with its own rank alone. Returns when the job ends, too.
        """
        self._steps = steps
        self._rendezvous.start()
        warm_up(self.setup, self._switching.network())
        standbys = Standbys(self._rendezvous.open_store())
        number = standbys.announce(self.rank)
        invitation = standbys.await_invitation(self.rank, number)
        if invitation is None:
            self._rendezvous.close()
            return
        self._rendezvous.come_in(invitation.recovery, invitation.alive)
        self._present.epoch, self._present.plan = invitation.epoch, invitation.plan
        self._live(lambda: None)

    def leave(self) -> None:
        """Hand over and return from `run` as soon as a plan does without this rank.

        For a warning of the platform; safe in a signal handler. If the process ends before, it
        counts as dead.
        """
        self._agent.leave()

    def _live(self, begin: Callable[[], None]) -> None:
        steps = self._steps
        try:
            begin()
            self._agent.start()
            broken: str | None = None
            while broken or not self._is_over(steps):
                try:
                    if broken:
                        self._recover(broken)
                    else:
                        self._advance()
                    broken = None
                except WorldBrokenError as error:
                    broken = str(error)
            if self.engine is not None and self.completed >= steps:
                self._rendezvous.finish(len(self.plan.layout.ranks))
        finally:
            self._switching.forget()
            self._enter(Phase.STOPPED)
            self._agent.close()
            self._rendezvous.close()

    def _is_over(self, steps: int) -> bool:
        if self.rank not in self._rendezvous.alive:
            return True
        if self.engine is None:
            return self._rendezvous.finished()
        return self.completed >= steps

    # One step.

    def _advance(self) -> None:
        if self.engine is None:
            self._idle()
            return
        step, start = self.completed, time.perf_counter()
        self._enter(Phase.ACCUMULATING)
        world = self.engine.world
        replica = self.plan.layout.replicas[world.place.dp]
        with self._rendezvous.among(_passes(self.epoch, world, step), replica.ranks):
            self.engine.accumulate(step)
        self._enter(Phase.REDUCING)
        reduced = self.engine.reduce(step, self._switching.ready_epoch(step + 1))
        self._norm, plan = (step, reduced.norm), self.plan
        if self._switching.is_filling:
            self._switching.switch(norm=reduced.norm)
        self._enter(Phase.IDLE if self.engine is None else Phase.UPDATING)
        self._complete(step, reduced.norm)
        self._hooks.on_step(reduced, (time.perf_counter() - start) * 1e3, plan)
        if self._switching.everyone_ready(reduced) and self.completed < self._steps:
            self._switching.proceed()

    def _complete(self, step: int, norm: float) -> None:
        """Make the update of a step whose gradients are whole everywhere."""
        if self.engine is not None:
            self.engine.update(norm, step)
        self._present.completed = step + 1

    def _idle(self) -> None:
        if self._machine.phase is not Phase.IDLE:
            self._enter(Phase.IDLE)
        self._rendezvous.wait_for_change()
        reason = self._rendezvous.broken((), 0.0)
        if reason is not None:
            raise WorldBrokenError(reason)
        if self._switching.follow():
            norm = self._switching.switch()
            if norm is not None and self.engine is not None:
                self._enter(Phase.UPDATING)
            if norm is not None:
                self._complete(self.completed, norm)

    def _switched(self, switch: Switch) -> None:
        self._hooks.on_switch(switch)
        self._agent.acknowledge(switch)

    # Losses.

    def _recover(self, reason: str) -> None:
        """Agree with the survivors on what holds, and go on in a world without the lost ranks."""
        self._switching.paused_at = self._switching.paused_at or time.perf_counter()
        self._enter(Phase.RECOVERING)
        _log.warning("rank %d: %s", self.rank, reason)
        self._rendezvous.call_recovery(reason, self._leaves())
        decision = self._rendezvous.agree(self._report(), self.plan.microbatches)
        self._settle(decision)
        lost = tuple(sorted(set(self.plan.layout.ranks) - set(decision.survivors)))
        if self.rank == decision.survivors[0]:
            self._publish_after_loss(decision)
        offer = self._rendezvous.await_offer(decision.next_epoch)
        self._switching.repair(decision.next_epoch, offer, lost)
        self._switching.switch(lost, decision.kept)

    def _leaves(self) -> list[str]:
        """The passes that the other ranks of this one's replica cannot finish without it."""
        left, doubt = [], self._switching.doubt
        if self.engine is not None:
            step = self.completed + self.engine.is_accumulated
            left.append(_passes(self.epoch, self.engine.world, step))
        if doubt is not None and doubt.world is not None:
            left.append(_passes(doubt.epoch, doubt.world, self.completed))
        return left

    def _report(self) -> Report:
        pending, doubt = self._switching.pending, self._switching.doubt
        holdings = [] if self.engine is None else [self.engine.holding(self.epoch)]
        if doubt is not None and doubt.world is not None:
            begun = doubt.rest.shares[doubt.world.place.dp].begun if doubt.rest else ()
            summed = self._switching.is_handed_over
            holdings.append(holding(doubt.world, doubt.epoch, begun, summed=summed))
        return Report(
            epoch=self.epoch,
            completed=self.completed,
            holdings=tuple(holdings),
            norm=self._norm,
            doubt=doubt.epoch if doubt is not None else None,
            seen=pending.target.epoch if pending is not None else self.epoch,
            idle=self.engine is None,
        )

    def _settle(self, decision: Decision) -> None:
        """Bring this rank to the state that was decided."""
        doubt = self._switching.doubt
        if doubt is not None and decision.epoch == doubt.epoch:
            self._switching.adopt(doubt)
            self._switching.paused_at = time.perf_counter()
        self._switching.catch_up(decision.epoch)
        if self.engine is not None and decision.completed > self.completed:
            assert decision.norm is not None
            self._complete(self.completed, decision.norm)
        self._present.completed = decision.completed
        self._switching.forget()

    def _publish_after_loss(self, decision: Decision) -> None:
        try:
            plan, lost = self.plan, set(self.plan.layout.ranks) - set(decision.survivors)
            if lost:
                plan = self._plans.after_loss(plan, decision.survivors, decision.completed)
            moves(self.plan.layout, plan.layout, self.setup.model.parameters, lost=lost)
            if plan.microbatches != self.plan.microbatches:
                raise InfeasibleError("microbatches", "a plan must not change their number")
        except (InfeasibleError, StateLostError) as error:
            self._rendezvous.publish(decision.next_epoch, str(error))
            return
        self._rendezvous.publish(decision.next_epoch, Offer(plan, decision.survivors))

    def _is_settled(self) -> bool:
        return self._machine.phase not in (Phase.STREAMING, Phase.VOTING, Phase.RECOVERING)

    def _enter(self, phase: Phase) -> None:
        self._machine.enter(phase)
        self._hooks.on_phase(phase, self.completed)


def _passes(epoch: int, world: World, step: int) -> str:
    """Names the passes of one step in the replica of `world` in which this rank stands."""
    return f"{epoch}.{world.place.dp}.{step}"
