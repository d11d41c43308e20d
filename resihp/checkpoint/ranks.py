"""How the ranks of a job agree: who writes what, and whether all take part in a checkpoint."""

from __future__ import annotations

import math
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from resihp.contracts import ContractError

T = TypeVar("T")


@dataclass(frozen=True)
class SaveItem:
    """Something that a rank holds and could write."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    dtype: str = ""


class Ranks(Protocol):
    """The ranks that checkpoint together.

    run   the same text on all of them, another one after a restart
    """

    rank: int
    all: tuple[int, ...]
    run: str

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in the order of `all`; a collective call."""

    def gather_in_background(self, value: T) -> list[T]:
        """As `gather`, for a thread that also calls `all_ready`, beside one that calls `gather`."""

    def all_ready(self, is_ready: bool) -> bool:
        """Whether every rank is; a collective call, made in the background at each save."""


class IndependentRank:
    """One process; or one of several whose parts are known to be disjoint and that need no veto.

    The elastic runtime, which knows who holds which range, gives its rank, all ranks and a text
    that names the run.
    """

    def __init__(self, rank: int = 0, ranks: Sequence[int] = (0,), run: str | None = None) -> None:
        if rank not in ranks or (len(ranks) > 1 and run is None):
            raise ContractError("ranks", "several ranks need a common run and must contain rank")
        self.rank, self.all, self.run = rank, tuple(sorted(ranks)), run or uuid.uuid4().hex[:12]

    def gather(self, value: T) -> list[T]:
        """The own value."""
        return [value]

    gather_in_background = gather

    def all_ready(self, is_ready: bool) -> bool:
        """Whether this one is."""
        return is_ready


class ProcessGroupRanks:
    """The ranks of a process group, over gloo groups of our own.

    Every rank of the world must construct it, as with `torch.distributed.new_group`.

    timeout  of every collective call; a peer that is gone costs checkpoints, not training
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        # one for the caller's thread and one for the background, which must not mix their calls
        self._group, self._background = (
            dist.new_group(members, timeout=timeout, backend="gloo") for _ in range(2)
        )
        self.rank, self.all = dist.get_rank(), tuple(sorted(members))
        self.run = self.gather(uuid.uuid4().hex[:12])[0]

    def gather(self, value: T) -> list[T]:
        """The value of every rank."""
        return self._gathered(value, self._group)

    def gather_in_background(self, value: T) -> list[T]:
        """The same in the background."""
        return self._gathered(value, self._background)

    def all_ready(self, is_ready: bool) -> bool:
        """Whether every rank is."""
        flag = torch.tensor([int(is_ready)], dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._background)
        return bool(flag.item())

    def _gathered(self, value: T, group: dist.ProcessGroup) -> list[T]:
        values: list[T] = [value] * len(self.all)
        dist.all_gather_object(values, value, group=group)
        return values


def assign_writers(items: Sequence[Sequence[SaveItem]]) -> list[set[tuple[str, tuple[int, ...]]]]:
    """For each rank, what it writes: everything once, what several hold by whoever writes least.

    Raises `ContractError` where the parts of a tensor do not add up to the whole, or ranks hold the
    same part in different shapes or types.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    known: dict[tuple[str, tuple[int, ...]], SaveItem] = {}
    for number, held in enumerate(items):
        for claim in held:
            place = claim.key, claim.offsets
            holders[place].append(number)
            if known.setdefault(place, claim) != claim:
                raise ContractError(claim.key, "its shape or type differs between ranks")
    _check_whole(known)
    mine: list[set[tuple[str, tuple[int, ...]]]] = [set() for _ in items]
    load = [0] * len(items)
    for place, able in holders.items():
        chosen = min(able, key=lambda number: (load[number], number))
        load[chosen] += known[place].nbytes
        mine[chosen].add(place)
    return mine


def _check_whole(known: Mapping[tuple[str, tuple[int, ...]], SaveItem]) -> None:
    volume: dict[str, int] = defaultdict(int)
    whole: dict[str, int] = {}
    for claim in known.values():
        volume[claim.key] += math.prod(claim.sizes)
        whole[claim.key] = math.prod(claim.shape)
    for key, size in whole.items():
        if volume[key] != size:
            raise ContractError(key, f"its parts have {volume[key]} elements, the whole has {size}")
