"""Where checkpoints go: host memory, a peer's memory, node-local disk, shared storage."""

from .contract import Level, Source
from .disk import LocalDisk
from .memory import HostMemory
from .peer import PeerMemory
from .shared import SharedStorage

__all__ = ["HostMemory", "Level", "LocalDisk", "PeerMemory", "SharedStorage", "Source"]
