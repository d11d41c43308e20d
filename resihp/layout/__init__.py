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
from .moves import Move, least_numel, moves, writers
from .parameters import Param, Parameters, Range, split
from .shards import (
    Blocks,
    StateBlock,
    StateCopies,
    StateRange,
    StateRanges,
    by_param,
    containing,
    holdings,
    ranges_of,
    state_blocks,
    state_ranges,
)

__all__ = [
    "ActivationTransfer",
    "Blocks",
    "GradientReduction",
    "Move",
    "Param",
    "Parameters",
    "Range",
    "StateBlock",
    "StateCopies",
    "StateRange",
    "StateRanges",
    "boundary_transfers",
    "by_param",
    "containing",
    "gradient_reductions",
    "holdings",
    "least_numel",
    "microbatch_ranges",
    "moves",
    "ranges_of",
    "split",
    "state_blocks",
    "state_ranges",
    "transfer_pairs",
    "writers",
]
