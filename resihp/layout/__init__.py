"""Pure algebra of layouts: who holds which range of which parameter, and what must move.

A tensor-parallel shard is a half-open range along one dimension, never "the i-th equal chunk", so
shards of any width, and layouts whose replicas differ in shape, are ordinary cases. Communication
and storage live elsewhere; everything here is data in, data out.
"""

from .communication import (
    ActivationTransfer,
    GradientReduction,
    boundary_transfers,
    gradient_reductions,
    microbatch_ranges,
)
from .moves import Move, holdings, least_numel, moves, writers
from .parameters import Param, Parameters, Range, split

__all__ = [
    "ActivationTransfer",
    "GradientReduction",
    "Move",
    "Param",
    "Parameters",
    "Range",
    "boundary_transfers",
    "gradient_reductions",
    "holdings",
    "least_numel",
    "microbatch_ranges",
    "moves",
    "split",
    "writers",
]
