"""Entries of a state dict: the tensor shards of this process, and all other objects.

Names are those of torch's distributed checkpoint: the keys on the path to a value, joined by dots;
lists are entered only if they hold tensors or mappings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from resihp.contracts import ContractError

from .providers import (
    LazyObject,
    LazyTensor,
    StatefulProvider,
    StateProvider,
    TensorSource,
    check_shard,
    provider_of,
)

Path: TypeAlias = tuple[str | int | tuple[int | str], ...]
"""Path to a value: text keys, list indexes, and (in a tuple of one) keys of other types."""

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
        check_shard(self.key, self.global_shape, self.offsets, self.tensor.shape)


State: TypeAlias = Mapping[str, object] | Sequence[ShardedTensorPiece]
"""A nested state dict (values may be providers, modules, optimizers), or a list of shards."""


@dataclass(frozen=True, eq=False)
class TensorEntry:
    """A tensor shard, with its path in the state dict."""

    key: str
    path: Path
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    source: TensorSource

    @property
    def tensor(self) -> Tensor:
        """Memory of the shard, which must exist."""
        assert isinstance(self.source, Tensor)
        return self.source

    @property
    def box(self) -> Box:
        """Position in the global tensor."""
        return self.offsets, tuple(self.source.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its data without gaps."""
        return torch.Size(self.source.shape).numel() * self.source.dtype.itemsize

    def materialized(self) -> TensorEntry:
        """Return the entry with new memory on the host in place of a lazy tensor."""
        return replace(self, source=empty_on_host(self.source.shape, self.source.dtype))


@dataclass(frozen=True, eq=False)
class ObjectEntry:
    """A value that is not a tensor, with its path in the state dict."""

    key: str
    path: Path
    value: object


