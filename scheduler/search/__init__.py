"""Joint search: TP groups into replicas, layers over stages, microbatches over replicas."""

from .interleaved import FoundPlan, interleaved
from .joint import search

__all__ = ["FoundPlan", "interleaved", "search"]
