"""Live resize on torch.distributed: change the layout of a running job without stopping it.

`train` runs a model of ResiHP's engine; `Replicas` makes a training loop of your own resilient.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ddp.init import init_replica_group
    from .ddp.replicas import Replicas
    from .training import train

__all__ = ["Replicas", "init_replica_group", "train"]

_HOMES = {
    "Replicas": ".ddp.replicas",
    "init_replica_group": ".ddp.init",
    "train": ".training",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use; importing one of them does not load the others."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
