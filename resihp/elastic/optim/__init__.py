"""Optimizers whose state can be sharded by range, and learning-rate schedules."""

from .optimizer import Optimizer, no_decay_on_vectors
from .rates import constant, warmup, warmup_cosine

__all__ = [
    "Optimizer",
    "constant",
    "no_decay_on_vectors",
    "warmup",
    "warmup_cosine",
]
