"""Ranks of one host, which read each other's memory instead of sending through sockets.

Two ranks find out, when the next world is prepared, whether they are neighbours: each reads a
random number where the other says that it lies. Another host or pid namespace, another user, Yama,
a seccomp filter, another system: the number is not there, and parcels travel as between hosts.

What keeps the bytes right:
- A range is read only after its holder has said where it lies, which it does once the values are
  final: the state between two updates, gradients behind the all-reduce that made them whole.
- A holder neither changes nor frees it before it knows of all ranks that they have what they lack:
  they vote for the new world when they have. After a loss it goes on when all survivors have said
  what they hold; whoever still reads then discards what it reads, and whoever was not waited for
  is fenced out.
- Behind the last read the number is looked at again. A process id is not given away before its
  process has ended, so if the number is still there, all that was read before was the holder's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from resihp.contracts import WorldBrokenError
from resihp.layout import Move

from ..worlds.comm import Group
from .attach import Place, can_attach, read, slices

LEAST_RUN_BYTES = 256
"""Rows that lie apart and are shorter than this are packed and sent: each costs about 0.3 us."""

_log = logging.getLogger("resihp.elastic")


@dataclass(frozen=True)
class Source:
    """The memory of the process of `rank`, where `token` lies at `address`."""

    rank: int
    process: int
    address: int
    token: tuple[int, ...]

    def check(self) -> None:
        """Raises `OSError` if the process is not there any more, or another one."""
        found = torch.zeros(len(self.token), dtype=torch.int64)
        for there, here in slices(found, Place(self.address, (8,)), found.nbytes):
            read(self.process, there, here)
        if tuple(found.tolist()) != self.token:
            raise OSError("another process has its number")


@dataclass(frozen=True)
class Neighbour:
    """Another rank with which this one exchanges.

    group    of the two
    source   the other's memory; None if this rank does not read it
    is_read  the other reads this rank's memory
    token    what the other looks at
    """

    group: Group
    source: Source | None
    is_read: bool
    token: torch.Tensor

    def read(
        self,
        targets: Sequence[torch.Tensor],
        table: torch.Tensor,
        most_bytes: int,
        on_slice: Callable[[], None],
    ) -> Iterator[int]:
        """Fill `targets` from where the other's `table` says; yields the bytes of each slice.

        Between two slices it looks whether the world has been given up. Raises `WorldBrokenError`
        if so, and if the other is lost.
        """
        assert self.source is not None
        try:
            for target, (address, *strides) in zip(targets, table.tolist(), strict=True):
                place = Place(address, tuple(strides[: target.dim()]))
                for there, here in slices(target, place, most_bytes):
                    self.group.look()
                    on_slice()
                    yield read(self.source.process, there, here)
            self.source.check()
        except OSError as error:
            raise WorldBrokenError(f"lost rank {self.source.rank} in mid-read: {error}") from error


def introduce(group: Group, rank: int, *, attach: bool) -> Neighbour:
    """Find out whether the two ranks of `group` read each other's memory; both call it.

    `attach` says whether this rank reads, and is read; not if what moves is no host memory.
    """
    attach = attach and can_attach()
    token = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.int64)
    card = torch.tensor([attach, os.getpid(), token.data_ptr(), *token.tolist()])
    place = 1 - group.ranks.index(rank)
    wants, process, address, *theirs = group.all_gather(card)[place].tolist()
    source = Source(group.ranks[place], process, address, tuple(theirs))
    why_not = _refusal(source) if attach and wants else "one of them does not want it, or cannot"
    if why_not is not None:
        _log.debug("rank %d does not read rank %d's memory: %s", rank, source.rank, why_not)
    told = group.all_gather(torch.tensor([why_not is None]))
    return Neighbour(group, None if why_not else source, bool(told[place]), token)


def _refusal(source: Source) -> str | None:
    """Why it cannot be read, if it cannot."""
    try:
        source.check()
    except OSError as error:
        return str(error)
    return None


def is_readable(move: Move) -> bool:
    """Whether its rows are long enough where they lie apart."""
    param = move.param
    row_numel = 1
    for size in param.shape[(param.dim or 0) + 1 :]:
        row_numel *= size
    return not param.dim or (move.stop - move.start) * row_numel * 4 >= LEAST_RUN_BYTES


def table_of(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where `views` lie, for a neighbour: [views, 1 + dimensions], address and strides."""
    table = empty_table(len(views), max(view.dim() for view in views))
    for row, view in zip(table, views, strict=True):
        place = Place.of(view)
        row[: 1 + view.dim()] = torch.tensor([place.address, *place.strides])
    return table


def empty_table(views: int, dims: int) -> torch.Tensor:
    """Room for the table of another rank."""
    return torch.zeros(views, 1 + dims, dtype=torch.int64)
