"""Back from a checkpoint, into any layout: the newest that is whole, from the nearest level.

The ranks agree on the step before each attempt and on its success after it. An attempt that meets
bytes other than those saved names the shards and gives way to the next-best checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from resihp.contracts import CheckpointError, ContractError

from ..history import Lineage, StoredCheckpoint, best_first
from ..levels.level import CheckpointReader, Level
from ..levels.local_disk import LocalDisk
from ..ranks import Ranks
from ..staging.write_plan import extra_key
from ..state_dict import State, TensorEntry, collect, opened
from .load_state import absent_objects, absent_tensors, load_into, set_at
from .shard_reader import Located, TensorRequest, missing_of, read_object, read_tensors

log = logging.getLogger("resihp.checkpoint")


@dataclass(frozen=True)
class Restored:
    """What came back.

    extra    what this rank gave as `extra`; that of the lowest rank where it gave none
    level    where it was read from, by name
    skipped  better checkpoints that could not be used, and why, one line each
    newest_born  of all lineages that were found, for the one that begins now to be newer
    """

    step: int
    level: str
    extra: Mapping[str, object]
    skipped: tuple[str, ...] = ()
    newest_born: int = 0


Key = tuple[int, str]
"""Step and run of a checkpoint."""


@dataclass
class _Inventory:
    """Which level holds which checkpoint, as far as it can be asked."""

    levels: dict[Key, list[Level]] = field(default_factory=dict)
    lineages: dict[Key, Lineage] = field(default_factory=dict)
    torn: dict[int, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def restore(
    levels: Sequence[Level], into: State, ranks: Ranks, *, step: int | None = None
) -> Restored:
    """Fill every tensor of `into` in place and put every other value back; a collective call.

    into  as for `save`, in the layout that is wanted now; `Stateful` values (modules, optimizers)
          get a state of theirs, an optimizer without state yet all of it
    step  only this one; None: the newest

    Raises `CheckpointError` where no level holds a usable checkpoint; tensors that an attempt has
    begun to fill may then hold anything.
    """
    offers = _ask(levels)
    order, newest_born = _order(offers, ranks, step)
    skipped, torn = offers.problems, sorted(offers.torn.items())
    for key in order:
        found = _try(offers.levels[key], key[0], into, ranks, skipped)
        have_it = ranks.gather(found is not None)
        if found is not None and not all(have_it):
            lost = ", ".join(str(r) for r, has in zip(ranks.all, have_it, strict=True) if not has)
            skipped.append(f"step {key[0]} cannot be used by all: rank {lost}")
        elif found is not None:
            skipped += [
                f"step {n} is torn: {what}" for n, what in torn if n > key[0] and step is None
            ]
            for line in skipped:
                log.warning("%s; used step %d from %s", line, key[0], found.level)
            return replace(found, skipped=tuple(skipped), newest_born=newest_born)
    skipped += [f"step {n} is torn: {what}" for n, what in torn if step in (None, n)]
    told = "; ".join(skipped) or ", ".join(level.name for level in levels) + ": nothing there"
    raise CheckpointError(
        f"no usable checkpoint{'' if step is None else f' of step {step}'}: {told}"
    )


def _ask(levels: Sequence[Level]) -> _Inventory:
    offers = _Inventory()
    for level in levels:
        try:
            if isinstance(level, LocalDisk):
                offers.torn.update(level.torn())
            for found in level.found():
                key = (found.step, found.lineage.run)
                offers.levels.setdefault(key, []).append(level)
                offers.lineages[key] = found.lineage
        except Exception as problem:  # noqa: BLE001 - any storage may fail in its own way
            offers.problems.append(f"{level.name} cannot be asked: {problem}")
    return offers


def _order(offers: _Inventory, ranks: Ranks, only: int | None) -> tuple[list[Key], int]:
    """What every rank can try, best first, and when the newest lineage was born.

    Abandoned checkpoints are not among it unless their step is asked for.
    """
    everyones = ranks.gather(offers.lineages)
    found = [
        StoredCheckpoint(step, lineage)
        for lineages in everyones
        for (step, _), lineage in lineages.items()
        if only in (None, step)
    ]
    common = set.intersection(*(set(lineages) for lineages in everyones))
    keys = [(one.step, one.lineage.run) for one in best_first(found)]
    born = [lineage.born for lineages in everyones for lineage in lineages.values()]
    return [key for key in dict.fromkeys(keys) if key in common], max(born, default=0)


def _try(
    levels: Sequence[Level], step: int, into: State, ranks: Ranks, skipped: list[str]
) -> Restored | None:
    for level in levels:
        try:
            source = level.open(step)
            try:
                return Restored(step, level.name, _fill(source, into, ranks.rank))
            finally:
                source.close()
        except ContractError:
            raise
        except Exception as problem:  # noqa: BLE001 - as above; the next-best is tried
            skipped.append(f"step {step} on {level.name} is unusable: {problem}")
    return None


def _fill(source: CheckpointReader, into: State, rank: int) -> Mapping[str, object]:
    """Everything of `into`, and the extra of this rank."""
    state = opened(into)
    parts, objects = collect(state)
    entries = [(index, entry) for index in source.indexes.values() for entry in index.entries]
    created = absent_tensors(into, entries, {part.key for part in parts})
    wants = [TensorRequest(part.key, part.box, part.tensor) for part in (*parts, *created)]
    paths = {thing.key: thing.path for thing in objects}
    differing = _other_shapes(parts, entries)
    if differing:
        raise CheckpointError(f"shapes differ: {'; '.join(differing[:6])}")
    there = {e.key for _, e in entries if e.dtype is None} | {part.key for part in created}
    missing = sorted(set(paths) - there) + missing_of(wants, entries)
    if missing:
        raise CheckpointError(f"it lacks {', '.join(missing[:6])}")
    read_tensors(source, wants, entries)
    for part in created:
        set_at(state, part.path, part.tensor)
    paths |= absent_objects(into, entries)
    for index, entry in entries:
        if entry.dtype is None and entry.key in paths:
            set_at(state, paths[entry.key], read_object(source, index, entry))
    load_into(into, state)
    return _extra(source, rank)


def _other_shapes(parts: Sequence[TensorEntry], entries: Sequence[Located]) -> list[str]:
    """Tensors whose whole has another shape in the checkpoint than in the state."""
    saved = {entry.key: entry.shape for _, entry in entries if entry.dtype is not None}
    return [
        f"{part.key} is {list(part.shape)}, the checkpoint has {list(saved[part.key])}"
        for part in parts
        if saved.get(part.key, part.shape) != part.shape
    ]


def _extra(source: CheckpointReader, rank: int) -> Mapping[str, object]:
    chosen = source.indexes.get(rank) or source.indexes[min(source.indexes)]
    entry = next((e for e in chosen.objects if e.key == extra_key(chosen.rank)), None)
    extra = {} if entry is None else read_object(source, chosen, entry)
    assert isinstance(extra, dict)
    return extra
