"""Loads values that were read into a state: its containers, modules and optimizers."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Any

import torch

from ..state_dict import Path, State, TensorEntry, is_stateful
from .shard_reader import Located


def absent_tensors(
    into: State, entries: Sequence[Located], known: AbstractSet[str]
) -> list[TensorEntry]:
    """Create the global tensors that a `Stateful` value of `into` does not have yet.

    For example the moments of an optimizer that has not stepped.
    """
    made: dict[str, TensorEntry] = {}
    for _, entry in entries:
        if entry.dtype is not None and entry.key not in known and _is_owned(into, entry.path):
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            zeros = (0,) * len(entry.shape)
            made.setdefault(
                entry.key, TensorEntry(entry.key, entry.path, entry.shape, zeros, tensor)
            )
    return list(made.values())


def absent_objects(into: State, entries: Sequence[Located]) -> dict[str, Path]:
    """Keys and paths of the objects that belong to a `Stateful` value of `into`."""
    return {
        entry.key: entry.path
        for _, entry in entries
        if entry.dtype is None and _is_owned(into, entry.path)
    }


def set_at(state: Mapping[str, object], path: Path, value: object) -> None:
    """Set the value at a path; missing containers on the way are created."""
    at: Any = state
    for step, following in pairwise(path):
        inner = _get(at, step)
        if inner is None:
            inner = [] if isinstance(following, int) else {}
            _put(at, step, inner)
        at = inner
    _put(at, path[-1], value)


def load_into(into: State, state: Mapping[str, object]) -> None:
    """Load `Stateful` values of `into` from `state`, and set its other values."""
    if not isinstance(into, Mapping):
        return
    for key, value in into.items():
        if is_stateful(value):
            loaded: Any = state[key]
            value.load_state_dict(loaded)
        elif isinstance(into, MutableMapping):
            into[key] = state[key]


def _is_owned(into: State, path: Path) -> bool:
    return isinstance(into, Mapping) and is_stateful(into.get(str(path[0])))


def _get(container: Any, step: str | int | tuple[int]) -> Any:
    if isinstance(container, list):
        return container[step] if isinstance(step, int) and step < len(container) else None
    return container.get(_key(step))


def _put(container: Any, step: str | int | tuple[int], value: object) -> None:
    if isinstance(container, list) and isinstance(step, int):
        container += [None] * (step + 1 - len(container))
        container[step] = value
    else:
        container[_key(step)] = value


def _key(step: str | int | tuple[int]) -> str | int:
    return step[0] if isinstance(step, tuple) else step
