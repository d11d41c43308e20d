"""Adapter to torch's distributed checkpoint (DCP): storage writer and asynchronous stager."""

from .writer import LazyWriter

__all__ = ["LazyWriter"]
