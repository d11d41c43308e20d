"""Build of the next generation in the background: process groups and memory of its layout."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from resihp._devices import use_device
from resihp._shutdown import start_thread
from resihp.contracts import PeerLostError, Plan
from resihp.layout import Move, moves

from ..microbatches.ledger import SurvivingSum
from ..process_groups.abortable import (
    AbortableProcessGroup,
    ProcessGroupFactory,
    WaitClock,
    close_groups,
)
from ..process_groups.layout_groups import LayoutGroups, build_layout_groups
from ..rendezvous.membership import Rendezvous
from ..rendezvous.proposals import Proposal
from ..step import Engine, Setup
from ..step.gradient_accumulation import StepRemainder
from ..step.gradient_allreduce import SummedGradients
from ..step.shard import Shard, build_shard, initial_shard
from .buffers import (
    WINDOW,
    HeldState,
    PendingShard,
    ReceivedBytes,
    ReshardBudget,
    ShardAllocator,
    Spill,
    held_twice,
    to_spill,
    unshared,
)
from .exchange import Pair, pairs_of
from .gradient_migration import moves_of_sums
from .shared_memory import PeerLink, probe_peer_memory
from .spreading import time_links
from .warmup import warm_up_stage

_log = logging.getLogger("resihp.elastic")


@dataclass(frozen=True)
class ReshardContext:
    """Constants of one rank that every change of layout needs.

    waited  counts the time that training is blocked on other ranks
    """

    setup: Setup
    rendezvous: Rendezvous
    waited: WaitClock
    budget: ReshardBudget


class Generation:
    """One generation of the layout, from its proposal to its commit.

    A thread of its own builds it: groups and memory of all ranks are connected when it `is_built`.

    number    of the generation
    proposal  its plan and ranks
    before    plan of the old generation; None at the start of the job
    engine    of the old generation; None if this rank has no place in it
    lost      after a failure: ranks of the old generation that can send nothing, whose groups may
              be broken and are not used again. None without one
    kept      gradient sums that survive the failure and move as well

    error     reason for which it will not be built
    fault     the exception, where the reason is on this rank: the model or the disk refuses

    Set by the build:

    transit    all ranks of the old and the new layout, for the vote. None if the layout stays the
               same: the old groups and shard then serve the new generation
    links      to the ranks with which this one exchanges state and gradient sums
    planned    moves of the state
    link_s     seconds that a byte takes to this rank, by the rank from which it comes
    source     a rank that holds what is equal on all ranks of the old layout
    groups     None for a rank that has no place in the new layout
    pending    the new shard, with its memory in place

    Set by the transfer of state, in the pause:

    rest       remainder of a step that the old generation has begun; None between two steps
    total      summed gradients of a step whose update the new generation is to make
    rewound    steps completed in the checkpoint from which it starts; None: it starts from the
               state of the old generation

    The thread of a cancelled build ends by itself and does not delay the next build. At the barrier
    it ends at once; if a rank is lost after the barrier, it ends when connecting times out.
    """

    def __init__(
        self,
        context: ReshardContext,
        number: int,
        proposal: Proposal,
        *,
        before: Plan | None,
        engine: Engine | None = None,
        lost: tuple[int, ...] | None = None,
        kept: Sequence[SurvivingSum] = (),
    ) -> None:
        self.number, self.proposal, self.plan = number, proposal, proposal.plan
        self.is_built = False
        self.error: str | None = None
        self.fault: Exception | None = None
        self.took_s = 0.0
        self.cancelled = threading.Event()
        self.transit: AbortableProcessGroup | None = None
        self.links: dict[Pair, PeerLink] = {}
        self.planned: tuple[Move, ...] = ()
        self.link_s: Mapping[int, float] = {}
        self.groups: LayoutGroups | None = None
        self.pending: PendingShard | None = None
        self.rest: StepRemainder | None = None
        self.total: SummedGradients | None = None
        self.rewound: int | None = None
        is_new = before is None or proposal.missing_state
        holders = (proposal.plan if is_new or before is None else before).layout.ranks
        self.source = min(set(holders) - set(lost or ()))
        self._context, self._before, self._engine = context, before, engine
        self.lost, self.kept = lost, kept
        self._name = f"generation{context.rendezvous.recovery}.{number}"
        self._factory: ProcessGroupFactory | None = None
        self._thread = threading.Thread(target=self._run, name="resihp-prepare", daemon=True)
        start_thread(self._thread)

    @property
    def keeps_layout(self) -> bool:
        """True when only quotas change: no groups, no memory, no transfer."""
        return self.transit is None

    @property
    def _is_newcomer(self) -> bool:
        """True if this rank comes into a job that trains; after a failure the others wait."""
        return self._engine is None and self._before is not None and self.lost is None

    @property
    def shard(self) -> Shard | None:
        """The new shard."""
        return self.pending.shard if self.pending is not None else None

    @property
    def temporary_groups(self) -> tuple[AbortableProcessGroup, ...]:
        """Groups between the old and the new generation, unused after the commit."""
        if self.transit is None:
            return ()
        return (self.transit, *(link.group for link in self.links.values()))

    def wait(self) -> None:
        """Wait for the build. Raises `fault`, or `PeerLostError` if it cannot be completed."""
        members, is_starting = self.proposal.members, self._before is None
        try:
            self._context.rendezvous.join(self._thread, members, is_starting=is_starting)
        except PeerLostError:
            if self.fault is None:  # else the other rank may have ended by the same fault
                raise
        if self.fault is not None:
            raise self.fault
        self.check_error()

    def check_error(self) -> None:
        """Raise `PeerLostError` if the build has failed: the ranks agree on who is missing."""
        if self.error is not None:
            raise PeerLostError(f"the next generation could not be built: {self.error}")

    def abort_groups(self) -> None:
        """Abort the groups that have been built, and the one that is being built."""
        if self._factory is not None:
            self._factory.abort()

    def cancel(self) -> None:
        """Abort the build and close its groups."""
        self.cancelled.set()
        self.abort_groups()
        close_groups(self._built())
        self.links.clear()  # with them mapped memory of peers

    def _built(self) -> Iterator[AbortableProcessGroup]:
        """All groups that were built, also by a failed build; waits for its end."""
        self._thread.join()
        if self._factory is not None:
            yield from self._factory.groups

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            use_device(self._context.setup.device)
            self._build()
            self.is_built = True
        except (RuntimeError, dist.DistError, OSError) as error:
            self.error = str(error)  # the traceback would keep what was built
        except Exception as error:  # noqa: BLE001 - reported by `wait`
            self._report_fault(error)
            self.error = str(error)
        self._engine = None  # it holds the state of the old generation
        self.took_s = time.perf_counter() - start

    def _report_fault(self, error: Exception) -> None:
        """Log an error of this rank with its traceback, which is not kept."""
        if self.fault is None:
            _log.exception("the generation of plan %d cannot be built here", self.plan.version)
            self.fault = error.with_traceback(None)

    def _build(self) -> None:
        context, before, plan = self._context, self._before, self.plan
        rendezvous = context.rendezvous
        old = None if before is None or self.proposal.missing_state else before.layout
        if old == plan.layout and self.lost is None:
            if self._engine is not None:
                self.groups, self.pending = self._engine.groups, PendingShard(self._engine.shard)
            return
        parameters, planned = context.setup.model.parameters, tuple[Move, ...]()
        if old is not None:
            planned = moves(
                old,
                plan.layout,
                parameters,
                lost=self.lost or (),
                copies=context.setup.state_copies,
            )
        sums = moves_of_sums(parameters, before, plan, self.kept) if before is not None else ()
        with rendezvous.group_factory(
            context.waited, cancelled=self.cancelled, device=context.setup.device
        ) as factory:
            self._factory = factory
            is_starting, members = before is None, self.proposal.members
            rendezvous.barrier(self._name, members, self.cancelled, is_starting=is_starting)
            self._connect(factory, planned, sums)

    def _connect(
        self, factory: ProcessGroupFactory, planned: tuple[Move, ...], sums: tuple[Move, ...]
    ) -> None:
        """Build and warm up the groups, on every rank in one global order to exclude a deadlock.

        A group connects when it is first used, which would otherwise delay the first step.
        """
        context, plan, name = self._context, self.plan, self._name
        background = factory.uncounted()
        transit = background.group(f"{name}/transit", self.proposal.members)
        pairs = [
            background.group(f"{name}/pair", pair)
            for pair in pairs_of((*planned, *sums), factory.rank)
        ]
        groups = pending = None
        if factory.rank in plan.layout.ranks:
            parameters = context.setup.model.parameters
            groups = build_layout_groups(
                factory,
                plan.layout,
                parameters,
                name=name,
                copies=context.setup.state_copies,
            )
            try:
                pending = self._new_shard(groups)
            except Exception as error:
                self._report_fault(error)
                transit.warm_up()  # no rank ends by this before all others have come so far
                raise
            if self._is_newcomer:
                warm_up_stage(context.setup, background.alone(), groups, pending.shard)
        for group in (transit, *pairs, *(groups.all if groups else ())):
            group.warm_up()
        slice_bytes = context.budget.buffer_bytes // WINDOW
        links = {
            (low, high): probe_peer_memory(
                group, factory.rank, attach=context.budget.attach, slice_bytes=slice_bytes
            )
            for group in pairs
            for low, high in [group.ranks]
        }
        if self.lost is None:
            self.link_s = time_links(links, factory.rank)
        self.transit, self.links, self.planned = transit, links, planned
        self.groups, self.pending = groups, pending

    def _new_shard(self, groups: LayoutGroups) -> PendingShard:
        """The new shard. Runs code of the model and writes files: errors are this rank's own."""
        context, current = self._context, self._engine.shard if self._engine else None
        model, optimizer = context.setup.model, context.setup.optimizer
        if self._before is None:
            return PendingShard(initial_shard(model, optimizer, groups))
        if self.proposal.missing_state:
            return PendingShard(build_shard(model, optimizer, groups, current=current))
        old = HeldState.of(current) if current is not None else HeldState()
        by_rank = HeldState.by_rank(groups.layout, model.parameters, context.setup.state_copies)
        new, moments = by_rank[context.rendezvous.rank], optimizer.copies - 1
        budget, spilled = context.budget.on(context.setup.device), Spill()
        if budget.spill is not None:
            excess = budget.excess(held_twice(old, new, moments))
            spilled = to_spill(ReceivedBytes.of(old, new, moments), excess)
        is_repair = self.lost is not None
        allocator = ShardAllocator(spilled, budget.spill, is_forced=is_repair)
        shard = build_shard(model, optimizer, groups, current=current, allot=allocator.allot)
        others = {} if is_repair else unshared(shard, current)
        gradients = {held: allocator.gradient(held[0], one) for held, one in others.items()}
        return PendingShard(shard, allocator, gradients)
