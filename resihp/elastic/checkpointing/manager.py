"""Checkpoints of an elastic job, as one rank saves and restores them."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import and_
from typing import TypeVar, cast

import torch

from resihp._devices import use_device
from resihp.checkpoint import Checkpointer, EveryStep, IndependentRank, Level, SavePolicy
from resihp.checkpoint.policy import SaveTiming
from resihp.checkpoint.restore import restore
from resihp.contracts import ContractError, Plan
from resihp.layout import Param, Range, writers

from ..process_groups.abortable import AbortableProcessGroup
from ..rendezvous import keys
from ..rendezvous.membership import Rendezvous
from ..step import Cursor, Setup
from ..step.shard import Shard, scalar_table
from .memory_replicas import MemoryReplicas
from .protocol import StateManager
from .settings import Checkpoints
from .shards import all_pieces, pieces_of, scalars_piece

T = TypeVar("T")


class Writer:
    """Writer of the ranges `spans` of this rank's shard, for one layout.

    Plans and allocates before the first save. `policy` is evaluated on one rank, so `saver` has
    none of its own. `connect` gives its levels the addresses of peers. A save `is_owed` from when
    the policy asks for it until it is begun, by the writer of the next layout if need be.
    """

    def __init__(
        self,
        saver: Checkpointer,
        policy: SavePolicy,
        setup: Setup,
        plan: Plan,
        spans: Sequence[tuple[Param, Range]],
        shard: Shard,
        connect: Callable[[], None],
        *,
        is_owed: bool = False,
    ) -> None:
        self.plan = plan
        self._saver, self._policy, self._setup, self._spans = saver, policy, setup, spans
        self.is_owed = is_owed
        self._begun_s: float | None = None
        self._cost_s: float | None = None
        self._blocked_before_s = 0.0
        pieces = pieces_of(shard, self._spans, setup.model.parameters)

        def prepare() -> None:
            use_device(setup.device)
            connect()
            saver.prepare(pieces)

        self._ready = threading.Thread(
            target=prepare, name="resihp-checkpoint-prepare", daemon=True
        )
        self._ready.start()

    def is_due(self, step: int) -> bool:
        """Return True when the policy asks for a save, until it is done."""
        now, counters = time.monotonic(), self._saver.counters
        times = [c.durable_s for c in counters.levels.values() if c.durable_s is not None]
        since_s = None if self._begun_s is None else now - self._begun_s
        moment = SaveTiming(step, since_s, self._cost_s, max(times, default=None))
        self.is_owed = self.is_owed or self._policy.is_due(moment)
        return self.is_owed

    def save(self, step: int, shard: Shard) -> None:
        """Begin to save the state after `step`."""
        self._ready.join()
        self._blocked_before_s = self._saver.counters.blocking_s
        data = self._setup.data
        extra = {
            "plan": self.plan.version,
            "cursor": data.state_dict() if isinstance(data, Cursor) else None,
            **_description(self._setup),
        }
        self._begun_s = time.monotonic()
        pieces = pieces_of(shard, self._spans, self._setup.model.parameters)
        self.is_owed = not self._saver.save(step, pieces, extra)

    def fence(self) -> None:
        """Wait for copies."""
        if self._begun_s is not None:
            self._saver.fence()
            self._cost_s = self._saver.counters.blocking_s - self._blocked_before_s

    def wait(self, timeout_s: float) -> None:
        """Wait until all started saves are written, at most `timeout_s`."""
        self._ready.join()
        self._saver.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Wait, and end all threads."""
        self._ready.join()
        self._saver.close(timeout_s)


