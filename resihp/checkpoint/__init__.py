"""Checkpoints at every step: lazy, asynchronous, on several levels. Needs `resihp[checkpoint]`."""

from resihp.contracts import FaultRate, Protection

from .checkpointer import Checkpointer
from .counters import Counters, LevelCounters
from .levels import HostMemory, Level, LocalDisk, PeerMemory, SharedStorage
from .parts import ShardedTensorPiece
from .policy import Every, EveryStep, LeastLoss, Policy
from .ranks import Alone, Group, Ranks
from .restore import Restored
from .torch_api import LazyWriter

__all__ = [
    "Alone",
    "Checkpointer",
    "Counters",
    "Every",
    "EveryStep",
    "FaultRate",
    "Group",
    "HostMemory",
    "LazyWriter",
    "LeastLoss",
    "Level",
    "LevelCounters",
    "LocalDisk",
    "PeerMemory",
    "Policy",
    "Protection",
    "Ranks",
    "Restored",
    "ShardedTensorPiece",
    "SharedStorage",
]