def empty_on_host(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Create a tensor for a restored value, whatever the caller's default device and mode: what is
    restored during an evaluation in inference mode is trained later."""
    with torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def extra_entry(extra: Mapping[str, object], rank: int) -> ObjectEntry:
    """Entry of the `extra` that the user gave on a rank."""
    return ObjectEntry(f"resihp.extra.{rank}", ("resihp", "extra", str(rank)), extra)


class CollectedState(NamedTuple):
    """All entries of a state, in its order, and the modules that gave some of them."""

    tensors: list[TensorEntry]
    objects: list[ObjectEntry]
    modules: list[nn.Module]


def collect(state: OpenedState) -> CollectedState:
    """List tensors and objects of a state, in its order.

    Raises `ContractError` for a name that occurs twice or is neither text nor an integer, for
    providers that were not opened and for tensors that cannot be saved.
    """
    tensors: list[TensorEntry] = []
    objects: list[ObjectEntry] = []
    stateful = [(at, one) for at, one in state.providers if isinstance(one, StatefulProvider)]
    load_all = [tuple(map(step_to, at)) for at, _ in stateful]  # also providers in their state
    for path, value in _leaves(state.values):
        found = _tensor_entries(path, value)
        if found is not None:
            tensors += found
        elif provider_of(value) is None or any(path[: len(at)] == at for at in load_all):
            objects.append(ObjectEntry(name(path), path, value))
        else:
            reason = "providers, modules and optimizers are values of the state or of a provider"
            raise ContractError(name(path), reason)
    boxes: list[object] = [(entry.key, entry.offsets) for entry in tensors]
    names: list[object] = [entry.key for entry in objects]
    for seen in (boxes, names):
        if len(set(seen)) < len(seen):
            first = next(each for each in seen if seen.count(each) > 1)
            raise ContractError(str(first), "occurs twice in the state")
    modules = [one.stateful for _, one in stateful if isinstance(one.stateful, nn.Module)]
    return CollectedState(tensors, objects, modules)


class OpenedState(NamedTuple):
    """A state with what its providers gave in their place.

    providers  with their paths; those inside others first
    """

    values: Mapping[str, object]
    providers: Sequence[tuple[Path, StateProvider]]


def opened(state: State) -> OpenedState:
    """Replace the providers of a state by what they give, and a list by a mapping.

    Raises `ContractError` for a shard that occurs twice in the list.
    """
    if not isinstance(state, Mapping):
        _check_pieces(state)
        pieces: dict[str, object] = {}
        for piece in state:
            where = f"{piece.key}{list(piece.offsets)}"
            if where in pieces:
                raise ContractError(where, "occurs twice in the state")
            pieces[where] = piece
        return OpenedState(pieces, [])
    for key, value in state.items():
        if provider_of(value) is None:
            _check_settable(state, (key,), value)
    providers: list[tuple[Path, StateProvider]] = []
    return OpenedState(_opened(state, (), providers), providers)


def _opened(
    values: Mapping[str, object], path: Path, providers: list[tuple[Path, StateProvider]]
) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in values.items():
        provider, given = provider_of(value), value
        if provider is not None:
            given = provider.provide_state()
            if isinstance(given, Mapping) and provider is value:
                given = _opened(given, (*path, key), providers)
            providers.append(((*path, key), provider))
        found[key] = given
    return found


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
    if isinstance(value, Mapping) and not _is_object(value, path):
        for key, inner in value.items():
            at = (*path, step_to(key))
            if path:  # the state itself is a copy
                _check_settable(value, at, inner)
            yield from _leaves(inner, at)
    elif isinstance(value, list) and _is_open(value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value


def _check_settable(container: Mapping[Any, object], path: Path, value: object) -> None:
    """Raise `ContractError` for a value that a restore has to set in a mapping that cannot change.

    Tensors are filled in place, and so are the values of a container inside it.
    """
    if hasattr(type(container), "__setitem__") or isinstance(value, Tensor | ShardedTensorPiece):
        return
    is_leaf = next((at == path for at, _ in _leaves(value, path)), False)
    if is_leaf:
        kind = type(container).__name__
        reason = f"is no tensor, so that a restore could not set it in a {kind}: use a dict"
        raise ContractError(name(path), reason)


def step_to(key: Any) -> str | tuple[int | str]:
    """Return a key's step in a path; a text of a subclass, as an enum, may not equal its name."""
    return key if type(key) is str else (key,)


def _is_object(value: Mapping[object, object], path: Path) -> bool:
    """Return True for a mapping whose keys are no names: it is saved as one value.

    Raises `ContractError` if that cannot be, as it is the state or holds what is saved by itself.
    """
    others = [key for key in value if not isinstance(key, str | int)]
    if not others:
        return False
    leaves = (leaf for key in value for _, leaf in _leaves(value[key], (*path, str(key))))
    if not path or any(map(_is_separate, leaves)):
        reason = f"names of entries are texts or integers, not {others[0]!r}"
        raise ContractError(name(path) or "state", reason)
    return True


def _is_open(value: Iterable[object]) -> bool:
    """Return True if a list holds values that are saved separately."""
    one_of_each_type = {type(inner): inner for inner in value}.values()
    return any(isinstance(one, Mapping) or _is_separate(one) for one in one_of_each_type) or any(
        _is_open(inner) for inner in value if isinstance(inner, list)
    )


def _is_separate(value: object) -> bool:
    """Return True for values that are never part of an object."""
    kinds = Tensor | ShardedTensorPiece | LazyTensor | LazyObject
    return isinstance(value, kinds) or provider_of(value) is not None


def _tensor_entries(path: Path, value: object) -> list[TensorEntry] | None:
    """Return the local shards of a tensor; None for other objects."""
    source: TensorSource
    match value:
        case ShardedTensorPiece(tensor=tensor):
            _check_plain(value.key, tensor)
            shape, offsets, path = tuple(value.global_shape), tuple(value.offsets), (value.key,)
            key, source, is_empty = value.key, tensor.detach(), not tensor.numel()
        case LazyTensor():
            shape, offsets, key = value.whole, value.start, name(path)
            source, is_empty = value, not value.nbytes
        case DTensor():
            return _dtensor(path, value)
        case Tensor():
            _check_plain(name(path), value)
            shape, key = tuple(value.shape), name(path)
            offsets, source, is_empty = (0,) * len(shape), value.detach(), False
        case _:
            return None
    if is_empty and 0 not in shape:
        return []
    return [TensorEntry(key, path, shape, offsets, source)]


def is_plain(tensor: Tensor) -> bool:
    """Return True for a region of memory that can be saved; not for a `DTensor`, its shard is."""
    return not _oddity(tensor)


def _check_plain(key: str, tensor: Tensor) -> None:
    """Raise `ContractError` for tensors that are not a plain region of memory."""
    if odd := _oddity(tensor):
        raise ContractError(key, f"a tensor that is {odd} cannot be saved or restored")


def _oddity(tensor: Tensor) -> str:
    return (
        "nested" if tensor.is_nested
        else "quantized" if tensor.is_quantized
        else "not initialized yet" if is_lazy(tensor)
        else "on the meta device" if tensor.is_meta
        else f"of {tensor.layout} layout" if tensor.layout is not torch.strided
        else "made of other tensors" if is_traceable_wrapper_subclass(tensor.detach())
        else ""
    )  # fmt: skip


def _check_pieces(state: object) -> None:
    listed = state if isinstance(state, Sequence) and not isinstance(state, str) else [state]
    if not all(isinstance(each, ShardedTensorPiece) for each in listed):
        kind = type(state).__name__
        raise ContractError("state", f"a mapping or a list of ShardedTensorPiece, not {kind}")


def _dtensor(path: Path, value: DTensor) -> list[TensorEntry]:
    if value.device_mesh.get_coordinate() is None:
        return []
    local = value.to_local().detach()
    _check_plain(name(path), local)
    if not local.numel():
        return []
    (chunk,) = value.__create_chunk_list__()
    return [TensorEntry(name(path), path, tuple(value.shape), tuple(chunk.offsets), local)]
