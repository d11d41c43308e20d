"""Restore: selection of a checkpoint, verified reads, and loading into the state."""

from .selection import Restored, restore

__all__ = ["Restored", "restore"]
