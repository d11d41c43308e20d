"""The joint search: groups into replicas, layers over stages, microbatches over replicas."""

from .joint import search

__all__ = ["search"]
