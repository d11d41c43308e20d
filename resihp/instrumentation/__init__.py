"""`resihp.instrument`: own time and waiting of training loops that are not changed for it."""

from ._instrument import InstrumentedMonitor, instrument

__all__ = ["InstrumentedMonitor", "instrument"]
