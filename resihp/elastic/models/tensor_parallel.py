"""The two conjugate operators of tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

from typing import Any, cast

import torch

from ..worlds.comm import Group


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        return group.all_reduce(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def enter_parallel(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Into a sharded region: identity forward, sum of the gradients over the group backward."""
    if len(group) == 1:
        return tensor
    return cast(torch.Tensor, _Enter.apply(tensor, group))  # type: ignore[no-untyped-call]


def leave_parallel(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Out of a sharded region: sum over the group forward, identity backward.

    Summed in float32 whatever the precision of the operators, as a single rank's matrix product
    would be.
    """
    if len(group) == 1:
        return tensor
    return cast(torch.Tensor, _Leave.apply(tensor.float(), group))  # type: ignore[no-untyped-call]
