"""Gradients of one step: summed over replicas whose shards may differ, then clipped."""

from __future__ import annotations

import torch
import torch.distributed as dist

from resihp.layout import Reduction

from ..worlds.comm import Group
from ..worlds.world import World
from .shard import Shard, rows


def sum_over_replicas(shard: Shard, world: World) -> None:
    """Sum every gradient over the replicas, in place. Collective over the world.

    All sums are started before any is awaited, in the order of the world, so that ranks which
    share several sums never wait for each other in a circle.
    """
    for tensor in shard.tensors.values():
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
    started = [_start(shard, reduction, group) for reduction, group in world.sums]
    for group, work, flat, views in started:
        group.complete(work)
        for view, part in zip(views, flat.split([v.numel() for v in views]), strict=True):
            view.copy_(part.view_as(view))
    if world.layout.dp > 1 and len(world.tp) > 1:
        _share_unsplit(shard, world)


def squared_norm(shard: Shard, world: World) -> torch.Tensor:
    """This rank's part of the squared norm of the whole gradient; each element counts once."""
    total = torch.zeros((), dtype=torch.float64)
    if world.place.dp == 0:
        for param, tensor in shard.tensors.items():
            if param.dim is not None or world.place.tp == 0:
                assert tensor.grad is not None
                total += tensor.grad.double().square().sum()
    return total


def clip(shard: Shard, norm: float, max_norm: float) -> None:
    """Scale the gradients so that the norm of the whole gradient is at most `max_norm`."""
    if norm > max_norm:
        for tensor in shard.tensors.values():
            assert tensor.grad is not None
            tensor.grad.mul_(max_norm / norm)


Started = tuple[Group, dist.Work, torch.Tensor, list[torch.Tensor]]


def _start(shard: Shard, reduction: Reduction, group: Group) -> Started:
    views = []
    for param, span in reduction.pieces:
        grad = shard.tensors[param].grad
        assert grad is not None
        views.append(rows(grad, param, span, origin=shard.ranges[param][0]))
    flat = torch.cat([view.reshape(-1) for view in views])
    return group, group.start_all_reduce(flat), flat, views


def _share_unsplit(shard: Shard, world: World) -> None:
    """Take the sums of unsplit parameters from the stage's first rank, to the last bit."""
    grads = [t.grad for param, t in shard.tensors.items() if param.dim is None]
    present = [grad for grad in grads if grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in present])
    world.tp.broadcast(flat, world.stage.ranks[0])
    for grad, part in zip(present, flat.split([g.numel() for g in present]), strict=True):
        grad.copy_(part.view_as(grad))
