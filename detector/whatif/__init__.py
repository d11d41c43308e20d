"""What-if analysis: a recorded job is replayed with parts of it as they ideally would have been."""

from .analysis import WhatIf
from .causes import Causes
from .dependencies import Dependencies, dependencies
from .ops import Kind, OpTable, Recording
from .slow import SlowDevice
from .waiting import transfer_seconds

__all__ = [
    "Causes",
    "Dependencies",
    "Kind",
    "OpTable",
    "Recording",
    "SlowDevice",
    "WhatIf",
    "dependencies",
    "transfer_seconds",
]
