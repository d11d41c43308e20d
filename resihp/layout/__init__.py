"""Pure algebra of layouts: who holds which range of which parameter, and what must move.

A tensor-parallel shard is a half-open range along one dimension, never "the i-th equal chunk", so
shards of any width, and layouts whose replicas differ in shape, are ordinary cases. Communication
and storage live elsewhere; everything here is data in, data out.
"""

from .boundaries import Transfer, boundary, replica_of
from .moves import Move, holdings, least_numel, moves, writers
from .parameters import Param, Parameters, Range, split
from .sums import Reduction, reductions

__all__ = [
    "Move",
    "Param",
    "Parameters",
    "Range",
    "Reduction",
    "Transfer",
    "boundary",
    "holdings",
    "least_numel",
    "moves",
    "reductions",
    "replica_of",
    "split",
    "writers",
]
