"""Checkpoints of an elastic job: saved during training, restored when state is lost."""

from .settings import Checkpoints

__all__ = ["Checkpoints"]
