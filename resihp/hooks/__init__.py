"""Trainer-side hooks: what each microbatch took and how much work it held, streamed away."""

from ._clocks import CudaClock, HostClock
from ._hook import hook
from ._stats import Stats
from .monitor import Monitor

__all__ = ["CudaClock", "HostClock", "Monitor", "Stats", "hook"]
