"""The ranks that checkpoint together: assignment of writers, and collective calls between them."""

from __future__ import annotations

import math
import uuid
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from resihp.contracts import ContractError

T = TypeVar("T")

_LONGEST_RUN = 200
"""Characters of a run; a file name has 255, with the step, the lineage and an ending."""


class SaveItem(NamedTuple):
    """A tensor shard, or (without shape) another object, that a rank holds and could write."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    dtype: str = ""


class Ranks(Protocol):
    """The ranks that checkpoint together.

    run   identifier of this start of the job, the same on all ranks
    """

    rank: int
    all: tuple[int, ...]
    run: str

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in the order of `all`; a collective call."""

    def gather_in_background(self, value: T) -> list[T]:
        """Like `gather`, in the thread that calls `common_bits`, concurrent with `gather`."""

    def common_bits(self, bits: int) -> int:
        """Return the bits that every rank has set; a collective call, in the background per save.

        bits  from 0 to 2**63 - 1
        """


class IndependentRank:
    """A rank that saves without coordination: a single process, or one with disjoint shards.

    With several `ranks` the shards of all must be known to be disjoint and complete, and `run`
    must be a text that is the same on all ranks and changes with each start of the job. It is part
    of names of files, quoted as in a URL: raises `ContractError` for more than 200 characters.
    """

    def __init__(self, rank: int = 0, ranks: Sequence[int] = (0,), run: str | None = None) -> None:
        if rank not in ranks or (len(ranks) > 1 and run is None):
            raise ContractError("ranks", "several ranks need a common run and must contain rank")
        if run is not None:
            _check_run(run)
        self.rank, self.all, self.run = rank, tuple(sorted(ranks)), run or uuid.uuid4().hex[:12]

    def gather(self, value: T) -> list[T]:
        return [value]

    gather_in_background = gather

    def common_bits(self, bits: int) -> int:
        return bits


class ProcessGroupRanks:
    """The ranks of a process group, over gloo groups of their own.

    Every rank of the world must construct it, as with `torch.distributed.new_group`.

    timeout  longest wait for a rank that comes late to a collective call, because it reads a
             checkpoint from slow storage or evaluates: a group does not work any more after one
             that came later. By default that of torch. A peer whose process has ended is noticed
             at once; it costs checkpoints and does not stop training.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        # One group for the caller's thread and one for the background: their calls must not mix.
        self._group, self._background = (
            dist.new_group(members, timeout=timeout, backend="gloo") for _ in range(2)
        )
        self.rank, self.all = dist.get_rank(), tuple(sorted(members))
        self.run = self.gather(uuid.uuid4().hex[:12])[0]

    def gather(self, value: T) -> list[T]:
        return self._gathered(value, self._group)

    def gather_in_background(self, value: T) -> list[T]:
        return self._gathered(value, self._background)

    def common_bits(self, bits: int) -> int:
        common = torch.tensor([bits], dtype=torch.int64)
        dist.all_reduce(common, dist.ReduceOp.BAND, group=self._background)
        return int(common.item())

    def _gathered(self, value: T, group: dist.ProcessGroup) -> list[T]:
        values: list[T] = [value] * len(self.all)
        dist.all_gather_object(values, value, group=group)
        return values


def _check_run(run: str) -> None:
    """Raise `ContractError` for a run that names of files and folders cannot hold, quoted."""
    if not isinstance(run, str):
        raise ContractError("run", f"a text, not {run!r}")
    if len(quote(run, safe="")) > _LONGEST_RUN:
        raise ContractError("run", f"has more than {_LONGEST_RUN} characters, quoted as in a URL")


def gather_valid(ranks: Ranks, value: T | Exception) -> list[T]:
    """Return the value of every rank; a collective call.

    Raises the error that a rank has in place of a value, on the others as a `ContractError`: if
    that rank left the call out, its next one would be taken for this one.
    """
    if isinstance(value, ContractError):
        ranks.gather(((value.field, value.problem), None))
        raise value
    if isinstance(value, Exception):
        ranks.gather((("state", f"fails on rank {ranks.rank}: {value!r}"), None))
        raise value
    told = ranks.gather((None, value))
    for problem, _ in told:
        if problem is not None:
            raise ContractError(*problem)
    return [each for _, each in told]


def assign_writers(items: Sequence[Sequence[SaveItem]]) -> list[set[tuple[str, tuple[int, ...]]]]:
    """Assign each item to one of its holders, the one with the fewest bytes so far.

    Takes the items of each rank; returns keys and offsets of each rank's share. Raises
    `ContractError` if the shards of a tensor do not add up to the whole, or if ranks hold the same
    shard in different shapes or types.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    known: dict[tuple[str, tuple[int, ...]], SaveItem] = {}
    for number, held in enumerate(items):
        for item in held:
            place = item.key, item.offsets
            holders[place].append(number)
            if known.setdefault(place, item) != item:
                raise ContractError(item.key, "its shape or type differs between ranks")
    volume: dict[str, int] = defaultdict(int)
    for item in known.values():
        volume[item.key] += math.prod(item.sizes)
    for item in known.values():
        if volume[item.key] != (whole := math.prod(item.shape)):
            reason = f"its shards have {volume[item.key]} elements, the whole has {whole}"
            raise ContractError(item.key, reason)
    assigned: list[set[tuple[str, tuple[int, ...]]]] = [set() for _ in items]
    load = [0] * len(items)
    for place, able in holders.items():
        chosen = min(able, key=lambda number: (load[number], number))
        load[chosen] += known[place].nbytes
        assigned[chosen].add(place)
    return assigned
