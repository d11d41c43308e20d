"""One rank's part of a training step: passes, exchanges, gradient sums, update."""

from .engine import DataSource, Engine, Recorder, Reduced, Setup

__all__ = ["DataSource", "Engine", "Recorder", "Reduced", "Setup"]
