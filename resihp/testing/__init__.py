"""Synthetic jobs, traces and faults, and ranks as local processes: for tests and benchmarks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .synthetic_traces import Recipe, Trouble, record, write_whatif

__all__ = ["Recipe", "Trouble", "record", "write_whatif"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: trace writers need pyarrow, ranks need torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".synthetic_traces", __name__), name)
