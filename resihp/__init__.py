"""ResiHP keeps hybrid-parallel training fast and alive on imperfect machines."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Client
    from .hooks import Monitor, hook
    from .instrumentation import instrument

__version__ = "0.1.0"
__all__ = ["Client", "Monitor", "__version__", "hook", "instrument"]

_HOMES = {
    "Client": ".client",
    "Monitor": ".hooks",
    "hook": ".hooks",
    "instrument": ".instrumentation",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that `import resihp` stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
