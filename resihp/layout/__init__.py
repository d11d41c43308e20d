"""Layout algebra: parameter ranges of ranks, moves between two layouts, gradient sums.

A tensor-parallel shard is a half-open range along one dimension, so shards of any width and
replicas of unequal shape are ordinary cases. Pure: communication and storage are elsewhere.
"""

from .communication import (
    ActivationTransfer,
    GradientReduction,
    boundary_transfers,
    gradient_reductions,
    microbatch_ranges,
    transfer_pairs,
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
    "transfer_pairs",
    "writers",
]
