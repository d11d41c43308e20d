"""Entries of a state dict: the tensor shards of this process, and all other objects.

Names are those of torch's distributed checkpoint: the keys on the path to a value, joined by dots;
lists are entered only if they hold tensors or mappings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from resihp.contracts import ContractError

Path: TypeAlias = tuple[str | int | tuple[int], ...]
"""Path to a value: text keys, list indexes, and (in a tuple of one) integer keys."""

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Position of a shard in its global tensor: offsets and sizes, one of each per dimension."""


@dataclass(frozen=True, eq=False)
class ShardedTensorPiece:
    """A rectangular shard of a global tensor, of any size, held by this process.

    key           name of the global tensor; the path in the state dict does not matter
    global_shape  shape of the global tensor
    offsets       position of the shard in it, one number per dimension
    tensor        data of the shard; saved from and restored into

    Raises `ContractError` if the shard does not lie inside the global tensor.
    """

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    def __post_init__(self) -> None:
        if not len(self.global_shape) == len(self.offsets) == self.tensor.dim():
            raise ContractError(self.key, "shape, offsets and tensor differ in dimensions")
        spans = zip(self.offsets, self.tensor.shape, self.global_shape, strict=True)
        if any(start < 0 or start + size > whole for start, size, whole in spans):
            raise ContractError(self.key, f"shard lies outside {self.global_shape}")


State: TypeAlias = Mapping[str, object] | Sequence[ShardedTensorPiece]
"""A nested state dict (values may be `Stateful`: modules, optimizers), or a list of shards."""


@dataclass(frozen=True, eq=False)
class TensorEntry:
    """A tensor shard, with its path in the state dict."""

    key: str
    path: Path
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def box(self) -> Box:
        """Position in the global tensor."""
        return self.offsets, tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its data without gaps."""
        return self.tensor.numel() * self.tensor.dtype.itemsize


@dataclass(frozen=True, eq=False)
class ObjectEntry:
    """A value that is not a tensor, with its path in the state dict."""

    key: str
    path: Path
    value: object


def extra_entry(extra: Mapping[str, object], rank: int) -> ObjectEntry:
    """Entry of the `extra` that the user gave on a rank."""
    return ObjectEntry(f"resihp.extra.{rank}", ("resihp", "extra", str(rank)), extra)


class CollectedState(NamedTuple):
    """All entries of a state, in its order."""

    tensors: list[TensorEntry]
    objects: list[ObjectEntry]


def collect(state: State) -> CollectedState:
    """List tensors and objects of a state, in its order.

    Raises `ContractError` for a name that occurs twice and for tensors that cannot be saved.
    """
    tensors: list[TensorEntry] = []
    objects: list[ObjectEntry] = []
    for path, value in _leaves(opened(state)):
        found = _tensor_entries(path, value)
        if found is None:
            objects.append(ObjectEntry(name(path), path, value))
        else:
            tensors += found
    boxes: list[object] = [(entry.key, entry.offsets) for entry in tensors]
    names: list[object] = [entry.key for entry in objects]
    for seen in (boxes, names):
        if len(set(seen)) < len(seen):
            first = next(each for each in seen if seen.count(each) > 1)
            raise ContractError(str(first), "occurs twice in the state")
    return CollectedState(tensors, objects)


def opened(state: State) -> Mapping[str, object]:
    """Replace `Stateful` values of a state by their state dicts, and a list by a mapping."""
    if not isinstance(state, Mapping):
        _check_pieces(state)
        return {f"{piece.key}{list(piece.offsets)}": piece for piece in state}
    return {
        key: value.state_dict() if is_stateful(value) else value for key, value in state.items()
    }


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return True for objects with `state_dict` and `load_state_dict`, such as modules."""
    if isinstance(value, Tensor | Mapping):
        return False  # spares the check below, which takes 20 us
    return isinstance(value, Stateful)


def name(path: Path) -> str:
    """Join a path with dots.

    >>> name(("state", (0,), "exp_avg"))
    'state.0.exp_avg'
    """
    return ".".join(str(step[0] if isinstance(step, tuple) else step) for step in path)


def overlap(one: Box, other: Box) -> Box | None:
    """Intersect two boxes of the same tensor; None if they are disjoint.

    >>> overlap(((0, 0), (4, 2)), ((3, 0), (4, 1)))
    ((3, 0), (1, 1))
    """
    starts = tuple(map(max, one[0], other[0]))
    stops = tuple(
        min(a + n, b + m) for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True)
    )
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    return starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True))


def _leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            step = (key,) if isinstance(key, int) else str(key)
            yield from _leaves(inner, (*path, step))
    elif isinstance(value, list) and _is_open(value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value


def _is_open(value: Iterable[object]) -> bool:
    """Return True if a list holds values that are saved separately."""
    return any(
        isinstance(inner, Mapping | Tensor | ShardedTensorPiece)
        or (isinstance(inner, list) and _is_open(inner))
        for inner in value
    )


def _tensor_entries(path: Path, value: object) -> list[TensorEntry] | None:
    """Return the local shards of a tensor; None for other objects."""
    if isinstance(value, ShardedTensorPiece):
        if not value.tensor.numel() and 0 not in value.global_shape:
            return []
        tensor = value.tensor.detach()
        shape, offsets = tuple(value.global_shape), tuple(value.offsets)
        return [TensorEntry(value.key, (value.key,), shape, offsets, tensor)]
    if isinstance(value, DTensor):
        return _dtensor(path, value)
    if isinstance(value, Tensor):
        _check_plain(path, value)
        shape = tuple(value.shape)
        return [TensorEntry(name(path), path, shape, (0,) * len(shape), value.detach())]
    return None


def _check_plain(path: Path, value: Tensor) -> None:
    """Raise `ContractError` for tensors that are not a plain region of memory."""
    odd = (
        "nested" if value.is_nested
        else "quantized" if value.is_quantized
        else "not initialized yet" if is_lazy(value)
        else "on the meta device" if value.is_meta
        else f"of {value.layout} layout" if value.layout is not torch.strided
        else ""
    )  # fmt: skip
    if odd:
        raise ContractError(name(path), f"a tensor that is {odd} cannot be saved or restored")


def _check_pieces(state: object) -> None:
    listed = state if isinstance(state, Sequence) and not isinstance(state, str) else [state]
    if not all(isinstance(each, ShardedTensorPiece) for each in listed):
        kind = type(state).__name__
        raise ContractError("state", f"a mapping or a list of ShardedTensorPiece, not {kind}")


def _dtensor(path: Path, value: DTensor) -> list[TensorEntry]:
    if value.device_mesh.get_coordinate() is None:
        return []
    local = value.to_local().detach()
    if not local.numel():
        return []
    (chunk,) = value.__create_chunk_list__()
    return [TensorEntry(name(path), path, tuple(value.shape), tuple(chunk.offsets), local)]
