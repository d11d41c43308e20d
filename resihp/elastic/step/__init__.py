"""Training step of one rank: pipeline passes, transfers, gradient sums, update."""

from .data import Cursor, DataSource, IteratorData
from .engine import Engine, ReducedStep
from .setup import Recorder, Setup

__all__ = ["Cursor", "DataSource", "Engine", "IteratorData", "Recorder", "ReducedStep", "Setup"]
