"""Begins the preparation of worlds: which ranks take part, what each of them builds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from resihp.contracts import Layout

from ..engine import Engine, Setup
from ..engine.shard import Shard, build_shard, initial_shard
from ..membership.offers import Offer
from ..membership.rendezvous import Rendezvous
from ..present import Present
from ..worlds.comm import Network, WaitClock
from ..worlds.world import World
from .prepare import Preparation, Prepared, Target


class Builder:
    """Prepares worlds for one rank; `waited` counts the time that training waits in them."""

    def __init__(
        self, setup: Setup, present: Present, rendezvous: Rendezvous, waited: WaitClock
    ) -> None:
        self._setup, self._present = setup, present
        self._rendezvous, self._waited = rendezvous, waited

    def first(self) -> Preparation:
        """The world with which the job starts, filled with the model's initial values."""

        def build(world: World) -> Shard:
            return initial_shard(self._setup.model, self._setup.optimizer, world)

        offer = Offer(self._present.plan, self._rendezvous.alive)
        return self._prepare(0, offer, build, old=None, lost=None)

    def next(self, epoch: int, offer: Offer, lost: tuple[int, ...] | None = None) -> Preparation:
        """The world of `offer`, its memory in place.

        After a loss, `lost` can send nothing any more; otherwise it is None.
        """
        engine = self._present.engine

        def build(world: World) -> Shard:
            present = engine.shard if engine is not None else None
            return build_shard(self._setup.model, self._setup.optimizer, world, present=present)

        return self._prepare(epoch, offer, build, old=self._present.plan.layout, lost=lost)

    def engine(self, prepared: Prepared) -> Engine:
        """What runs steps in a world that is taken on."""
        assert prepared.world is not None
        assert prepared.shard is not None
        engine = Engine(
            self._setup,
            prepared.world,
            prepared.shard,
            prepared.plan,
            self._waited,
            prepared.rest,
        )
        engine.total = prepared.total
        return engine

    def _prepare(
        self,
        epoch: int,
        offer: Offer,
        build: Callable[[World], Shard],
        *,
        old: Layout | None,
        lost: tuple[int, ...] | None,
    ) -> Preparation:
        target = Target(
            epoch=epoch,
            plan=offer.plan,
            old=old,
            lost=lost or (),
            participants=offer.members,
            staying=offer.staying,
            is_repair=lost is not None,
            name=f"world{self._rendezvous.recovery}.{epoch}",
        )
        engine = self._present.engine
        present = (engine.world, engine.shard) if engine is not None else None
        return Preparation(target, self._setup.model.parameters, self.network, build, present)

    def network(self, cancelled: threading.Event) -> Network:
        """What groups are made of; it gives up when the job does, or when `cancelled` is set."""
        rendezvous = self._rendezvous

        def broken(ranks: Sequence[int], waited_s: float) -> str | None:
            return "given up" if cancelled.is_set() else rendezvous.broken(ranks, waited_s)

        return Network(
            rendezvous.open_store(),
            rendezvous.rank,
            broken=broken,
            timeout=rendezvous.timeouts.exchange,
            waited=self._waited,
            host=rendezvous.host,
        )
