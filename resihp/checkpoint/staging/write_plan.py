"""What this rank writes, in which order; made anew only when the state's shapes change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..format.index import IndexEntry
from ..format.shard_file import ShardFile, ShardSpec, encode_objects
from ..ranks import Ranks, SaveItem, assign_writers
from ..state_dict import ObjectEntry, TensorEntry

Signature = tuple[tuple[str, tuple[int, ...], tuple[int, ...], str], ...]

_OBJECT = (-1,)
"""Stands for the offsets of what is no tensor."""


@dataclass(frozen=True, eq=False)
class WritePlan:
    """`picks` are positions in the list of parts, in the order of the file."""

    signature: Signature
    file: ShardFile
    picks: tuple[int, ...]
    objects: frozenset[str]


def signature_of(parts: Sequence[TensorEntry], objects: Sequence[ObjectEntry]) -> Signature:
    """Equal for two states that the same plan saves."""
    tensors = [(p.key, p.offsets, tuple(p.tensor.shape), str(p.tensor.dtype)) for p in parts]
    return (*tensors, *((thing.key, (), (), "") for thing in objects))


def save_items_of(parts: Sequence[TensorEntry], objects: Sequence[ObjectEntry]) -> list[SaveItem]:
    """What this rank holds and could write."""
    items = [
        SaveItem(p.key, p.offsets, tuple(p.tensor.shape), p.shape, p.nbytes, str(p.tensor.dtype))
        for p in parts
    ]
    return items + [SaveItem(thing.key, _OBJECT, (), (), 0) for thing in objects]


def make_plan(
    parts: Sequence[TensorEntry],
    objects: Sequence[ObjectEntry],
    ranks: Ranks,
    order: Sequence[int],
    everyones: Sequence[Sequence[SaveItem]],
) -> WritePlan:
    """Share out who writes what, given the claims of all ranks or of this one alone."""
    if len(everyones) == len(ranks.all):
        mine = assign_writers(everyones)[ranks.all.index(ranks.rank)]
    else:
        mine = {(claim.key, claim.offsets) for claim in save_items_of(parts, objects)}
    picks = tuple(i for i in order if (parts[i].key, parts[i].offsets) in mine)
    return WritePlan(
        signature_of(parts, objects),
        ShardFile([ShardSpec.of(parts[i]) for i in picks]),
        picks,
        frozenset(thing.key for thing in objects if (thing.key, _OBJECT) in mine),
    )


def extra_entry(extra: Mapping[str, object], rank: int) -> ObjectEntry:
    """What the user wants to have back beside the state, of each rank its own."""
    return ObjectEntry(extra_key(rank), ("resihp", "extra", str(rank)), extra)


def extra_key(rank: int) -> str:
    """Its name in the checkpoint."""
    return f"resihp.extra.{rank}"


def frozen(objects: Iterable[ObjectEntry]) -> Callable[[int], tuple[tuple[IndexEntry, ...], bytes]]:
    """The things as they are now; they are encoded when somebody asks, from the byte given."""
    kept = [ObjectEntry(thing.key, thing.path, copy.deepcopy(thing.value)) for thing in objects]
    return lambda start: encode_objects(kept, start)


def buffer_addresses(modules: Iterable[object]) -> set[int]:
    """Memory of modules' buffers, which the forward pass may change (e.g. running statistics)."""
    return {
        buffer.data_ptr()
        for module in modules
        if isinstance(module, nn.Module)
        for buffer in module.buffers()
    }


def snapshot(tensor: Tensor, volatile: set[int]) -> Tensor:
    """The tensor, or a copy where its memory may change before the fence."""
    return tensor.clone() if volatile and tensor.data_ptr() in volatile else tensor
