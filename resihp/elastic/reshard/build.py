"""Builds the next generation in the background, groups and memory, while the present one trains."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from resihp._shutdown import start_thread
from resihp.contracts import Layout, PeerLostError, Plan
from resihp.layout import Move, Parameters, holdings, moves

from ..microbatches.ledger import SurvivingSum
from ..process_groups.abortable import AbortableProcessGroup, ProcessGroupFactory, WaitClock
from ..process_groups.close import close_groups
from ..process_groups.layout_groups import LayoutGroups, build_layout_groups
from ..rendezvous.barrier import barrier
from ..rendezvous.membership import Rendezvous
from ..rendezvous.proposals import Proposal
from ..state.runtime_state import RuntimeState
from ..step import Engine, Setup
from ..step.gradient_accumulation import Gradients, StepRemainder
from ..step.shard import Shard, build_shard, initial_shard
from .buffers import (
    PendingShard,
    ReshardBudget,
    ShardAllocator,
    Spill,
    coming,
    held_twice,
    to_spill,
    unshared,
)
from .exchange import Pair, pairs_of
from .gradient_migration import inherited
from .shared_memory import LocalPeer, probe_peer_memory

_log = logging.getLogger("resihp.elastic")


@dataclass(frozen=True)
class Generation:
    """A generation that is connected but not yet taken on.

    transit    all ranks of the old and the new generation; they agree over it. None if the layout
               stays the same: the old generation's groups and shard then serve the new one
    pairs      the ranks with which this one exchanges state and sums; `planned` are the moves of
               the state
    staying    members of the generation once it is taken on
    source     a rank that knows what all ranks of the old generation hold alike
    generation      None for a rank that has no place in the new layout
    draft      what the rank will hold, its memory in place
    cancelled  set when this generation is given up
    rest       of the step that the old generation has begun; None between two steps
    total      whole gradients of a step whose update the new generation is to make
    rewound    steps completed in the checkpoint with which it begins; None: it goes on with the
               state of the old generation
    """

    generation: int
    plan: Plan
    transit: AbortableProcessGroup | None
    pairs: dict[Pair, LocalPeer]
    planned: tuple[Move, ...]
    staying: tuple[int, ...]
    source: int
    groups: LayoutGroups | None
    draft: PendingShard | None
    cancelled: threading.Event
    rest: StepRemainder | None = None
    total: Gradients | None = None
    rewound: int | None = None

    @property
    def shard(self) -> Shard | None:
        """What the rank will hold."""
        return self.draft.shard if self.draft is not None else None

    @property
    def passage(self) -> tuple[AbortableProcessGroup, ...]:
        """Groups between the old generation and this one, unused after the change."""
        pairs = (neighbour.group for neighbour in self.pairs.values())
        return () if self.transit is None else (self.transit, *pairs)


@dataclass(frozen=True, kw_only=True)
class GenerationSpec:
    """The generation to build.

    old           layout that holds the state now; None where no rank has it: at the start of a
                  job, and when some of it is gone
    lost          ranks of `old` that can send nothing any more
    participants  every rank that takes part in the switch
    staying       those that are members afterwards
    is_repair     groups of the present generation may be broken and are not used again
    name          unique to the attempt
    gone          state that nobody alive holds, named
    sums          moves of gradient sums that a loss left, to those who go on with them
    """

    generation: int
    plan: Plan
    old: Layout | None
    lost: Collection[int]
    participants: tuple[int, ...]
    staying: tuple[int, ...]
    is_repair: bool
    name: str
    gone: str = ""
    sums: tuple[Move, ...] = ()

    @property
    def keeps_layout(self) -> bool:
        """Whether only quotas change: no group, no memory, no state."""
        return self.old == self.plan.layout and not self.is_repair

    @property
    def source(self) -> int:
        """The first rank that holds state of the old generation."""
        holders = self.plan.layout.ranks if self.old is None else self.old.ranks
        return min(set(holders) - set(self.lost))


class GenerationBuild:
    """Builds one generation in a thread of its own; `result` is there when all ranks are connected.

    `network` makes one when all who take part have come, and gives up when the event is set;
    `build` makes what this rank will hold in a generation; `present` is what it holds now, if it
    has a place; `attach` lets neighbours read each other's memory.

    `error` says why there will be no result. Where that is this rank's own doing, as when the model
    or the disk refuses, it is `fault` as well.

    The thread of a preparation that is given up ends by itself, and the next one does not wait for
    it. While ranks are waited for it ends at once; a rank that is lost after all have come, in the
    moment in which they connect, is waited for until connecting times out.
    """

    def __init__(
        self,
        target: GenerationSpec,
        parameters: Parameters,
        factory: Callable[[threading.Event], AbstractContextManager[ProcessGroupFactory]],
        build: Callable[[LayoutGroups], PendingShard],
        present: tuple[LayoutGroups, Shard] | None,
        *,
        attach: bool,
    ) -> None:
        self.target = target
        self.result: Generation | None = None
        self.error: str | None = None
        self.fault: Exception | None = None
        self.took_s = 0.0
        self.cancelled = threading.Event()
        self._parameters, self._make_network = parameters, factory
        self._build, self._present, self._attach = build, present, attach
        self._factory: ProcessGroupFactory | None = None
        self._thread = threading.Thread(target=self._run, name="resihp-prepare", daemon=True)
        start_thread(self._thread)

    def wait(self, broken: Callable[[Sequence[int], float], str | None]) -> Generation:
        """The generation. Raises `fault` or `PeerLostError` if it will never be complete."""
        waited = timedelta(0)
        slice_ = timedelta(milliseconds=20)
        while self._thread.is_alive():
            self._thread.join(slice_.total_seconds())
            waited += slice_
            reason = broken(self.target.participants, waited.total_seconds())
            if reason is not None:
                raise PeerLostError(reason)
        if self.fault is not None:
            raise self.fault
        if self.result is None:
            raise PeerLostError(f"the next generation could not be built: {self.error}")
        return self.result

    def give_up(self) -> None:
        """Nobody will take this generation on; its groups are let go."""
        self.cancelled.set()
        close_groups(self._built())

    def _built(self) -> Iterator[AbortableProcessGroup]:
        """All groups that were built, also by a failed build; waits for its end."""
        self._thread.join()
        if self._factory is not None:
            yield from self._factory.groups

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            self.result = self._connect(self.target)
        except (RuntimeError, dist.DistError, OSError) as error:
            self.error = str(error)  # without its traceback, which would keep what was built
        except Exception as error:  # noqa: BLE001 a thread that ended without a word is waited for
            if self.fault is None:
                self._blame(error)
            self.error = str(error)
        del self._build, self._present  # they hold the old generation
        self.took_s = time.perf_counter() - start

    def _connect(self, target: GenerationSpec) -> Generation:
        """Every rank builds and warms up its groups in one global order, so none waits in a circle.

        A group connects when it is first used; that belongs here, not into the first step.
        """
        planned: tuple[Move, ...] = ()
        if target.keeps_layout:
            groups, shard = self._present or (None, None)
            return self._prepared(None, {}, planned, groups, PendingShard(shard) if shard else None)
        if target.old is not None:
            planned = moves(target.old, target.plan.layout, self._parameters, lost=target.lost)
        with self._make_network(self.cancelled) as factory:
            self._factory = factory
            return self._build_groups(factory, target, planned)

    def _build_groups(
        self, factory: ProcessGroupFactory, target: GenerationSpec, planned: tuple[Move, ...]
    ) -> Generation:
        layout = target.plan.layout
        beside = factory.uncounted()  # they carry nothing that a pass waits for
        transit = beside.group(f"{target.name}/transit", target.participants)
        pairs = [
            beside.group(f"{target.name}/pair", pair)
            for pair in pairs_of((*planned, *target.sums), factory.rank)
        ]
        groups = draft = None
        if factory.rank in layout.ranks:
            groups = build_layout_groups(factory, layout, self._parameters, name=target.name)
            draft = self._drafted(groups)
        for group in (transit, *pairs, *(groups.all if groups else ())):
            group.warm_up()
        attach = self._attach and self._is_in_host_memory(draft)
        neighbours = {
            (low, high): probe_peer_memory(group, factory.rank, attach=attach)
            for group in pairs
            for low, high in [group.ranks]
        }
        return self._prepared(transit, neighbours, planned, groups, draft)

    def _drafted(self, groups: LayoutGroups) -> PendingShard:
        """What this rank will hold; here the model's own code runs, and the disk is written."""
        try:
            return self._build(groups)
        except Exception as error:
            self._blame(error)
            raise

    def _blame(self, error: Exception) -> None:
        """Tell what has failed here, with its traceback, which is not kept."""
        _log.exception("the generation of plan %d cannot be built here", self.target.plan.version)
        self.fault = error.with_traceback(None)

    def _is_in_host_memory(self, draft: PendingShard | None) -> bool:
        """Whether all that this rank holds and is to hold is."""
        shards = [self._present[1]] if self._present is not None else []
        shards += [draft.shard] if draft is not None else []
        return all(t.device.type == "cpu" for shard in shards for t in shard.tensors.values())

    def _prepared(
        self,
        transit: AbortableProcessGroup | None,
        pairs: dict[Pair, LocalPeer],
        planned: tuple[Move, ...],
        groups: LayoutGroups | None,
        draft: PendingShard | None,
    ) -> Generation:
        target = self.target
        return Generation(
            target.generation,
            target.plan,
            transit,
            pairs,
            planned,
            target.staying,
            target.source,
            groups,
            draft,
            self.cancelled,
        )


