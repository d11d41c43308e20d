"""The last thing done to whole gradients before the update."""

from __future__ import annotations

from .shard import Shard


def clip(shard: Shard, norm: float, max_norm: float) -> None:
    """Scale the gradients so that the norm of the whole gradient is at most `max_norm`."""
    if norm > max_norm:
        for tensor in shard.tensors.values():
            assert tensor.grad is not None
            tensor.grad.mul_(max_norm / norm)
