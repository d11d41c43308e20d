"""What this rank writes, in which order; made anew only when the state's shapes change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..format.index import Entry
from ..format.shard_file import Place, ShardFile, encode_things
from ..parts import Part, Thing
from ..ranks import Claim, Ranks, shares

Signature = tuple[tuple[str, tuple[int, ...], tuple[int, ...], str], ...]

_THING = (-1,)
"""Stands for the offsets of what is no tensor."""


@dataclass(frozen=True, eq=False)
class SavePlan:
    """`picks` are positions in the list of parts, in the order of the file."""

    signature: Signature
    file: ShardFile
    picks: tuple[int, ...]
    things: frozenset[str]


def signature_of(parts: Sequence[Part], things: Sequence[Thing]) -> Signature:
    """Equal for two states that the same plan saves."""
    tensors = [(p.key, p.offsets, tuple(p.tensor.shape), str(p.tensor.dtype)) for p in parts]
    return (*tensors, *((thing.key, (), (), "") for thing in things))


def claims_of(parts: Sequence[Part], things: Sequence[Thing]) -> list[Claim]:
    """What this rank holds and could write."""
    claims = [
        Claim(p.key, p.offsets, tuple(p.tensor.shape), p.shape, p.nbytes, str(p.tensor.dtype))
        for p in parts
    ]
    return claims + [Claim(thing.key, _THING, (), (), 0) for thing in things]


def make_plan(
    parts: Sequence[Part],
    things: Sequence[Thing],
    ranks: Ranks,
    order: Sequence[int],
    everyones: Sequence[Sequence[Claim]],
) -> SavePlan:
    """Share out who writes what, given the claims of all ranks or of this one alone."""
    if len(everyones) == len(ranks.all):
        mine = shares(everyones)[ranks.all.index(ranks.rank)]
    else:
        mine = {(claim.key, claim.offsets) for claim in claims_of(parts, things)}
    picks = tuple(i for i in order if (parts[i].key, parts[i].offsets) in mine)
    return SavePlan(
        signature_of(parts, things),
        ShardFile([Place.of(parts[i]) for i in picks]),
        picks,
        frozenset(thing.key for thing in things if (thing.key, _THING) in mine),
    )


def extra_of(extra: Mapping[str, object], rank: int) -> Thing:
    """What the user wants to have back beside the state, of each rank its own."""
    return Thing(extra_key(rank), ("resihp", "extra", str(rank)), extra)


def extra_key(rank: int) -> str:
    """Its name in the checkpoint."""
    return f"resihp.extra.{rank}"


def frozen(things: Iterable[Thing]) -> Callable[[int], tuple[tuple[Entry, ...], bytes]]:
    """The things as they are now; they are encoded when somebody asks, from the byte given."""
    kept = [Thing(thing.key, thing.path, copy.deepcopy(thing.value)) for thing in things]
    return lambda start: encode_things(kept, start)


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
