"""Back from a checkpoint: which one, what is read of it, and how it gets into the state."""

from .selection import Restored, restore

__all__ = ["Restored", "restore"]
