"""What-if analysis: replays a recorded job with some of its operations at their ideal times."""

from .analysis import WhatIf
from .causes import Causes
from .effects import SlowDevice
from .operations import OpGrid, OpKind

__all__ = ["Causes", "OpGrid", "OpKind", "SlowDevice", "WhatIf"]
