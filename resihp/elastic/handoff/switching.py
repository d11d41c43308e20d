"""One rank's side of a change of layout: prepare, stream, vote, take on, let go."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch

from resihp.contracts import Plan
from resihp.layout import moves

from ..engine import Engine, Reduced, Setup
from ..engine.replicated import carry_over
from ..engine.shard import Shard, build_shard, initial_shard
from ..engine.sums import Rest
from ..events import Switch
from ..instep.ledger import Kept, indices, spans
from ..membership.phases import Phase
from ..membership.rendezvous import Rendezvous
from ..present import Present
from ..worlds.comm import Network, WaitClock
from ..worlds.world import World
from .disposal import dispose
from .inherit import Succession
from .prepare import Preparation, Prepared
from .stream import keep_own, stream


class Switching:
    """Takes a rank from its present world to the next one.

    The next world is `pending` from its plan's appearance on; it is in `doubt` from the vote on
    until this rank knows that all have taken it on. `paused_at` (`time.perf_counter`) is when
    training stopped because a world broke; None while all is well.
    """

    def __init__(
        self,
        setup: Setup,
        present: Present,
        rendezvous: Rendezvous,
        waited: WaitClock,
        enter: Callable[[Phase], None],
        *,
        limit_bytes: int,
    ) -> None:
        self.pending: Preparation | None = None
        self.doubt: Prepared | None = None
        self.paused_at: float | None = None
        self._setup, self._present, self._rendezvous = setup, present, rendezvous
        self._waited, self._enter = waited, enter
        self._limit_bytes = limit_bytes

    # Before a switch.

    @property
    def is_prepared(self) -> bool:
        """Whether the next world stands ready to be taken on."""
        return self.pending is not None and self.pending.result is not None

    def begin(self) -> None:
        """Build the first world, fill it with the model's initial values, take it on."""
        fill = partial(initial_shard, self._setup.model, self._setup.optimizer)
        # Processes start at their own pace, so silence means nothing yet; connecting times out.
        prepared = self._preparation(0, self._present.plan, fill).wait(
            lambda ranks, _: self._rendezvous.broken(ranks, 0.0)
        )
        self.adopt(prepared)

    def look_for_plan(self) -> None:
        """Begin to prepare the next epoch's world if its plan has been published."""
        if self.pending is None:
            epoch = self._present.epoch + 1
            plan = self._rendezvous.published(epoch)
            if plan is not None:
                self.prepare(epoch, plan)

    def prepare(self, epoch: int, plan: Plan) -> None:
        """Begin to build the world of `plan` in the background."""
        self.pending = self._preparation(epoch, plan, self._build)

    def ready_epoch(self, next_step: int) -> int:
        """The epoch that this rank could take on before `next_step`; 0 if there is none."""
        self.look_for_plan()
        if self.pending is None or self.pending.result is None:
            return 0
        return self.pending.epoch if next_step >= self.pending.result.plan.from_step else 0

    def everyone_ready(self, reduced: Reduced) -> bool:
        """Whether all ranks of the present world said that they are ready for the next one."""
        ranks = len(self._present.plan.layout.ranks)
        return reduced.ready == (ranks, ranks * (self._present.epoch + 1))

    # The switch.

    def switch(self, lost: tuple[int, ...] = (), kept: Sequence[Kept] | None = None) -> Switch:
        """Move the state to the pending world and take it on: all ranks, or none.

        Collective over the ranks alive; `lost` can send nothing any more, and `kept` are the
        gradient sums of the step that they left (None between two steps). Raises
        `WorldBrokenError` if another one is lost on the way: the survivors then agree on which
        world holds.
        """
        assert self.pending is not None
        prepared = self.pending.wait(self._rendezvous.broken)
        start = self.paused_at or time.perf_counter()
        was_training = self._present.engine is not None
        self._enter(Phase.STREAMING)
        received = self._stream(prepared, lost)
        if kept is not None:
            prepared = replace(prepared, rest=self._succession(prepared, kept))
        self._enter(Phase.VOTING)
        self.doubt = prepared
        prepared.transit.all_reduce(torch.ones(1))
        self.adopt(prepared)
        return Switch(
            plan=prepared.plan,
            step=self._present.completed,
            pause_ms=(time.perf_counter() - start) * 1e3 if was_training else 0.0,
            received_bytes=received,
            lost=lost,
            kept=spans(index for one in kept or () for index in indices(one.finished)),
        )

    def adopt(self, prepared: Prepared) -> None:
        """Take on a world; only now is the old state let go."""
        present = self._present
        present.epoch, present.plan = prepared.epoch, prepared.plan
        old, present.engine = present.engine, None
        if old is not None:
            old.release()
        self._let_go(old, was_broken=self.paused_at is not None)
        if prepared.world is not None:
            assert prepared.shard is not None
            present.engine = Engine(
                self._setup,
                prepared.world,
                prepared.shard,
                prepared.plan,
                self._waited,
                prepared.rest,
            )
        self.pending = self.doubt = self.paused_at = None

    def forget(self) -> None:
        """Let go of a next world that was given up."""
        self._let_go(self.pending, self.doubt, was_broken=True)
        self.pending = self.doubt = None

    # Inside.

    def _preparation(self, epoch: int, plan: Plan, build: Callable[[World], Shard]) -> Preparation:
        return Preparation(
            self._network,
            plan,
            self._setup.model.parameters,
            self._rendezvous.alive,
            build,
            epoch=epoch,
            name=f"world{self._rendezvous.recovery}.{epoch}",
        )

    def _network(self) -> Network:
        rendezvous = self._rendezvous
        return Network(
            rendezvous.open_store(),
            rendezvous.rank,
            broken=rendezvous.broken,
            timeout=rendezvous.timeouts.exchange,
            waited=self._waited,
        )

    def _build(self, world: World) -> Shard:
        engine = self._present.engine
        present = engine.shard if engine is not None else None
        return build_shard(self._setup.model, self._setup.optimizer, world, present=present)

    def _stream(self, prepared: Prepared, lost: tuple[int, ...]) -> int:
        """Bring the prepared shard to the present state; the bytes that this rank received."""
        present = self._present
        old = present.engine.shard if present.engine is not None else None
        new = prepared.shard
        source = min(set(present.plan.layout.ranks) - set(lost))
        present.completed = carry_over(
            prepared.transit, self._setup, present.completed, old=old, new=new, source=source
        )
        if old is not None and new is not None:
            keep_own(old, new)
        parameters = self._setup.model.parameters
        planned = moves(present.plan.layout, prepared.plan.layout, parameters, lost=lost)
        return stream(
            prepared.transit,
            self._rendezvous.rank,
            planned,
            old,
            new,
            copies=self._setup.optimizer.copies,
            limit_bytes=self._limit_bytes,
        )

    def _succession(self, prepared: Prepared, kept: Sequence[Kept]) -> Rest:
        """Bring the sums of the step in progress to those who go on with them."""
        present = self._present
        succession = Succession(
            self._setup,
            prepared.transit,
            self._rendezvous.rank,
            present.plan,
            prepared.plan,
            self._limit_bytes,
        )
        return succession.settle(kept, present.engine, prepared.shard)

    def _let_go(self, *old: object, was_broken: bool) -> None:
        """Drop worlds; one that was broken may have exchanges under way that nobody will end."""
        limit = self._rendezvous.timeouts.exchange + timedelta(seconds=5)
        dispose(*old, hold_s=limit.total_seconds() if was_broken else 0.0)
