"""Builds the next world in the background, groups and memory, while the present one trains."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from resihp._shutdown import start_thread
from resihp.contracts import Layout, Plan, WorldBrokenError
from resihp.layout import Move, Parameters, moves

from ..engine.shard import Shard
from ..engine.sums import Gradients, Rest
from ..worlds.comm import Group, Network
from ..worlds.world import World, build_world
from .courier import Pair, pairs_of
from .disposal import dispose
from .draft import Draft
from .neighbours import Neighbour, introduce

_log = logging.getLogger("resihp.elastic")


@dataclass(frozen=True)
class Prepared:
    """A world that is connected but not yet taken on.

    transit    all ranks of the old and the new world; they agree over it. None if the layout
               stays the same: the old world's groups and shard then serve the new one
    pairs      the ranks with which this one exchanges state and sums; `planned` are the moves of
               the state
    staying    members of the world once it is taken on
    source     a rank that knows what all ranks of the old world hold alike
    world      None for a rank that has no place in the new layout
    draft      what the rank will hold, its memory in place
    cancelled  set when this world is given up
    rest       of the step that the old world has begun; None between two steps
    total      whole gradients of a step whose update the new world is to make
    rewound    steps completed in the checkpoint with which it begins; None: it goes on with the
               state of the old world
    """

    epoch: int
    plan: Plan
    transit: Group | None
    pairs: dict[Pair, Neighbour]
    planned: tuple[Move, ...]
    staying: tuple[int, ...]
    source: int
    world: World | None
    draft: Draft | None
    cancelled: threading.Event
    rest: Rest | None = None
    total: Gradients | None = None
    rewound: int | None = None

    @property
    def shard(self) -> Shard | None:
        """What the rank will hold."""
        return self.draft.shard if self.draft is not None else None

    @property
    def passage(self) -> tuple[Group, ...]:
        """The groups that lead from the old world to this one, of no use once it is taken on."""
        pairs = (neighbour.group for neighbour in self.pairs.values())
        return () if self.transit is None else (self.transit, *pairs)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The world to build.

    old           layout that holds the state now; None where no rank has it: at the start of a
                  job, and when some of it is gone
    lost          ranks of `old` that can send nothing any more
    participants  every rank that takes part in the switch
    staying       those that are members afterwards
    is_repair     groups of the present world may be broken and are not used again
    name          unique to the attempt
    gone          state that nobody alive holds, named
    sums          moves of gradient sums that a loss left, to those who go on with them
    """

    epoch: int
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
        """The first rank that holds state of the old world."""
        holders = self.plan.layout.ranks if self.old is None else self.old.ranks
        return min(set(holders) - set(self.lost))


