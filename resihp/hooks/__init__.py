"""Trainer-side hooks: time and work of each microbatch, streamed to the sidecar."""

from ._clocks import CudaClock, HostClock
from ._stats import Stats
from .monitor import Monitor, hook

__all__ = ["CudaClock", "HostClock", "Monitor", "Stats", "hook"]
