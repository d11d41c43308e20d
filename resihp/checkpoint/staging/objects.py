"""Values that are not tensors, as they are at `save`: without copies where they cannot change.

Immutable values are taken as they are. Others are pickled within `save`, which is several times
faster than a deep copy, and the pickle tells afterwards whether a value is that of the checkpoint
before: then its encoded content is used again. Values that hold tensors are deep-copied.
"""

from __future__ import annotations

import copy
import enum
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..format.index import IndexEntry
from ..format.shard_file import encode_object, object_section
from ..providers import LazyObject
from ..state_dict import ObjectEntry

_IMMUTABLE = (
    type(None), bool, int, float, complex, str, bytes, range, enum.Enum,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """Value at `save`.

    pickled  pickle of the value, in which two equal ones mean equal values; None: never used again
    value    returns the value
    """

    entry: ObjectEntry
    pickled: bytes | None
    value: Callable[[], object]


class ObjectSnapshots:
    """Takes the objects of each checkpoint, and encodes those that differ from the one before."""

    def __init__(self) -> None:
        self._encoded: dict[str, tuple[bytes, bytes]] = {}

    def take(
        self, entries: Sequence[ObjectEntry]
    ) -> Callable[[int], tuple[tuple[IndexEntry, ...], bytes]]:
        """Take the values as they are now; returns a function that encodes their section.

        That function is called in the thread of a level. Raises what pickling or copying a value
        raises.
        """
        taken = [_snapshot(entry) for entry in entries]
        return lambda start: object_section(
            ((one.entry.key, one.entry.path, self._encode(one)) for one in taken), start
        )

    def _encode(self, snapshot: _Snapshot) -> memoryview:
        key, pickled = snapshot.entry.key, snapshot.pickled
        known = self._encoded.get(key)
        if pickled is not None and known is not None and known[0] == pickled:
            return memoryview(known[1])
        encoded = encode_object(snapshot.value())
        if pickled is not None:
            self._encoded[key] = pickled, bytes(encoded)
        return encoded


def _snapshot(entry: ObjectEntry) -> _Snapshot:
    value = entry.value
    if isinstance(value, LazyObject):
        return _Snapshot(entry, None, value.make)
    if _is_immutable(value):
        return _Snapshot(entry, None, lambda: value)
    pickled = _pickled(value)
    if pickled is None:
        copied = copy.deepcopy(value)
        return _Snapshot(entry, None, lambda: copied)
    return _Snapshot(entry, pickled, lambda: pickle.loads(pickled))


def _is_immutable(value: object) -> bool:
    """Return True for values that cannot change: numbers, texts, and tuples and sets of them."""
    if type(value) in (tuple, frozenset):
        assert isinstance(value, tuple | frozenset)
        return all(map(_is_immutable, value))
    return type(value) in _IMMUTABLE or isinstance(value, enum.Enum)


class _HoldsTensor(Exception):  # noqa: N818
    """A value holds a tensor, whose pickle costs more than a copy."""


class _Pickler(pickle.Pickler):
    """Pickles values without tensors. The hook is not called for built-in types."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Tensor) or torch.is_storage(obj):
            raise _HoldsTensor
        return NotImplemented


def _pickled(value: object) -> bytes | None:
    """Return a pickle; None if the value holds tensors."""
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5).dump(value)
    except _HoldsTensor:
        return None
    return file.getvalue()
