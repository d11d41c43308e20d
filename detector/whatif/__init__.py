"""What-if analysis: replays a recorded job with some of its operations at their ideal times."""

from .analysis import WhatIf
from .causes import Causes
from .dependencies import Dependencies, dependencies, transfer_seconds
from .known_slow import SlowDevice
from .operations import OpGrid, OpKind, OpTable

__all__ = [
    "Causes",
    "Dependencies",
    "OpGrid",
    "OpKind",
    "OpTable",
    "SlowDevice",
    "WhatIf",
    "dependencies",
    "transfer_seconds",
]
