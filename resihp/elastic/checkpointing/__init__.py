"""The job's own checkpoints: written while it trains, read where nobody alive holds the state."""

from .settings import Checkpoints

__all__ = ["Checkpoints"]
