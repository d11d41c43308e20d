"""Write plan: the entries that this rank writes and their order, per layout of the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..format.shard_file import ShardFile, ShardSpec
from ..ranks import Ranks, SaveItem, assign_writers
from ..state_dict import CollectedState

_OBJECT_OFFSETS = (-1,)
"""Placeholder for the offsets of an object."""


@dataclass(frozen=True, eq=False)
class WritePlan:
    """Entries that this rank writes.

    held     what the state has; the plan is for any state with the same
    picks    positions in the state's list of tensors, in the order of the file
    objects  keys of the objects
    """

    held: Sequence[SaveItem]
    file: ShardFile
    picks: tuple[int, ...]
    objects: frozenset[str]


def save_items_of(state: CollectedState) -> list[SaveItem]:
    """List what this rank holds and could write."""
    items = [
        SaveItem(e.key, e.offsets, tuple(e.tensor.shape), e.shape, e.nbytes, str(e.tensor.dtype))
        for e in state.tensors
    ]
    return items + [SaveItem(entry.key, _OBJECT_OFFSETS, (), (), 0) for entry in state.objects]


def make_plan(
    state: CollectedState,
    ranks: Ranks,
    order: Sequence[int],
    everyones: Sequence[Sequence[SaveItem]],
) -> WritePlan:
    """Select what this rank writes, given the items of all ranks or of this one alone.

    order  positions of the tensors, in the order to write them
    """
    held = save_items_of(state)
    if len(everyones) == len(ranks.all):
        mine = assign_writers(everyones)[ranks.all.index(ranks.rank)]
    else:
        mine = {(item.key, item.offsets) for item in held}
    tensors = state.tensors
    picks = tuple(i for i in order if (tensors[i].key, tensors[i].offsets) in mine)
    return WritePlan(
        held,
        ShardFile([ShardSpec.of(tensors[i]) for i in picks]),
        picks,
        frozenset(e.key for e in state.objects if (e.key, _OBJECT_OFFSETS) in mine),
    )
