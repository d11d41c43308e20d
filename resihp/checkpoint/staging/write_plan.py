"""Write plan: the entries that this rank writes and their order, per layout of the state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..format.shard_file import ShardFile, ShardSpec, encode_objects
from ..ranks import Ranks, SaveItem, assign_writers
from ..state_dict import CollectedState, ObjectEntry
from .in_flight import EncodeObjects

Signature = tuple[tuple[str, tuple[int, ...], tuple[int, ...], str], ...]

_OBJECT_OFFSETS = (-1,)
"""Placeholder for the offsets of an object."""


@dataclass(frozen=True, eq=False)
class WritePlan:
    """Entries that this rank writes.

    picks    positions in the state's list of tensors, in the order of the file
    objects  keys of the objects
    """

    signature: Signature
    file: ShardFile
    picks: tuple[int, ...]
    objects: frozenset[str]


def signature_of(state: CollectedState) -> Signature:
    """Names, shapes and dtypes; equal for two states that the same plan can save."""
    tensors = [
        (e.key, e.offsets, tuple(e.tensor.shape), str(e.tensor.dtype)) for e in state.tensors
    ]
    return (*tensors, *((entry.key, (), (), "") for entry in state.objects))


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
    if len(everyones) == len(ranks.all):
        mine = assign_writers(everyones)[ranks.all.index(ranks.rank)]
    else:
        mine = {(item.key, item.offsets) for item in save_items_of(state)}
    tensors = state.tensors
    picks = tuple(i for i in order if (tensors[i].key, tensors[i].offsets) in mine)
    return WritePlan(
        signature_of(state),
        ShardFile([ShardSpec.of(tensors[i]) for i in picks]),
        picks,
        frozenset(e.key for e in state.objects if (e.key, _OBJECT_OFFSETS) in mine),
    )


def extra_entry(extra: Mapping[str, object], rank: int) -> ObjectEntry:
    """Entry of the `extra` that the user gave on this rank."""
    return ObjectEntry(extra_key(rank), ("resihp", "extra", str(rank)), extra)


def extra_key(rank: int) -> str:
    """Name of the entry of a rank's `extra`."""
    return f"resihp.extra.{rank}"


def copied_objects(objects: Iterable[ObjectEntry]) -> EncodeObjects:
    """Copy the objects now; they are encoded when the returned function is called."""
    kept = [ObjectEntry(entry.key, entry.path, copy.deepcopy(entry.value)) for entry in objects]
    return lambda start: encode_objects(kept, start)


def buffer_addresses(modules: Iterable[object]) -> set[int]:
    """Addresses of modules' buffers, which the forward pass may change (running statistics)."""
    return {
        buffer.data_ptr()
        for module in modules
        if isinstance(module, nn.Module)
        for buffer in module.buffers()
    }


def stable(tensor: Tensor, volatile: set[int]) -> Tensor:
    """Return the tensor, or a copy if its address is among those that may change any time."""
    return tensor.clone() if volatile and tensor.data_ptr() in volatile else tensor
