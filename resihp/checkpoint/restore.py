"""Selects the newest complete checkpoint on the nearest level, and restores it into any layout.

The ranks agree on the step before each attempt and on its success after it. An attempt that finds
damaged bytes names the shards, and the next-best checkpoint is tried.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from resihp.contracts import CheckpointError, ContractError

from .history import Lineage, StoredCheckpoint, best_first
from .levels.level import CheckpointReader, Level
from .levels.local_disk import LocalDisk
from .providers import LazyTensor, StatefulProvider, StateProvider, provider_of
from .ranks import Ranks, gather_valid
from .shard_reader import Located, jobs_of, missing_of, read_object, read_tensors
from .state_dict import (
    ObjectEntry,
    Path,
    State,
    TensorEntry,
    collect,
    empty_on_host,
    extra_entry,
    opened,
    step_to,
)

log = logging.getLogger("resihp.checkpoint")


@dataclass(frozen=True)
class Restored:
    """Result of a restore.

    level        name of the level that was read
    extra        the `extra` of this rank, or of the lowest rank if this one saved none
    skipped      better checkpoints that could not be used, with the reason, one line each
    newest_born  `born` of the newest lineage found; the next lineage must be younger
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
    """Checkpoints on all levels.

    torn      steps of incomplete checkpoints, with the reason
    problems  levels that could not be listed, with the reason
    """

    levels: dict[Key, list[Level]] = field(default_factory=dict)
    lineages: dict[Key, Lineage] = field(default_factory=dict)
    torn: dict[int, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def restore(
    levels: Sequence[Level], into: State, ranks: Ranks, *, step: int | None = None
) -> Restored:
    """Fill the tensors of `into` in place and set its other values; see `Checkpointer.restore`.

    A collective call. Raises `CheckpointError` if no level has a usable checkpoint; the tensors
    are then undefined, as an attempt may have filled some of them.
    """
    inventory = _list(levels)
    order, newest_born = _order(inventory, ranks, step)
    skipped, torn = inventory.problems, sorted(inventory.torn.items())
    for key in order:
        found = _try(inventory.levels[key], key[0], into, ranks, skipped)
        result = found if isinstance(found, ContractError) else found is not None
        successes = [each is True for each in gather_valid(ranks, result)]
        if isinstance(found, Restored) and not all(successes):
            failed = [str(r) for r, ok in zip(ranks.all, successes, strict=True) if not ok]
            skipped.append(f"step {key[0]} cannot be used by rank {', '.join(failed)}")
        elif isinstance(found, Restored):
            skipped += [
                f"step {n} is torn: {what}" for n, what in torn if n > key[0] and step is None
            ]
            for line in skipped:
                log.warning("%s; used step %d from %s", line, key[0], found.level)
            return replace(found, skipped=tuple(skipped), newest_born=newest_born)
    skipped += [f"step {n} is torn: {what}" for n, what in torn if step in (None, n)]
    reason = "; ".join(skipped) or ", ".join(level.name for level in levels) + ": nothing there"
    which = "" if step is None else f" of step {step}"
    raise CheckpointError(f"no usable checkpoint{which}: {reason}")


def _list(levels: Sequence[Level]) -> _Inventory:
    inventory = _Inventory()
    for level in levels:
        try:
            if isinstance(level, LocalDisk):
                inventory.torn.update(level.torn())
            for stored in level.checkpoints():
                key = (stored.step, stored.lineage.run)
                inventory.levels.setdefault(key, []).append(level)
                inventory.lineages[key] = stored.lineage
        except Exception as problem:  # noqa: BLE001 - storage may fail in any way
            inventory.problems.append(f"{level.name} cannot be listed: {problem}")
    return inventory


def _order(inventory: _Inventory, ranks: Ranks, only: int | None) -> tuple[list[Key], int]:
    """List what every rank can try, best first; also return the newest `born`.

    Abandoned checkpoints are left out, except for the step `only`.
    """
    everyones = ranks.gather(inventory.lineages)
    stored = [
        StoredCheckpoint(step, lineage)
        for lineages in everyones
        for (step, _), lineage in lineages.items()
        if only in (None, step)
    ]
    common = set.intersection(*(set(lineages) for lineages in everyones))
    keys = [(one.step, one.lineage.run) for one in best_first(stored)]
    born = [lineage.born for lineages in everyones for lineage in lineages.values()]
    return [key for key in dict.fromkeys(keys) if key in common], max(born, default=0)


def _try(
    levels: Sequence[Level], step: int, into: State, ranks: Ranks, skipped: list[str]
) -> Restored | ContractError | None:
    """Restore from the first level that can; None if none can, an error if `into` is no state."""
    for level in levels:
        try:
            reader = level.open(step)
            try:
                return Restored(step, level.name, _fill(reader, into, ranks.rank))
            finally:
                reader.close()
        except ContractError as problem:
            return problem
        except Exception as problem:  # noqa: BLE001 - storage may fail in any way
            reason = str(problem) or type(problem).__name__
            skipped.append(f"step {step} on {level.name} is unusable: {reason}")
    return None


def _fill(reader: CheckpointReader, into: State, rank: int) -> Mapping[str, object]:
    """Fill `into`, and return the extra of this rank."""
    state, providers = of_into = opened(into)
    tensors, objects, _ = collect(of_into)
    entries = [(index, entry) for index in reader.indexes.values() for entry in index.entries]
    unsaved = _left_to_owners([*tensors, *objects], providers, reader, entries)
    left = set(map(id, unsaved))
    tensors = [entry for entry in tensors if id(entry) not in left]
    objects = [entry for entry in objects if id(entry) not in left]
    lazy = [entry for entry in tensors if isinstance(entry.source, LazyTensor)]
    made_of = {id(entry): entry.materialized() for entry in lazy}
    tensors = [made_of.get(id(entry), entry) for entry in tensors]
    created = _absent_tensors(into, entries, {entry.key for entry in tensors})
    wanted = [*tensors, *created]
    paths = {entry.key: entry.path for entry in objects}
    differing = _different_shapes(tensors, entries)
    if differing:
        raise CheckpointError(f"shapes differ: {'; '.join(differing[:6])}")
    there = {e.key for _, e in entries if e.dtype is None} | {made.key for made in created}
    jobs = list(jobs_of(wanted, entries))
    missing = sorted(set(paths) - there) + missing_of(wanted, jobs)
    if missing:
        raise CheckpointError(_lacks(missing))
    _check_can_be_filled(wanted)
    read_tensors(reader, jobs)
    _remove_all(state, [entry.path for entry in unsaved])
    for made in (*created, *made_of.values()):
        _set_at(state, made.path, made.tensor)
    paths |= _absent_objects(into, entries)
    for index, entry in entries:
        if entry.dtype is None and entry.key in paths:
            _set_at(state, paths[entry.key], read_object(reader, index, entry))
    try:
        for path, provider in providers:
            provider.load_state(_at(state, path))
    except Exception as problem:
        if not unsaved:
            raise
        lacking = _lacks([entry.key for entry in unsaved])
        raise CheckpointError(f"{lacking} as the state has it: {problem}") from problem
    _set_values(into, state)
    chosen = reader.indexes.get(rank) or reader.indexes[min(reader.indexes)]
    key = extra_entry({}, chosen.rank).key
    own = next((e for e in chosen.objects if e.key == key), None)
    return {} if own is None else cast(Mapping[str, object], read_object(reader, chosen, own))


def _lacks(keys: Sequence[str]) -> str:
    return f"it lacks {', '.join(keys[:6])}"


def _check_can_be_filled(tensors: Sequence[TensorEntry]) -> None:
    """Raise `ContractError` for an expanded tensor, whose elements share memory."""
    for entry in tensors:
        sizes = zip(entry.tensor.shape, entry.tensor.stride(), strict=True)
        if entry.tensor.numel() and any(size > 1 and not stride for size, stride in sizes):
            raise ContractError(entry.key, "is expanded: it cannot be filled in place, a clone can")


def _left_to_owners(
    entries: Sequence[TensorEntry | ObjectEntry],
    providers: Sequence[tuple[Path, StateProvider]],
    reader: CheckpointReader,
    saved: Sequence[Located],
) -> list[TensorEntry | ObjectEntry]:
    """List what the checkpoint lacks of providers of which it has something.

    Their structure may have changed since, as that of an optimizer that had not stepped, or a list
    that has grown: they get what was saved, and judge that. The same holds for a tensor of another
    shape, unless it is a shard. What a `StateProvider` expects to be filled in place has to be
    there, and everything has to be if files of some ranks are missing.
    """
    if not {rank for i in reader.indexes.values() for rank in i.ranks} <= set(reader.indexes):
        return []
    shapes = {entry.key: entry.shape for _, entry in saved if entry.dtype is not None}
    others = {entry.key for _, entry in saved if entry.dtype is None}
    owners = [(tuple(map(step_to, path)), provider) for path, provider in providers]
    present = {root for root, _ in owners for _, e in saved if e.path[: len(root)] == root}

    def is_left(entry: TensorEntry | ObjectEntry) -> bool:
        path = entry.path  # the innermost owner is the first
        owner = next((one for one in owners if path[: len(one[0])] == one[0]), None)
        if owner is None or owner[0] == path or owner[0] not in present:
            return False
        if isinstance(entry, ObjectEntry):
            return entry.key not in others
        if isinstance(entry.source, Tensor) and not isinstance(owner[1], StatefulProvider):
            return False
        is_shard = tuple(entry.source.shape) != entry.shape
        has_other_shape = shapes.get(entry.key, entry.shape) != entry.shape
        return entry.key not in shapes or (has_other_shape and not is_shard)

    return [entry for entry in entries if is_left(entry)]


def _different_shapes(tensors: Sequence[TensorEntry], entries: Sequence[Located]) -> list[str]:
    """Describe the tensors whose global shape differs between checkpoint and state."""
    saved = {entry.key: entry.shape for _, entry in entries if entry.dtype is not None}
    return [
        f"{e.key} is {list(e.shape)}, the checkpoint has {list(saved[e.key])}"
        for e in tensors
        if saved.get(e.key, e.shape) != e.shape
    ]


def _absent_tensors(
    into: State, entries: Sequence[Located], known: AbstractSet[str]
) -> list[TensorEntry]:
    """Create the global tensors that a provider of `into` does not have yet.

    For example the moments of an optimizer that has not stepped.
    """
    made: dict[str, TensorEntry] = {}
    for _, entry in entries:
        if entry.dtype is not None and entry.key not in known and _is_owned(into, entry.path):
            tensor = empty_on_host(entry.shape, getattr(torch, entry.dtype))
            zeros = (0,) * len(entry.shape)
            made.setdefault(
                entry.key, TensorEntry(entry.key, entry.path, entry.shape, zeros, tensor)
            )
    return list(made.values())


def _absent_objects(into: State, entries: Sequence[Located]) -> dict[str, Path]:
    """Keys and paths of the objects that belong to a provider of `into`."""
    return {
        entry.key: entry.path
        for _, entry in entries
        if entry.dtype is None and _is_owned(into, entry.path)
    }


def _set_at(state: Mapping[str, object], path: Path, value: object) -> None:
    """Set the value at a path; missing containers on the way are created."""
    at: Any = state
    for step, following in pairwise(path):
        inner = _get(at, step)
        if inner is None:
            inner = [] if isinstance(following, int) else {}
            _put(at, step, inner)
        at = inner
    _put(at, path[-1], value)


def _remove_all(state: Mapping[str, object], paths: Sequence[Path]) -> None:
    """Remove values of providers, but not from mappings and lists that these may still use."""
    own = cast(MutableMapping[str | int, object], state)
    for top in {_key(path[0]) for path in paths}:
        own[top] = _with_own_containers(own[top])

    def indexes(path: Path) -> list[int]:
        return [step if isinstance(step, int) else -1 for step in path]

    for path in sorted(paths, key=indexes, reverse=True):  # the last of a list first
        _remove_at(state, path)


def _with_own_containers(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_own_containers(inner) for inner in value]
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value)
        for key, inner in value.items():
            copied[key] = _with_own_containers(inner)
        return copied
    return value


