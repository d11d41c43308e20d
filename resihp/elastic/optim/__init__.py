"""Optimizers whose state can be cut by range, and learning rates as functions of the step."""

from .optimizer import Optimizer, no_decay_on_vectors
from .rates import Rate, constant, warmup, warmup_cosine
from .state_form import StateForm

__all__ = [
    "Optimizer",
    "Rate",
    "StateForm",
    "constant",
    "no_decay_on_vectors",
    "warmup",
    "warmup_cosine",
]
