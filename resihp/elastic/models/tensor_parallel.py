"""Conjugate operators of tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3), and the
precision inside the region between them."""

from __future__ import annotations

from typing import Any, cast

import torch

from ..process_groups.abortable import AbortableProcessGroup


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: AbortableProcessGroup, in_place: bool
    ) -> torch.Tensor:
        ctx.group, ctx.in_place = group, in_place
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if not (ctx.in_place and grad.is_contiguous()):
            grad = grad.clone(memory_format=torch.contiguous_format)
        return ctx.group.all_reduce(grad), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: AbortableProcessGroup, in_place: bool
    ) -> torch.Tensor:
        if in_place:
            ctx.mark_dirty(tensor)  # whoever has saved it for its backward pass finds that out
        else:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return group.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


def copy_to_tp_region(
    tensor: torch.Tensor, group: AbortableProcessGroup, *, in_place: bool = False
) -> torch.Tensor:
    """Enter a sharded region (Megatron's f): identity forward, all-reduce of gradients backward.

    With `in_place` the sum overwrites the gradient: only for consumers that create a new gradient
    tensor, as a matrix product does and an addition does not.
    """
    if len(group) == 1:
        return tensor
    return cast(torch.Tensor, _Enter.apply(tensor, group, in_place))  # type: ignore[no-untyped-call]


def in_matmul_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in autocast's precision: several matrix products then share one copy.

    Behind `copy_to_tp_region`, so that ranks sum its gradient in the precision that it had.
    """
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def reduce_from_tp_region(
    tensor: torch.Tensor, group: AbortableProcessGroup, *, in_place: bool = False
) -> torch.Tensor:
    """Leave a sharded region (Megatron's g): all-reduce forward, identity backward.

    The sum is in float32 for any precision of the operators, as in a matrix product of a single
    rank. With `in_place` it overwrites `tensor`, which must not be used elsewhere.
    """
    if len(group) == 1:
        return tensor
    wide = tensor.float()
    is_own = (in_place or wide is not tensor) and wide.is_contiguous() and not wide._is_view()
    return cast(torch.Tensor, _Leave.apply(wide, group, is_own))  # type: ignore[no-untyped-call]
