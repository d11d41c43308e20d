"""Traces in, diagnosis out: reads recorded jobs of several formats and explains where time went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._analysis import Analysis, analyze
    from ._read import read_trace
    from ._resihp_parquet import TraceWriter, write_trace
    from ._trace import Trace

__all__ = ["Analysis", "Trace", "TraceWriter", "analyze", "read_trace", "write_trace"]

_HOME = {
    "Analysis": "._analysis",
    "analyze": "._analysis",
    "Trace": "._trace",
    "TraceWriter": "._resihp_parquet",
    "read_trace": "._read",
    "write_trace": "._resihp_parquet",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from resihp import _own_packages

    _own_packages.check("detector")

    return getattr(import_module(_HOME[name], __name__), name)
