"""What-if analysis: a recorded job is replayed with parts of it as they ideally would have been."""

from .dependencies import Dependencies, dependencies, transfer_seconds
from .ops import Kind, OpTable, Recording

__all__ = ["Dependencies", "Kind", "OpTable", "Recording", "dependencies", "transfer_seconds"]