def _remove_at(state: Mapping[str, object], path: Path) -> None:
    """Remove the value at a path, and with it the end of a list that is empty then."""
    above, last = path[:-1], path[-1]
    container: Any = _at(state, above)
    if isinstance(container, list) and last != len(container) - 1:
        _put(container, last, None)
        return
    del container[_key(last)]
    if not container and isinstance(above[-1], int):
        outer: Any = _at(state, above[:-1])
        if above[-1] == len(outer) - 1:
            _remove_at(state, above)


def _at(state: Mapping[str, object], path: Sequence[Any]) -> object:
    """Return the value at a path."""
    at: Any = state
    for step in path:
        at = at[_key(step)]
    return at


def _set_values(into: State, state: Mapping[str, object]) -> None:
    """Set the values of `into` that no provider gave."""
    if not isinstance(into, MutableMapping):
        return
    for key, value in into.items():
        if provider_of(value) is None:
            into[key] = state[key]


def _is_owned(into: State, path: Path) -> bool:
    return isinstance(into, Mapping) and provider_of(_get(into, path[0])) is not None


def _get(container: Any, step: str | int | tuple[int | str]) -> Any:
    if isinstance(container, list):
        return container[step] if isinstance(step, int) and step < len(container) else None
    return container.get(_key(step))


def _put(container: Any, step: str | int | tuple[int | str], value: object) -> None:
    if isinstance(container, list) and isinstance(step, int):
        container += [None] * (step + 1 - len(container))
        container[step] = value
    else:
        container[_key(step)] = value


def _key(step: str | int | tuple[int | str]) -> str | int:
    return step[0] if isinstance(step, tuple) else step
