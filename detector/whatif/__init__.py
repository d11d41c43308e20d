"""What-if analysis: replays a recorded job with some of its operations at their ideal times."""

from .analysis import WhatIf
from .causes import Causes
from .operations import OpGrid, OpKind
from .places import SlowDevice

__all__ = ["Causes", "OpGrid", "OpKind", "SlowDevice", "WhatIf"]
