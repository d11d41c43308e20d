"""Elastic training on torch.distributed: a running job changes its layout without a restart.

`train` runs one of ResiHP's models; `Replicas` makes a user's own training loop fault tolerant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpointing.settings import Checkpoints
    from .ddp.init import init_replica_group
    from .ddp.replicas import Replicas
    from .models.base import Model, Packed
    from .models.gpt2 import Gpt2
    from .models.llama import Llama
    from .models.mixture import Mixture
    from .models.randomness import random_bits
    from .optim.optimizer import Optimizer, no_decay_on_vectors
    from .optim.rates import constant, warmup, warmup_cosine
    from .planning.sources import LocalPlans, NoPlans, PlanSource, ServicePlans
    from .rendezvous.environment import Environment
    from .rendezvous.membership import Rendezvous
    from .rendezvous.store import Timeouts
    from .reshard.buffers import ReshardBudget
    from .state.events import Callbacks, LayoutChange
    from .state.phases import Phase
    from .step.data import Cursor, DataSource, IteratorData
    from .step.engine import ReducedStep
    from .step.pacing import Pacer
    from .step.setup import Setup
    from .trainer import Trainer
    from .training import train

_HOMES = {
    "Callbacks": ".state.events",
    "Checkpoints": ".checkpointing.settings",
    "Cursor": ".step.data",
    "DataSource": ".step.data",
    "Environment": ".rendezvous.environment",
    "Gpt2": ".models.gpt2",
    "IteratorData": ".step.data",
    "LayoutChange": ".state.events",
    "Llama": ".models.llama",
    "LocalPlans": ".planning.sources",
    "Mixture": ".models.mixture",
    "Model": ".models.base",
    "NoPlans": ".planning.sources",
    "Optimizer": ".optim.optimizer",
    "Pacer": ".step.pacing",
    "Packed": ".models.base",
    "Phase": ".state.phases",
    "PlanSource": ".planning.sources",
    "ReducedStep": ".step.engine",
    "Rendezvous": ".rendezvous.membership",
    "Replicas": ".ddp.replicas",
    "ReshardBudget": ".reshard.buffers",
    "ServicePlans": ".planning.sources",
    "Setup": ".step.setup",
    "Timeouts": ".rendezvous.store",
    "Trainer": ".trainer",
    "constant": ".optim.rates",
    "init_replica_group": ".ddp.init",
    "no_decay_on_vectors": ".optim.optimizer",
    "random_bits": ".models.randomness",
    "train": ".training",
    "warmup": ".optim.rates",
    "warmup_cosine": ".optim.rates",
}

__all__ = [
    "Callbacks",
    "Checkpoints",
    "Cursor",
    "DataSource",
    "Environment",
    "Gpt2",
    "IteratorData",
    "LayoutChange",
    "Llama",
    "LocalPlans",
    "Mixture",
    "Model",
    "NoPlans",
    "Optimizer",
    "Pacer",
    "Packed",
    "Phase",
    "PlanSource",
    "ReducedStep",
    "Rendezvous",
    "Replicas",
    "ReshardBudget",
    "ServicePlans",
    "Setup",
    "Timeouts",
    "Trainer",
    "constant",
    "init_replica_group",
    "no_decay_on_vectors",
    "random_bits",
    "train",
    "warmup",
    "warmup_cosine",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use; importing one of them does not load the others."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
