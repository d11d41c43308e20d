"""Elastic training on torch.distributed: a running job changes its layout without a restart.

`train` runs one of ResiHP's models; `Replicas` makes a user's own training loop fault tolerant;
`Quotas` gives the slow ranks of a plain DDP loop fewer microbatches.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpointing.settings import Checkpoints as Checkpoints
    from .ddp.init import init_replica_group as init_replica_group
    from .ddp.quotas import Quotas as Quotas
    from .ddp.replicas import Replicas as Replicas
    from .microbatches.balancing import microbatch_flops as microbatch_flops
    from .models.base import Model as Model
    from .models.base import Packed as Packed
    from .models.gpt2 import Gpt2 as Gpt2
    from .models.llama import Llama as Llama
    from .models.mixture import Mixture as Mixture
    from .models.pretrained.folder import from_pretrained as from_pretrained
    from .models.pretrained.folder import save_pretrained as save_pretrained
    from .models.pretrained.presets import preset as preset
    from .models.randomness import random_bits as random_bits
    from .optim.optimizer import Optimizer as Optimizer
    from .optim.optimizer import no_decay_on_vectors as no_decay_on_vectors
    from .optim.rates import constant as constant
    from .optim.rates import warmup as warmup
    from .optim.rates import warmup_cosine as warmup_cosine
    from .planning.sources import LocalPlans as LocalPlans
    from .planning.sources import NoPlans as NoPlans
    from .planning.sources import PlanSource as PlanSource
    from .planning.sources import ServicePlans as ServicePlans
    from .rendezvous.environment import Environment as Environment
    from .rendezvous.membership import Rendezvous as Rendezvous
    from .rendezvous.store import Timeouts as Timeouts
    from .reshard.buffers import ReshardBudget as ReshardBudget
    from .state.events import Callbacks as Callbacks
    from .state.events import LayoutChange as LayoutChange
    from .state.phases import Phase as Phase
    from .step.data import Cursor as Cursor
    from .step.data import DataSource as DataSource
    from .step.data import IteratorData as IteratorData
    from .step.engine import ReducedStep as ReducedStep
    from .step.memory import measure_memory as measure_memory
    from .step.pacing import Pacer as Pacer
    from .step.setup import Setup as Setup
    from .trainer import Trainer as Trainer
    from .training import train as train

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
    "Quotas": ".ddp.quotas",
    "ReducedStep": ".step.engine",
    "Rendezvous": ".rendezvous.membership",
    "Replicas": ".ddp.replicas",
    "ReshardBudget": ".reshard.buffers",
    "ServicePlans": ".planning.sources",
    "Setup": ".step.setup",
    "Timeouts": ".rendezvous.store",
    "Trainer": ".trainer",
    "constant": ".optim.rates",
    "from_pretrained": ".models.pretrained.folder",
    "init_replica_group": ".ddp.init",
    "measure_memory": ".step.memory",
    "microbatch_flops": ".microbatches.balancing",
    "no_decay_on_vectors": ".optim.optimizer",
    "preset": ".models.pretrained.presets",
    "random_bits": ".models.randomness",
    "save_pretrained": ".models.pretrained.folder",
    "train": ".training",
    "warmup": ".optim.rates",
    "warmup_cosine": ".optim.rates",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Load a public name on first use; importing one of them does not load the others."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
