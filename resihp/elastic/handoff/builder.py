"""Begins the preparation of worlds: which ranks take part, what each of them builds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from resihp.contracts import Layout
from resihp.layout import Move, holdings

from ..engine import Engine, Setup
from ..engine.shard import Shard, build_shard, initial_shard
from ..instep.ledger import Kept
from ..membership.meeting import meet
from ..membership.offers import Offer
from ..membership.rendezvous import Rendezvous
from ..present import Present
from ..worlds.comm import Network, WaitClock
from ..worlds.world import World
from .draft import Draft, Room, unshared
from .inherit import inherited
from .memory import Memory, Spill, coming, held_twice, to_spill
from .prepare import Preparation, Prepared, Target


class Builder:
    """Prepares worlds for one rank; `waited` counts the time that training waits in them."""

    def __init__(
        self,
        setup: Setup,
        present: Present,
        rendezvous: Rendezvous,
        waited: WaitClock,
        memory: Memory,
    ) -> None:
        self._setup, self._present = setup, present
        self._rendezvous, self._waited, self._memory = rendezvous, waited, memory

    def first(self) -> Preparation:
        """The world with which the job starts, filled with the model's initial values."""

        def build(world: World) -> Draft:
            return Draft(initial_shard(self._setup.model, self._setup.optimizer, world))

        offer = Offer(self._present.plan, self._rendezvous.alive)
        return self._prepare(0, offer, build, old=None, lost=None)

    def next(
        self,
        epoch: int,
        offer: Offer,
        lost: tuple[int, ...] | None = None,
        kept: Sequence[Kept] = (),
    ) -> Preparation:
        """The world of `offer`, its memory in place.

        After a loss, `lost` can send nothing any more, and `kept` sums of the step move as well;
        otherwise it is None. Where state is gone, no rank sends any.
        """
        engine = self._present.engine

        def build(world: World) -> Draft:
            present = engine.shard if engine is not None else None
            if offer.gone:
                model, optimizer = self._setup.model, self._setup.optimizer
                return Draft(build_shard(model, optimizer, world, present=present))
            return self._draft(world, present, is_repair=lost is not None)

        old = None if offer.gone else self._present.plan.layout
        sums = inherited(self._setup.model.parameters, self._present.plan, offer.plan, kept)
        return self._prepare(epoch, offer, build, old=old, lost=lost, sums=sums)

    def _draft(self, world: World, present: Shard | None, *, is_repair: bool) -> Draft:
        model, optimizer = self._setup.model, self._setup.optimizer
        old = present.ranges if present is not None else {}
        new = holdings(world.layout, model.parameters)[self._rendezvous.rank]
        excess = self._memory.excess(held_twice(old, new, optimizer.copies + 1))
        spilled = Spill()
        if self._memory.spill is not None:
            spilled = to_spill(coming(old, new), excess, optimizer.copies)
        room = Room(spilled, self._memory.spill, insists=is_repair)
        shard = build_shard(model, optimizer, world, present=present, allot=room.allot)
        others = {} if is_repair else unshared(shard, present)
        gradients = {param: room.gradient(param, tensor) for param, tensor in others.items()}
        return Draft(shard, room, gradients)

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
        build: Callable[[World], Draft],
        *,
        old: Layout | None,
        lost: tuple[int, ...] | None,
        sums: tuple[Move, ...] = (),
    ) -> Preparation:
        target = Target(
            epoch=epoch,
            plan=offer.plan,
            old=old,
            lost=lost or (),
            sums=sums,
            participants=offer.members,
            staying=offer.staying,
            is_repair=lost is not None,
            name=f"world{self._rendezvous.recovery}.{epoch}",
            gone=offer.gone,
        )
        engine = self._present.engine
        present = (engine.world, engine.shard) if engine is not None else None
        network = partial(self._network_of, target)
        return Preparation(
            target,
            self._setup.model.parameters,
            network,
            build,
            present,
            attach=self._memory.attach,
        )

    @contextmanager
    def _network_of(self, target: Target, cancelled: threading.Event) -> Iterator[Network]:
        """That of all who take part in a switch, once they have come."""
        rendezvous, ranks = self._rendezvous, target.participants

        def broken() -> str | None:
            return "given up" if cancelled.is_set() else rendezvous.broken(ranks, 0.0)

        def absent(waited_s: float) -> list[int]:
            if target.epoch == 0:  # processes start at their own pace
                waited_s = min(waited_s, rendezvous.timeouts.connect.total_seconds())
            return rendezvous.absent(ranks, waited_s)

        with self.network(cancelled) as network:
            store, timeout = rendezvous.link.store, rendezvous.timeouts.exchange
            meet(store, target.name, ranks, broken=broken, absent=absent, timeout=timeout)
            yield network

    @contextmanager
    def network(self, cancelled: threading.Event) -> Iterator[Network]:
        """What groups are made of; it gives up when the job does, or when `cancelled` is set."""
        rendezvous = self._rendezvous
        store = rendezvous.link.borrow()

        def broken(ranks: Sequence[int], waited_s: float) -> str | None:
            return "given up" if cancelled.is_set() else rendezvous.broken(ranks, waited_s)

        yield Network(
            store,
            rendezvous.rank,
            broken=broken,
            timeout=rendezvous.timeouts.exchange,
            connect=rendezvous.timeouts.connect,
            waited=self._waited,
            host=rendezvous.host,
        )
        # Only now: an attempt that failed may have left a thread that is blocked in it.
        rendezvous.link.give_back(store)
