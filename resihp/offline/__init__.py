"""Offline analysis: readers of recorded jobs in several formats, diagnosis, reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._analysis import Analysis, analyze
    from ._read import read_trace
    from ._resihp_parquet import TraceWriter, write_trace
    from ._trace import Trace
    from .perfetto import write_perfetto
    from .report import last_replica, slowest_step, write_html
    from .summary import headline, print_summary
    from .timeline import TraceTimeline

__all__ = [
    "Analysis",
    "Trace",
    "TraceTimeline",
    "TraceWriter",
    "analyze",
    "headline",
    "last_replica",
    "print_summary",
    "read_trace",
    "slowest_step",
    "write_html",
    "write_perfetto",
    "write_trace",
]

_HOME = {
    "Analysis": "._analysis",
    "TraceTimeline": ".timeline",
    "Trace": "._trace",
    "TraceWriter": "._resihp_parquet",
    "analyze": "._analysis",
    "headline": ".summary",
    "last_replica": ".report",
    "print_summary": ".summary",
    "read_trace": "._read",
    "slowest_step": ".report",
    "write_html": ".report",
    "write_perfetto": ".perfetto",
    "write_trace": "._resihp_parquet",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from resihp import _own_packages

    _own_packages.check("detector")

    return getattr(import_module(_HOME[name], __name__), name)
