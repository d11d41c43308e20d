"""Compilation of what layers compute between matrix products, attention and collectives.

These parts, each a few elementwise operators that `torch.compile` makes one kernel of, are the same
for all layers and for any lengths and shares: none is compiled again when the layout changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_backend: ContextVar[str | None] = ContextVar("compile_backend", default=None)
"""Backend of `torch.compile` by which `compilable` functions are called now; None: as they are."""


def compilable(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function of tensors and constants that may be compiled.

    It holds no collective and no randomness, and no matrix product: products share their weights'
    casts under autocast.
    """

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        backend = _backend.get()
        chosen = function if backend is None else _compiled(function, backend)
        return chosen(*args, **keywords)

    return call


@contextmanager
def compiling(backend: str | None) -> Iterator[None]:
    """Compile the `compilable` functions that are called inside."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


@cache
def _compiled(function: Callable[P, R], backend: str) -> Callable[P, R]:
    # Not `fullgraph`: with that, more kinds of calls than torch compiles would be an error.
    return torch.compile(function, backend=backend, dynamic=True)