class GenerationBuilder:
    """Prepares generations for one rank; `waited` counts the time that training waits in them."""

    def __init__(
        self,
        setup: Setup,
        present: RuntimeState,
        rendezvous: Rendezvous,
        waited: WaitClock,
        memory: ReshardBudget,
    ) -> None:
        self._setup, self._present = setup, present
        self._rendezvous, self._waited, self._memory = rendezvous, waited, memory

    def first(self) -> GenerationBuild:
        """The generation with which the job starts, filled with the model's initial values."""

        def build(groups: LayoutGroups) -> PendingShard:
            return PendingShard(initial_shard(self._setup.model, self._setup.optimizer, groups))

        offer = Proposal(self._present.plan, self._rendezvous.alive)
        return self._prepare(0, offer, build, old=None, lost=None)

    def next(
        self,
        generation: int,
        offer: Proposal,
        lost: tuple[int, ...] | None = None,
        kept: Sequence[SurvivingSum] = (),
    ) -> GenerationBuild:
        """The generation of `offer`, its memory in place.

        After a loss, `lost` can send nothing any more, and `kept` sums of the step move as well;
        otherwise it is None. Where state is gone, no rank sends any.
        """
        engine = self._present.engine

        def build(groups: LayoutGroups) -> PendingShard:
            present = engine.shard if engine is not None else None
            if offer.missing_state:
                model, optimizer = self._setup.model, self._setup.optimizer
                return PendingShard(build_shard(model, optimizer, groups, current=present))
            return self._draft(groups, present, is_repair=lost is not None)

        old = None if offer.missing_state else self._present.plan.layout
        sums = inherited(self._setup.model.parameters, self._present.plan, offer.plan, kept)
        return self._prepare(generation, offer, build, old=old, lost=lost, sums=sums)

    def _draft(
        self, groups: LayoutGroups, present: Shard | None, *, is_repair: bool
    ) -> PendingShard:
        model, optimizer = self._setup.model, self._setup.optimizer
        old = present.ranges if present is not None else {}
        new = holdings(groups.layout, model.parameters)[self._rendezvous.rank]
        excess = self._memory.excess(held_twice(old, new, optimizer.copies + 1))
        spilled = Spill()
        if self._memory.spill is not None:
            spilled = to_spill(coming(old, new), excess, optimizer.copies)
        room = ShardAllocator(spilled, self._memory.spill, insists=is_repair)
        shard = build_shard(model, optimizer, groups, current=present, allot=room.allot)
        others = {} if is_repair else unshared(shard, present)
        gradients = {param: room.gradient(param, tensor) for param, tensor in others.items()}
        return PendingShard(shard, room, gradients)

    def engine(self, prepared: Generation) -> Engine:
        """What runs steps in a generation that is taken on."""
        assert prepared.groups is not None
        assert prepared.shard is not None
        engine = Engine(
            self._setup,
            prepared.groups,
            prepared.shard,
            prepared.plan,
            self._waited,
            prepared.rest,
        )
        engine.total = prepared.total
        return engine

    def _prepare(
        self,
        generation: int,
        offer: Proposal,
        build: Callable[[LayoutGroups], PendingShard],
        *,
        old: Layout | None,
        lost: tuple[int, ...] | None,
        sums: tuple[Move, ...] = (),
    ) -> GenerationBuild:
        target = GenerationSpec(
            generation=generation,
            plan=offer.plan,
            old=old,
            lost=lost or (),
            sums=sums,
            participants=offer.members,
            staying=offer.staying,
            is_repair=lost is not None,
            name=f"generation{self._rendezvous.recovery}.{generation}",
            gone=offer.missing_state,
        )
        engine = self._present.engine
        present = (engine.groups, engine.shard) if engine is not None else None
        factory = partial(self._network_of, target)
        return GenerationBuild(
            target,
            self._setup.model.parameters,
            factory,
            build,
            present,
            attach=self._memory.attach,
        )

    @contextmanager
    def _network_of(
        self, target: GenerationSpec, cancelled: threading.Event
    ) -> Iterator[ProcessGroupFactory]:
        """That of all who take part in a switch, once they have come."""
        rendezvous, ranks = self._rendezvous, target.participants

        def broken() -> str | None:
            return "given up" if cancelled.is_set() else rendezvous.broken(ranks, 0.0)

        def absent(waited_s: float) -> list[int]:
            if target.generation == 0:  # processes start at their own pace
                waited_s = min(waited_s, rendezvous.timeouts.connect.total_seconds())
            return rendezvous.absent(ranks, waited_s)

        with self.factory(cancelled) as factory:
            store, timeout = rendezvous.stores.store, rendezvous.timeouts.exchange
            barrier(store, target.name, ranks, broken=broken, absent=absent, timeout=timeout)
            yield factory

    @contextmanager
    def factory(self, cancelled: threading.Event) -> Iterator[ProcessGroupFactory]:
        """What groups are made of; it gives up when the job does, or when `cancelled` is set."""
        rendezvous = self._rendezvous
        store = rendezvous.stores.borrow()

        def broken(ranks: Sequence[int], waited_s: float) -> str | None:
            return "given up" if cancelled.is_set() else rendezvous.broken(ranks, waited_s)

        yield ProcessGroupFactory(
            store,
            rendezvous.rank,
            broken=broken,
            timeout=rendezvous.timeouts.exchange,
            connect=rendezvous.timeouts.connect,
            waited=self._waited,
            host=rendezvous.host,
        )
        # Only now: an attempt that failed may have left a thread that is blocked in it.
        rendezvous.stores.give_back(store)
