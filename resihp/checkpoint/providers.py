"""State providers: objects that give a checkpoint their state, piece by piece while it is saved.

A state is a tree of names. At each of them stands a tensor, another value, or a provider, which
gives a part of the tree in its place: composites (`StateProvider`), tensors that are made in pieces
while they are copied (`LazyTensor`), and values that are made in the background (`LazyObject`).
Providers separate what a state is from how it moves (DataStates-LLM, arXiv 2601.16956).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from resihp.contracts import ContractError


class StateProvider(Protocol):
    """Gives its state to `save`, and takes it back in `restore`.

    1. `save`, `prepare` and `restore` call `provide_state` in the training thread, once each. What
       it returns stands in the state in place of the provider: a tensor, a `LazyTensor` or
       `LazyObject`, another value, or a mapping of names to these and to further providers.
       Its names, shapes and dtypes should be the same at each save, as changes cost a new plan.
    2. `restore` fills the tensors of that state in place, puts all other values and the tensors
       that were lazy into its mappings, and calls `load_state` with the result; of providers inside
       others first. Values that the checkpoint lacks, although it has others of the provider, are
       left out of it. If `load_state` raises, the next-best checkpoint is tried.

    Recognized as values of the state, and of what another provider gives. Modules, optimizers and
    other `Stateful` values take part by `state_dict` and `load_state_dict` in the same way.
    """

    def provide_state(self) -> Any:
        """Return the state, without copies: its tensors must not change before the fence."""

    def load_state(self, state: Any) -> None:
        """Take a restored state, in the form of `provide_state`."""


@dataclass(frozen=True, eq=False)
class StatefulProvider:
    """Provider of a module, an optimizer or another object with torch's protocol."""

    stateful: Stateful

    def provide_state(self) -> Any:
        """Return its `state_dict`."""
        return self.stateful.state_dict()

    def load_state(self, state: Any) -> None:
        """Load a state dict."""
        self.stateful.load_state_dict(state)
        if isinstance(self.stateful, torch.optim.Optimizer):
            _lay_out(self.stateful)


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give moments the strides of their parameters: fused optimizers go through memory.

    Those that were created while they were restored are row-major.
    """
    for parameter, held in optimizer.state.items():
        for name, moment in held.items() if not isinstance(parameter, DTensor) else ():
            is_moment = isinstance(moment, Tensor) and moment.shape == parameter.shape
            if is_moment and moment.stride() != parameter.stride():
                with torch.inference_mode(False):  # it is trained later
                    like = torch.empty_like(parameter, dtype=moment.dtype, device=moment.device)
                    held[name] = like.copy_(moment)


def provider_of(value: object) -> StateProvider | None:
    """Return the provider of a value of the state; None if the value stands for itself."""
    if is_provider(value):
        return value
    return StatefulProvider(value) if is_stateful(value) else None


def is_provider(value: object) -> TypeGuard[StateProvider]:
    """Return True for objects with `provide_state` and `load_state`."""
    kind = type(value)
    return callable(getattr(kind, "provide_state", None)) and hasattr(kind, "load_state")


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return True for objects with `state_dict` and `load_state_dict`, such as modules."""
    if isinstance(value, Tensor | Mapping | type) or not hasattr(value, "state_dict"):
        return False  # spares the check below, which takes 20 us
    return isinstance(value, Stateful)


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor that is made in pieces while it is copied, and never exists as a whole.

    For example master weights that are saved in another dtype, dequantized values, or a tensor that
    lies on another device, in a file or in a process of its own.

    shape         of this rank's shard
    dtype         of the checkpoint's tensor
    read          `read(start, stop)` makes its elements from `start` to `stop` (exclusive), counted
                  in row-major order, as a tensor of `dtype`, at most 4 MiB. Called from several
                  threads, until `fence` returns, for some elements twice.
    reads         tensors that `read` uses, which must not change before the fence
    global_shape  shape of the global tensor; None: the shard is the whole
    offsets       position of the shard in it

    Restored as a new tensor on the host. Raises `ContractError` if the shard does not lie inside
    the global tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    reads: Sequence[Tensor] = ()
    global_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_shard("LazyTensor", self.whole, self.start, self.shape)

    @classmethod
    def converted(cls, tensor: Tensor, dtype: torch.dtype) -> LazyTensor:
        """Return a tensor in another dtype, for example float32 weights as bfloat16."""
        position: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = None, None
        if isinstance(tensor, DTensor):
            (chunk,) = tensor.__create_chunk_list__()
            position, tensor = (tuple(tensor.shape), tuple(chunk.offsets)), tensor.to_local()
        local = tensor.detach()

        def read(start: int, stop: int) -> Tensor:
            return local.reshape(-1)[start:stop].to(dtype)

        return cls(tuple(local.shape), dtype, read, (local,), *position)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the global tensor."""
        return self.shape if self.global_shape is None else self.global_shape

    @property
    def start(self) -> tuple[int, ...]:
        """Offsets in the global tensor."""
        return (0,) * len(self.whole) if self.offsets is None else self.offsets

    def read_bytes(self, start: int, stop: int) -> Tensor:
        """Make the bytes from `start` to `stop`, which are edges of elements.

        Raises `ContractError` if `read` returns another dtype or number of elements.
        """
        size = self.dtype.itemsize
        made = self.read(start // size, stop // size)
        if made.dtype != self.dtype or made.numel() != (stop - start) // size:
            wanted = f"{(stop - start) // size} elements of {self.dtype}"
            raise ContractError("LazyTensor.read", f"made {made.numel()} of {made.dtype}: {wanted}")
        return flat_bytes(made)


@dataclass(frozen=True, eq=False)
class LazyObject:
    """A value that is made while it is saved, in a thread of a level.

    make  returns the value as it was at `save`, whatever happens meanwhile; called once for each
          checkpoint, unless that is given up before. For example a function that compresses an
          immutable snapshot.
    """

    make: Callable[[], object]


def flat_bytes(tensor: Tensor) -> Tensor:
    """View the data of a tensor as bytes; a copy if it is not contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    row = plain.as_strided((plain.numel(),), (1,))  # one element may have any stride
    return row.view(torch.uint8)


TensorSource: TypeAlias = Tensor | LazyTensor
"""Bytes of a tensor shard to save."""


def memory_of(source: TensorSource) -> Sequence[Tensor]:
    """Tensors whose change would change the bytes of a source."""
    return source.reads if isinstance(source, LazyTensor) else (source,)


def check_shard(
    key: str, whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> None:
    """Raise `ContractError` if a shard does not lie inside its global tensor."""
    if not len(whole) == len(offsets) == len(sizes):
        raise ContractError(key, "shape, offsets and tensor differ in dimensions")
    spans = zip(offsets, sizes, whole, strict=True)
    if any(start < 0 or start + size > total for start, size, total in spans):
        raise ContractError(key, f"shard lies outside {tuple(whole)}")
