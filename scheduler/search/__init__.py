"""Joint search: TP groups into replicas, layers over stages, microbatches over replicas."""

from .front import search_front
from .interleaved import FoundPlan, interleaved
from .joint import search
from .quotas import Arrangement

__all__ = ["Arrangement", "FoundPlan", "interleaved", "search", "search_front"]
