"""The sidecar of a training job: telemetry in, verdicts and plans out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app
    from .errors import StartError
    from .launch import Sidecar
    from .settings import Settings

__all__ = ["Settings", "Sidecar", "StartError", "create_app"]

_MODULES = {
    "Settings": ".settings",
    "Sidecar": ".launch",
    "StartError": ".errors",
    "create_app": ".app",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: a launcher needs no web framework."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
