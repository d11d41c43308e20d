"""Recomputation of activations: a backward pass computes them again instead of keeping them.

Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174); of attention alone:
Korthikanti et al., arXiv 2205.05198, section 5. torch's own checkpointing computes a segment again
for each call of `backward`, of which a split backward pass makes several per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

_is_selective: ContextVar[bool] = ContextVar("recompute_attention", default=False)

_Saved = tuple["_Segment", int]
"""What the graph holds instead of a tensor."""


class _AllSavedError(Exception):
    """Ends a segment that is computed again once all that it had saved is there."""


class _Segment:
    """Inputs of one call, and its saved tensors once a backward pass has asked for one.

    They live as long as the graph that refers to them. Random numbers are functions of the
    microbatch, so the call gives the same bits again; collectives in it are repeated, in the same
    order on all ranks of the group.
    """

    def __init__(self, function: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> None:
        self._function, self._saved = function, 0
        self._args = [(_detached(arg), _needs_gradient(arg)) for arg in args]
        self._versions = [arg._version for arg in args if isinstance(arg, torch.Tensor)]
        device = next(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
        self._precision = (
            device,
            torch.get_autocast_dtype(device),
            torch.is_autocast_enabled(device),
        )
        self._tensors: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> _Saved:
        self._saved += 1
        return self, self._saved - 1

    def get(self, index: int) -> torch.Tensor:
        if not self._tensors:
            self._compute()
        return self._tensors[index]

    def _compute(self) -> None:
        found = [arg._version for arg, _ in self._args if isinstance(arg, torch.Tensor)]
        assert found == self._versions, "an input of a recomputed segment has changed"
        args = [
            arg.detach().requires_grad_() if needs_gradient else arg
            for arg, needs_gradient in self._args
        ]
        device, dtype, enabled = self._precision
        try:
            with (
                torch.enable_grad(),
                torch.autocast(device, dtype, enabled=enabled),
                saved_tensors_hooks(self._collect, _unpack),
            ):
                self._function(*args)
        except _AllSavedError:
            pass
        assert len(self._tensors) == self._saved, "a recomputed segment saves other tensors"

    def _collect(self, tensor: torch.Tensor) -> None:
        """Take a saved tensor; the graph of this second call holds none and is never run."""
        self._tensors.append(tensor.detach())
        if len(self._tensors) == self._saved:
            raise _AllSavedError


def recomputed(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Call a function of tensors and constants; its backward pass first calls it again.

    Only its inputs are kept. `function` is deterministic, as are all parts of a model.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    segment = _Segment(function, args)
    with saved_tensors_hooks(segment.pack, _unpack):
        return function(*args)


def attention_core(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Call the core of attention, which `recomputing_attention` may have computed again."""
    return recomputed(function, *args) if _is_selective.get() else function(*args)


@contextmanager
def recomputing_attention(enabled: bool) -> Iterator[None]:
    """Recompute the cores of attention in the enclosed forward pass."""
    token = _is_selective.set(enabled)
    try:
        yield
    finally:
        _is_selective.reset(token)


def _unpack(saved: _Saved) -> torch.Tensor:
    segment, index = saved
    return segment.get(index)


def _detached(arg: Any) -> Any:
    return arg.detach() if isinstance(arg, torch.Tensor) else arg


def _needs_gradient(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.requires_grad