class Preparation:
    """Builds one world in a thread of its own; `result` is there when all ranks are connected.

    `network` makes one when all who take part have come, and gives up when the event is set;
    `build` makes what this rank will hold in a world; `present` is what it holds now, if it has a
    place; `attach` lets neighbours read each other's memory.

    `error` says why there will be no result. Where that is this rank's own doing, as when the model
    or the disk refuses, it is `fault` as well.

    The thread of a preparation that is given up ends by itself, and the next one does not wait for
    it. While ranks are waited for it ends at once; a rank that is lost after all have come, in the
    moment in which they connect, is waited for until connecting times out.
    """

    def __init__(
        self,
        target: Target,
        parameters: Parameters,
        network: Callable[[threading.Event], AbstractContextManager[Network]],
        build: Callable[[World], Draft],
        present: tuple[World, Shard] | None,
        *,
        attach: bool,
    ) -> None:
        self.target = target
        self.result: Prepared | None = None
        self.error: str | None = None
        self.fault: Exception | None = None
        self.took_s = 0.0
        self.cancelled = threading.Event()
        self._parameters, self._make_network = parameters, network
        self._build, self._present, self._attach = build, present, attach
        self._network: Network | None = None
        self._thread = threading.Thread(target=self._run, name="resihp-prepare", daemon=True)
        start_thread(self._thread)

    def wait(self, broken: Callable[[Sequence[int], float], str | None]) -> Prepared:
        """The prepared world. Raises `fault` or `WorldBrokenError` if it will never be complete."""
        waited = timedelta(0)
        slice_ = timedelta(milliseconds=20)
        while self._thread.is_alive():
            self._thread.join(slice_.total_seconds())
            waited += slice_
            reason = broken(self.target.participants, waited.total_seconds())
            if reason is not None:
                raise WorldBrokenError(reason)
        if self.fault is not None:
            raise self.fault
        if self.result is None:
            raise WorldBrokenError(f"the next world could not be built: {self.error}")
        return self.result

    def give_up(self) -> None:
        """Nobody will take this world on; its groups are let go."""
        self.cancelled.set()
        dispose(self._built())

    def _built(self) -> Iterator[Group]:
        """All groups that were built, also if the world was not completed; waits for the end."""
        self._thread.join()
        if self._network is not None:
            yield from self._network.groups

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
        del self._build, self._present  # they hold the old world
        self.took_s = time.perf_counter() - start

    def _connect(self, target: Target) -> Prepared:
        """Every rank builds and warms up its groups in one global order, so none waits in a circle.

        A group connects when it is first used; that belongs here, not into the first step.
        """
        planned: tuple[Move, ...] = ()
        if target.keeps_layout:
            world, shard = self._present or (None, None)
            return self._prepared(None, {}, planned, world, Draft(shard) if shard else None)
        if target.old is not None:
            planned = moves(target.old, target.plan.layout, self._parameters, lost=target.lost)
        with self._make_network(self.cancelled) as network:
            self._network = network
            return self._build_groups(network, target, planned)

    def _build_groups(
        self, network: Network, target: Target, planned: tuple[Move, ...]
    ) -> Prepared:
        layout = target.plan.layout
        beside = network.uncounted()  # they carry nothing that a pass waits for
        transit = beside.group(f"{target.name}/transit", target.participants)
        pairs = [
            beside.group(f"{target.name}/pair", pair)
            for pair in pairs_of((*planned, *target.sums), network.rank)
        ]
        world = draft = None
        if network.rank in layout.ranks:
            world = build_world(network, layout, self._parameters, name=target.name)
            draft = self._drafted(world)
        for group in (transit, *pairs, *(world.groups if world else ())):
            group.warm_up()
        attach = self._attach and self._is_in_host_memory(draft)
        neighbours = {
            (low, high): introduce(group, network.rank, attach=attach)
            for group in pairs
            for low, high in [group.ranks]
        }
        return self._prepared(transit, neighbours, planned, world, draft)

    def _drafted(self, world: World) -> Draft:
        """What this rank will hold; here the model's own code runs, and the disk is written."""
        try:
            return self._build(world)
        except Exception as error:
            self._blame(error)
            raise

    def _blame(self, error: Exception) -> None:
        """Tell what has failed here, with its traceback, which is not kept."""
        _log.exception("the world of plan %d cannot be built here", self.target.plan.version)
        self.fault = error.with_traceback(None)

    def _is_in_host_memory(self, draft: Draft | None) -> bool:
        """Whether all that this rank holds and is to hold is."""
        shards = [self._present[1]] if self._present is not None else []
        shards += [draft.shard] if draft is not None else []
        return all(t.device.type == "cpu" for shard in shards for t in shard.tensors.values())

    def _prepared(
        self,
        transit: Group | None,
        pairs: dict[Pair, Neighbour],
        planned: tuple[Move, ...],
        world: World | None,
        draft: Draft | None,
    ) -> Prepared:
        target = self.target
        return Prepared(
            target.epoch,
            target.plan,
            transit,
            pairs,
            planned,
            target.staying,
            target.source,
            world,
            draft,
            self.cancelled,
        )
