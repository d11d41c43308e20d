"""What-if analysis: replays a recorded job with some of its operations at their ideal times."""

from .analysis import WhatIf
from .causes import Causes
from .dependencies import Dependencies, dependencies, transfer_seconds
from .known_slow import SlowDevice
from .recording import OpKind, OpTable, Recording

__all__ = [
    "Causes",
    "Dependencies",
    "OpKind",
    "OpTable",
    "Recording",
    "SlowDevice",
    "WhatIf",
    "dependencies",
    "transfer_seconds",
]
