"""Levels of storage: host memory, a peer's memory, node-local disk, shared storage."""

from .host_memory import HostMemory
from .level import CheckpointReader, Level
from .local_disk import LocalDisk
from .node_memory import NodeMemory
from .peer_memory import PeerMemory
from .shared_storage import SharedStorage

__all__ = [
    "CheckpointReader",
    "HostMemory",
    "Level",
    "LocalDisk",
    "NodeMemory",
    "PeerMemory",
    "SharedStorage",
]
