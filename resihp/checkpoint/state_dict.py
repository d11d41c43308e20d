"""What a state dict holds: parts of tensors that live in this process, and everything else.

Names are those of torch's distributed checkpoint: keys on the way to a value joined by dots, lists
entered only where they hold tensors or mappings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from resihp.contracts import ContractError

Path: TypeAlias = tuple[str | int | tuple[int], ...]
"""How to reach a value: a text key, an index into a list, or (in a tuple) a number as key."""

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part lies in its whole tensor: offsets and sizes, one of each for every dimension."""


@dataclass(frozen=True, eq=False)
class ShardedTensorPiece:
    """A rectangular piece of a larger tensor, of any size, held by this process.

    key           name of the whole tensor
    global_shape  of the whole tensor
    offsets       where the piece starts in it, one number for each dimension
    tensor        the piece itself; saved from and restored into

    It may stand anywhere in a state dict; its own key names it. Raises `ContractError` where it
    does not lie inside the whole.
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
            raise ContractError(self.key, f"piece lies outside {self.global_shape}")


State: TypeAlias = Mapping[str, object] | Sequence[ShardedTensorPiece]
"""A nested state dict (its values may be `Stateful`: modules, optimizers), or pieces alone."""


@dataclass(frozen=True, eq=False)
class TensorEntry:
    """A piece of a tensor, with the way to it in the state dict."""

    key: str
    path: Path
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def box(self) -> Box:
        """Where it lies in the whole."""
        return self.offsets, tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its memory when laid out without gaps."""
        return self.tensor.numel() * self.tensor.dtype.itemsize


@dataclass(frozen=True, eq=False)
class ObjectEntry:
    """Anything that is no tensor."""

    key: str
    path: Path
    value: object


def collect(state: State) -> tuple[list[TensorEntry], list[ObjectEntry]]:
    """All parts and things of a state, in its order. Raises `ContractError` for a name twice."""
    parts: list[TensorEntry] = []
    objects: list[ObjectEntry] = []
    for path, value in _leaves(opened(state)):
        found = _part(path, value)
        if found is None:
            objects.append(ObjectEntry(name(path), path, value))
        else:
            parts += found
    boxes = [(part.key, part.offsets) for part in parts]
    names = [thing.key for thing in objects]
    for seen in (boxes, names):
        if len(set(seen)) < len(seen):
            raise ContractError(str(_twice(seen)), "occurs twice in the state")
    return parts, objects


def opened(state: State) -> Mapping[str, object]:
    """The state as nested mappings, each `Stateful` value replaced by what it says of itself."""
    if not isinstance(state, Mapping):
        _check_pieces(state)
        return {f"{piece.key}{list(piece.offsets)}": piece for piece in state}
    return {
        key: value.state_dict() if is_stateful(value) else value for key, value in state.items()
    }


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether it has a state of its own to ask for and to load, as modules and optimizers have."""
    if isinstance(value, Tensor | Mapping):
        return False  # quickly: the check below takes 20 microseconds
    return isinstance(value, Stateful)


def name(path: Path) -> str:
    """The dotted name of a path.

    >>> name(("state", (0,), "exp_avg"))
    'state.0.exp_avg'
    """
    return ".".join(str(step[0] if isinstance(step, tuple) else step) for step in path)


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes of the same tensor share.

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
    """Whether a list holds anything that is saved apart."""
    return any(
        isinstance(inner, Mapping | Tensor | ShardedTensorPiece)
        or (isinstance(inner, list) and _is_open(inner))
        for inner in value
    )


def _part(path: Path, value: object) -> list[TensorEntry] | None:
    """The local parts of a tensor; None for what is none."""
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
    """Raises `ContractError` for what has no memory of its own that holds all of it."""
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


_T = TypeVar("_T")


def _twice(seen: Iterable[_T]) -> _T | None:
    met: set[_T] = set()
    for one in seen:
        if one in met:
            return one
        met.add(one)
    return None
