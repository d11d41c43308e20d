"""What all ranks tell each other of a step: which microbatches it holds, losses, norms."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from resihp.contracts import Layout, MiscountError
from resihp.layout import Parameters

from ..microbatches.ledger import GradientHolding, Spans, indices
from ..process_groups.layout_groups import LayoutGroups
from .gradient_accumulation import Gradients
from .shard import Shard


def account(
    finished: Spans, losses: Mapping[int, float], groups: LayoutGroups, microbatches: int
) -> torch.Tensor:
    """This rank's line of the step's account [2, microbatches], to be summed over all ranks.

    First row: its part of each microbatch's loss, on one rank of the last stage. Second row: one
    replica's ranks together count one for each microbatch that all of them have finished.
    """
    line = torch.zeros(2, microbatches, dtype=torch.float64)
    replica = groups.layout.replicas[groups.place.dp]
    for index in indices(finished):
        line[1, index] = 1.0 / len(replica.ranks)
    if groups.after is None and groups.place.tp == 0:
        for index, loss in losses.items():
            line[0, index] = loss
    return line


def losses_of(summed: torch.Tensor) -> dict[int, float]:
    """Each microbatch's loss from the summed account. Raises `MiscountError`."""
    counts = summed[1]
    wrong = (counts - 1.0).abs() > 1e-6
    if bool(wrong.any()):
        told = {int(i): round(float(counts[i]), 3) for i in wrong.nonzero().flatten()[:6]}
        raise MiscountError(f"microbatches do not count once: {told}")
    return dict(enumerate(summed[0].tolist()))


def holding(
    groups: LayoutGroups, generation: int, finished: Spans, *, summed: bool = False
) -> GradientHolding:
    """What gradients of `finished` microbatches stand for on this rank of `generation`."""
    dp = groups.place.dp
    return GradientHolding(generation, dp, len(groups.layout.replicas[dp].ranks), finished, summed)


def squared_norms(
    gradients: Gradients, groups: LayoutGroups, parameters: Parameters
) -> torch.Tensor:
    """This rank's squared gradient norms [parameters * degrees]; each element counts on one rank.

    One place for each parameter and shard, so that the sum over ranks adds nothing but zeros to
    any of them: the norm of the whole does not depend on how ranks are grouped.
    """
    degrees = _degrees(groups.layout)
    squares = torch.zeros(len(parameters.all), degrees, dtype=torch.float64)
    if groups.place.dp == 0:
        places = {param: index for index, param in enumerate(parameters.all)}
        for param, gradient in gradients.items():
            is_second_copy = groups.place.pp > 0 and param in parameters.first  # it is tied
            if not is_second_copy and (param.dim is not None or groups.place.tp == 0):
                # Added up in float64 without a copy in float64.
                norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
                squares[places[param], groups.place.tp] = norm.square()
    return squares.flatten()


def norm_of(squares: torch.Tensor) -> float:
    """The norm of the whole gradient; exactly rounded, so in whatever order it is added up."""
    values = squares.tolist()
    return math.sqrt(math.fsum(values) if all(map(math.isfinite, values)) else sum(values))


def _degrees(layout: Layout) -> int:
    return max(stage.tp for stage in layout.replicas[0].stages)


def clip(shard: Shard, norm: float, max_norm: float) -> None:
    """Scale the gradients so that the norm of the whole gradient is at most `max_norm`."""
    if norm > max_norm:
        for tensor in shard.tensors.values():
            assert tensor.grad is not None
            tensor.grad.mul_(max_norm / norm)
