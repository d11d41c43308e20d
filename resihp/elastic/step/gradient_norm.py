"""Norm of the whole gradient, from the shards of all ranks, and clipping."""

from __future__ import annotations

import math

import torch

from resihp.layout import Parameters

from ..process_groups.layout_groups import LayoutGroups
from .gradient_accumulation import Gradients
from .shard import Shard


def squared_norms(
    gradients: Gradients, groups: LayoutGroups, parameters: Parameters
) -> torch.Tensor:
    """Return this rank's squared gradient norms, flat [parameters * degrees].

    Every parameter and TP index has an element of its own, which one rank of replica 0 fills: the
    sum over ranks only adds zeros, so the norm does not depend on how ranks are grouped.
    """
    degrees = max(stage.tp for stage in groups.layout.replicas[0].stages)
    squares = torch.zeros(len(parameters.all), degrees, dtype=torch.float64, device=groups.device)
    if groups.place.dp == 0:
        rows = {param: index for index, param in enumerate(parameters.all)}
        for param, gradient in gradients.items():
            is_tied_copy = groups.place.pp > 0 and param in parameters.first
            if not is_tied_copy and (param.dim is not None or groups.place.tp == 0):
                # Accumulated in float64 without a copy in float64.
                norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
                squares[rows[param], groups.place.tp] = norm.square()
    return squares.flatten()


def norm_of(squares: torch.Tensor) -> float:
    """Return the norm of the whole gradient, rounded once: the order of `squares` is irrelevant."""
    values = squares.tolist()
    return math.sqrt(math.fsum(values) if all(map(math.isfinite, values)) else sum(values))


def clip(shard: Shard, norm: float, max_norm: float) -> None:
    """Scale the shard's gradients so that the whole gradient's norm is at most `max_norm`."""
    if norm > max_norm:
        for tensor in shard.tensors.values():
            assert tensor.grad is not None
            tensor.grad.mul_(max_norm / norm)
