"""The life of one rank: train, take on new plans between two steps, survive the loss of others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch

from resihp.contracts import InfeasibleError, Plan, StateLostError
from resihp.layout import moves

from .engine import Engine, Reduced, Setup
from .engine.shard import Shard, build_shard, initial_shard
from .events import Hooks, Switch
from .handoff.prepare import Preparation, Prepared
from .handoff.stream import keep_own, stream
from .membership.agent import PlanAgent
from .membership.agreement import Decision, Report
from .membership.phases import Phase, PhaseMachine
from .membership.plans import PlanSource
from .membership.rendezvous import Rendezvous
from .worlds.comm import Network, WaitClock, WorldBrokenError
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
        self.setup, self.rank, self.plan = setup, rendezvous.rank, plan
        self.completed = self.epoch = 0
        self.engine: Engine | None = None
        self._rendezvous, self._plans = rendezvous, plans
        self._hooks = hooks or Hooks()
        self._limit_bytes = limit_bytes
        self._machine = PhaseMachine()
        self._waited = WaitClock()
        self._norm: tuple[int, float] | None = None
        self._pending: Preparation | None = None
        self._doubt: Prepared | None = None
        self._paused_at: float | None = None
        self._agent = PlanAgent(
            plans, rendezvous, lambda: (self.epoch, self.plan.version), self._is_settled
        )

    @property
    def is_prepared(self) -> bool:
        """Whether the next world stands ready to be taken on."""
        return self._pending is not None and self._pending.result is not None

    def look_for_plan(self) -> None:
        """Begin to prepare the next epoch's world if its plan has been published."""
        if self._pending is None:
            plan = self._rendezvous.published(self.epoch + 1)
            if plan is not None:
                self._pending = self._prepare(self.epoch + 1, plan, self._build)

    def run(self, steps: int) -> None:
        """Train until `steps` updates have been made."""
        self._rendezvous.start()
        try:
            self._begin()
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
            if self.engine is not None:
                self._rendezvous.finish(len(self.plan.layout.ranks))
        finally:
            self._enter(Phase.STOPPED)
            self._agent.close()
            self._rendezvous.close()

    def _is_over(self, steps: int) -> bool:
        if self.engine is None:
            return self._rendezvous.finished()
        return self.completed >= steps

    def _begin(self) -> None:
        """Build the first world and fill it with the model's initial values."""
        fill = partial(initial_shard, self.setup.model, self.setup.optimizer)
        # Processes start at their own pace, so silence means nothing yet; connecting times out.
        prepared = self._prepare(0, self.plan, fill).wait(
            lambda ranks, _: self._rendezvous.broken(ranks, 0.0)
        )
        self._adopt(prepared)
        self._agent.start()

    # One step.

    def _advance(self) -> None:
        if self.engine is None:
            self._idle()
            return
        step, start = self.completed, time.perf_counter()
        self._enter(Phase.ACCUMULATING)
        loss = self.engine.accumulate(step)
        self._enter(Phase.REDUCING)
        reduced = self.engine.reduce(step, loss, self._ready_epoch(step + 1))
        self._norm = (step, reduced.norm)
        self._enter(Phase.UPDATING)
        self._complete(step, reduced.norm)
        self._hooks.on_step(reduced, (time.perf_counter() - start) * 1e3, self.plan)
        if self._everyone_ready(reduced):
            assert self._pending is not None
            self._switch(self._pending.wait(self._rendezvous.broken), lost=())

    def _complete(self, step: int, norm: float) -> None:
        assert self.engine is not None
        self.engine.update(norm, step)
        self.completed = step + 1

    def _idle(self) -> None:
        if self._machine.phase is not Phase.IDLE:
            self._enter(Phase.IDLE)
        self._rendezvous.wait_for_change()
        reason = self._rendezvous.broken((), 0.0)
        if reason is not None:
            raise WorldBrokenError(reason)
        self.look_for_plan()
        if self._pending is not None:
            self._switch(self._pending.wait(self._rendezvous.broken), lost=())

    # New plans.

    def _ready_epoch(self, next_step: int) -> int:
        self.look_for_plan()
        pending = self._pending
        if pending is None or pending.result is None:
            return 0
        return pending.epoch if next_step >= pending.result.plan.from_step else 0

    def _everyone_ready(self, reduced: Reduced) -> bool:
        ranks = len(self.plan.layout.ranks)
        return reduced.ready == (ranks, ranks * (self.epoch + 1))

    def _prepare(self, epoch: int, plan: Plan, build: Callable[[World], Shard]) -> Preparation:
        return Preparation(
            self._network,
            plan,
            self.setup.model.parameters,
            self._rendezvous.alive,
            build,
            epoch=epoch,
            name=f"world{self._rendezvous.recovery}.{epoch}",
        )

    def _network(self) -> Network:
        rendezvous = self._rendezvous
        return Network(
            rendezvous.open_store(),
            self.rank,
            broken=rendezvous.broken,
            timeout=rendezvous.timeouts.exchange,
            waited=self._waited,
        )

    def _switch(self, prepared: Prepared, lost: tuple[int, ...]) -> None:
        """Move the state over and take on the new world: all ranks, or none."""
        start = self._paused_at or time.perf_counter()
        was_training = self.engine is not None
        self._enter(Phase.STREAMING)
        received = self._stream(prepared, lost)
        self._enter(Phase.VOTING)
        self._doubt = prepared
        prepared.transit.all_reduce(torch.ones(1))
        self._adopt(prepared)
        pause_ms = (time.perf_counter() - start) * 1e3 if was_training else 0.0
        switch = Switch(
            plan=prepared.plan,
            step=self.completed,
            pause_ms=pause_ms,
            received_bytes=received,
            lost=lost,
        )
        self._hooks.on_switch(switch)
        self._agent.acknowledge(switch)

    def _build(self, world: World) -> Shard:
        present = self.engine.shard if self.engine is not None else None
        return build_shard(self.setup.model, self.setup.optimizer, world, present=present)

    def _stream(self, prepared: Prepared, lost: tuple[int, ...]) -> int:
        """Bring the prepared shard to the present state; the bytes that this rank received."""
        # Ranks that were idle do not know how many steps the job has behind it.
        count = torch.tensor([self.completed])
        self.completed = int(prepared.transit.all_reduce_max(count))
        old = self.engine.shard if self.engine is not None else None
        new = prepared.shard
        if new is not None:
            new.set_updates(self.completed)
            if old is not None:
                keep_own(old, new)
        parameters = self.setup.model.parameters
        planned = moves(self.plan.layout, prepared.plan.layout, parameters, lost=lost)
        return stream(prepared.transit, self.rank, planned, old, new, limit_bytes=self._limit_bytes)

    def _adopt(self, prepared: Prepared) -> None:
        """Take on a world; only now is the old state let go."""
        self.epoch, self.plan = prepared.epoch, prepared.plan
        old, self.engine = self.engine, None
        if old is not None:
            old.release()
        self._let_go(old, was_broken=self._paused_at is not None)
        if prepared.world is not None:
            assert prepared.shard is not None
            self.engine = Engine(
                self.setup, prepared.world, prepared.shard, prepared.plan, self._waited
            )
        self._pending = self._doubt = self._paused_at = None

    def _let_go(self, *old: object, was_broken: bool) -> None:
        """Drop worlds; one that was broken may have exchanges under way that nobody will end."""
        limit = self._rendezvous.timeouts.exchange + timedelta(seconds=5)
        self._agent.dispose(*old, hold_s=limit.total_seconds() if was_broken else 0.0)

    # Losses.

    def _recover(self, reason: str) -> None:
        """Agree with the survivors on what holds, and go on in a world without the lost ranks."""
        self._paused_at = self._paused_at or time.perf_counter()
        self._enter(Phase.RECOVERING)
        _log.warning("rank %d: %s", self.rank, reason)
        self._rendezvous.call_recovery(reason)
        decision = self._rendezvous.agree(self._report())
        self._settle(decision)
        lost = tuple(sorted(set(self.plan.layout.ranks) - set(decision.survivors)))
        if self.rank == decision.survivors[0]:
            self._publish_after_loss(decision)
        plan = self._rendezvous.await_plan(decision.next_epoch)
        self._pending = self._prepare(decision.next_epoch, plan, self._build)
        self._switch(self._pending.wait(self._rendezvous.broken), lost)

    def _report(self) -> Report:
        return Report(
            epoch=self.epoch,
            completed=self.completed,
            reduced=self.engine is not None and self.engine.whole,
            norm=self._norm,
            doubt=self._doubt.epoch if self._doubt is not None else None,
            seen=self._pending.epoch if self._pending is not None else self.epoch,
            idle=self.engine is None,
        )

    def _settle(self, decision: Decision) -> None:
        """Bring this rank to the state that was decided."""
        if self._doubt is not None and decision.epoch == self._doubt.epoch:
            self._adopt(self._doubt)
            self._paused_at = time.perf_counter()
        if self.engine is not None:
            if decision.completed > self.completed:
                assert decision.norm is not None
                self._complete(self.completed, decision.norm)
            self.engine.discard()
        self.completed = decision.completed
        self._let_go(self._pending, self._doubt, was_broken=True)
        self._pending = self._doubt = None

    def _publish_after_loss(self, decision: Decision) -> None:
        try:
            plan = self._plans.after_loss(self.plan, decision.survivors, decision.completed)
            lost = set(self.plan.layout.ranks) - set(decision.survivors)
            moves(self.plan.layout, plan.layout, self.setup.model.parameters, lost=lost)
        except (InfeasibleError, StateLostError) as error:
            self._rendezvous.publish(decision.next_epoch, str(error))
            return
        self._rendezvous.publish(decision.next_epoch, plan)

    def _is_settled(self) -> bool:
        return self._machine.phase not in (Phase.STREAMING, Phase.VOTING, Phase.RECOVERING)

    def _enter(self, phase: Phase) -> None:
        self._machine.enter(phase)
        self._hooks.on_phase(phase, self.completed)
