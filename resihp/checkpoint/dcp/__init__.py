"""For users of torch's distributed checkpoint: our writer and lazy copy behind its interfaces."""

from .writer import LazyWriter

__all__ = ["LazyWriter"]
