"""Lazy, asynchronous checkpoints on several levels. Needs `resihp[checkpoint]`."""

from resihp.contracts import FaultRate, Protection

from .checkpointer import Checkpointer
from .counters import Counters, LevelCounters
from .dcp import LazyWriter
from .levels import HostMemory, Level, LocalDisk, NodeMemory, PeerMemory, SharedStorage
from .policy import Every, EveryStep, LeastLoss, SavePolicy, SaveTiming
from .providers import LazyObject, LazyTensor, StateProvider
from .ranks import IndependentRank, ProcessGroupRanks, Ranks
from .restore import Restored
from .state_dict import ShardedTensorPiece

__all__ = [
    "Checkpointer",
    "Counters",
    "Every",
    "EveryStep",
    "FaultRate",
    "HostMemory",
    "IndependentRank",
    "LazyObject",
    "LazyTensor",
    "LazyWriter",
    "LeastLoss",
    "Level",
    "LevelCounters",
    "LocalDisk",
    "NodeMemory",
    "PeerMemory",
    "ProcessGroupRanks",
    "Protection",
    "Ranks",
    "Restored",
    "SavePolicy",
    "SaveTiming",
    "ShardedTensorPiece",
    "SharedStorage",
    "StateProvider",
]