class RestoreGroup:
    """`resihp.checkpoint.Ranks` over a group whose waits end when one of its ranks is lost."""

    def __init__(self, group: AbortableProcessGroup) -> None:
        self._group = group
        self.rank, self.all, self.run = group.rank, group.ranks, ""

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in the order of `all`. Raises `PeerLostError`."""
        group, data = self._group, pickle.dumps(value)
        lengths = torch.cat(group.all_gather(torch.tensor([len(data)], device=group.device)))
        padded = bytearray(data.ljust(int(lengths.max()), b"\0"))
        sent = torch.frombuffer(padded, dtype=torch.uint8).to(group.device)
        return [pickle.loads(each.cpu().numpy().tobytes()) for each in group.all_gather(sent)]

    gather_in_background = gather

    def common_bits(self, bits: int) -> int:
        """Return the bits that every rank has set."""
        return reduce(and_, self.gather(bits))


def _description(setup: Setup) -> dict[str, object]:
    """Description of what a checkpoint of this job holds, kept in it."""
    return {"model": setup.described_model, "moments": list(setup.optimizer.form.moments)}


def _check_description(setup: Setup, extra: Mapping[str, object]) -> None:
    """Check that a checkpoint with this `extra` holds no more and no less than this job has.

    Raises `ContractError`. Checkpoints of earlier versions do not describe model and moments.
    """
    for name, own in _description(setup).items():
        held = extra.get(name, own)
        if held != own:
            raise ContractError(name, f"the checkpoint holds {held}, this job has {own}")
    has_cursor = extra.get("cursor") is not None
    if isinstance(setup.data, Cursor) and not has_cursor:
        raise ContractError("data", "the checkpoint has no cursor, as this job's data needs")
    if has_cursor and not isinstance(setup.data, Cursor):
        raise ContractError("data", "the checkpoint has a cursor, which this job's data lacks")


_log = logging.getLogger("resihp.elastic")
_UNTIL_WRITTEN_S = 600.0
_UNTIL_GIVEN_UP_S = 10.0


class CheckpointManager(StateManager):
    """Manager on the levels of `Checkpoints`.

    Each layout has a `Writer` of its own, as other ranks write other ranges, and begins a lineage
    of checkpoints. The store gives all ranks the same time of the job's start: it names the job, so
    that files which an earlier start left unfinished are not taken for ours, and lineages are as
    old as it and their layout's generation say, whatever the ranks' clocks do.
    """

    def __init__(self, checkpoints: Checkpoints, setup: Setup, rendezvous: Rendezvous) -> None:
        rank, store = rendezvous.rank, rendezvous.stores.store
        self._checkpoints, self._setup, self._rank = checkpoints, setup, rank
        self._job = store.compare_set(keys.CHECKPOINTS, "", f"{time.time_ns()}-{rank}").decode()
        self._started = int(self._job.split("-")[0])
        self._writer: Writer | None = None
        keep = checkpoints.in_memory
        self._copies = MemoryReplicas(keep, rank, rendezvous.host, store) if keep else None

    def prepare(self, plan: Plan, generation: int, shard: Shard) -> None:
        before = self._writer
        if before is not None and before.plan.layout == plan.layout:
            before.plan = plan
            return
        if before is not None:
            before.fence()  # its last state is about to change
            closing = threading.Thread(target=before.close, args=(_UNTIL_WRITTEN_S,), daemon=True)
            closing.name = "resihp-checkpoint-close"
            closing.start()
        levels, connect = self._levels_of(plan.layout.ranks)
        checkpointer = Checkpointer(
            levels,
            EveryStep(),
            ranks=IndependentRank(self._rank, plan.layout.ranks, f"{self._job}.{generation}"),
            clock=lambda: self._started + generation,
            host_cache_bytes=self._checkpoints.host_cache_bytes,
        )
        setup = self._setup
        held = writers(plan.layout, setup.model.parameters, setup.state_copies)
        spans = held[self._rank]
        policy = self._checkpoints.policy
        is_owed = before is not None and before.is_owed
        self._writer = Writer(
            checkpointer, policy, self._setup, plan, spans, shard, connect, is_owed=is_owed
        )

    def is_due(self, step: int) -> bool:
        return self._writer is not None and self._writer.is_due(step)

    def save(self, step: int, shard: Shard) -> None:
        assert self._writer is not None, "prepared before the step"
        self._writer.save(step, shard)

    def fence(self) -> None:
        if self._writer is not None:
            self._writer.fence()

    def restore(self, group: AbortableProcessGroup, shard: Shard | None) -> int:
        if self._writer is not None:
            self._writer.wait(_UNTIL_GIVEN_UP_S)  # nothing may come or go while it is read
        ranks, setup = RestoreGroup(group), self._setup
        table = scalar_table(setup.model, setup.optimizer)
        pieces = [] if shard is None else [*all_pieces(shard), *scalars_piece(table)]
        with self._levels(ranks) as levels:
            restored = restore(levels, pieces, ranks)
        _log.warning("went back to step %d, read from %s", restored.step, restored.level)
        _check_description(setup, restored.extra)
        completed, self._started = restored.step + 1, max(self._started, restored.newest_born + 1)
        if shard is not None:
            shard.set_scalars(table, completed)
        if isinstance(setup.data, Cursor):
            setup.data.load_state_dict(cast(dict[str, object], restored.extra["cursor"]))
        return completed

    def resume(self, group: AbortableProcessGroup, shard: Shard) -> int:
        with self._levels() as levels:
            has_any = any(level.steps() for level in levels)
        is_there = any(RestoreGroup(group).gather(has_any))
        return self.restore(group, shard) if is_there else 0

    def close(self, *, is_done: bool) -> None:
        if self._writer is not None:
            self._writer.close(_UNTIL_WRITTEN_S if is_done else _UNTIL_GIVEN_UP_S)
        if self._copies is not None:
            self._copies.close()

    def _levels_of(self, ranks: Sequence[int]) -> tuple[list[Level], Callable[[], None]]:
        """Return the levels of a layout, nearest first, and a function that connects them."""
        levels = list(self._checkpoints.levels())
        copies = self._copies
        if copies is None or (len(ranks) == 1 and levels):
            return levels, lambda: None
        if len(ranks) == 1:
            return [copies.own], lambda: None
        peer = copies.peer()
        return [copies.own, peer, *levels], lambda: copies.connect(peer, ranks)

    @contextmanager
    def _levels(self, memory_of: RestoreGroup | None = None) -> Iterator[list[Level]]:
        """Open the levels, before them the memory of all ranks of a group; then collective."""
        levels = list(self._checkpoints.levels())
        try:
            if memory_of is not None and self._copies is not None:
                told = memory_of.gather(self._copies.address)
                levels.insert(0, self._copies.reader(dict(zip(memory_of.all, told, strict=True))))
            yield levels
        finally:
            for level in levels:
                level.close()
