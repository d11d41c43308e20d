"""Optimizers whose state can be cut by range, and learning rates as functions of the step."""

from .optimizer import Optimizer, no_decay_on_vectors
from .optimizer_state import OptimizerStateSpec
from .rates import Rate, constant, warmup, warmup_cosine

__all__ = [
    "Optimizer",
    "OptimizerStateSpec",
    "Rate",
    "constant",
    "no_decay_on_vectors",
    "warmup",
    "warmup_cosine",
]
