"""State of an optimizer per parameter, and a check that it can be sharded by range.

Determined by trial on two small tensors, whole and in pieces: if the update of a piece is the piece
of the update, the optimizer is elementwise and any range can be on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from resihp.contracts import ContractError

Make = Callable[[ParamsT], torch.optim.Optimizer]
_STEPS = 3


@dataclass(frozen=True)
class OptimizerStateSpec:
    """State that an optimizer keeps for each parameter.

    moments  names of the tensors of the parameter's shape, which move with it
    scalars  names of the numbers that are equal for all parameters of a group
    rest     entries other than moments (scalars and None), with values to be replaced
    eager    True if all state exists before the first update
    writes_gradients
             True if an update leaves other gradients behind; options may differ in it
    """

    moments: tuple[str, ...]
    scalars: tuple[str, ...]
    rest: Mapping[str, object] = field(compare=False)
    eager: bool
    writes_gradients: bool = field(default=False, compare=False)

    def fill(
        self,
        state: dict[str, Any],
        tensor: torch.Tensor,
        device: torch.device,
        allot: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like,
    ) -> None:
        """Allocate the state of `tensor` in `state`; scalars are on `device`.

        `allot` gives zeros of a tensor's shape.
        """
        for name in self.moments:
            state[name] = allot(tensor)
        for name, value in self.rest.items():
            state[name] = value
            if isinstance(value, torch.Tensor):
                state[name] = value.clone().to(device)


def find_state_spec(name: str, make: Make) -> OptimizerStateSpec:
    """Return the state spec of the optimizers that `make` creates.

    Raises `ContractError` that says why the state of optimizer `name` cannot be cut by range.
    """
    matrix = _tried(name, make, (6, 4))
    vector = _tried(name, make, (6,))
    if matrix != vector:
        raise _refusal(name, "it keeps other state for vectors than for matrices")
    return replace(matrix, writes_gradients=matrix.writes_gradients or vector.writes_gradients)


def _tried(name: str, make: Make, shape: tuple[int, ...]) -> OptimizerStateSpec:
    whole, optimizer, eager, writes = _run(name, make, shape, cuts=None)
    form = replace(_form(name, optimizer.state[whole[0]], shape, eager), writes_gradients=writes)
    if set(optimizer.state) - set(whole):
        raise _refusal(name, "it keeps state that belongs to no parameter")
    for dim in range(len(shape)):
        pieces, cut, *_ = _run(name, make, shape, cuts=(dim, 1))
        joined = torch.cat([piece.detach() for piece in pieces], dim)
        kept = [torch.cat([cut.state[p][key] for p in pieces], dim) for key in form.moments]
        held = [optimizer.state[whole[0]][key] for key in form.moments]
        for ours, theirs in zip([joined, *kept], [whole[0].detach(), *held], strict=True):
            if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6):
                raise _refusal(name, f"elements along dimension {dim} depend on each other")
    return form


def _run(
    name: str, make: Make, shape: tuple[int, ...], cuts: tuple[int, int] | None
) -> tuple[Sequence[nn.Parameter], torch.optim.Optimizer, bool, bool]:
    """Run some updates of a tensor, whole or split at a row, with synthetic gradients.

    Returns also whether all state exists before the first one, and whether one writes gradients.
    """

    def pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
        if cuts is None:
            return [tensor.clone()]
        dim, row = cuts
        return [p.clone() for p in tensor.split([row, shape[dim] - row], dim)]

    numel = torch.Size(shape).numel()
    params = [
        nn.Parameter(p) for p in pieces(torch.linspace(0.3, 1.7, numel, device="cpu").view(shape))
    ]
    try:
        optimizer = make(params)
        options = [_numbers(group) for group in optimizer.param_groups]
        eager, writes = bool(optimizer.state.get(params[0])), False
        for step in range(_STEPS):
            grad = torch.linspace(-2.0, 3.0, numel, device="cpu").mul(step + 1.0).sin().view(shape)
            for param, part in zip(params, pieces(grad), strict=True):
                param.grad = part
            optimizer.step()
            left = [param.grad for param in params]
            writes |= not all(map(_is_same, left, pieces(grad)))
    except (TypeError, ValueError, RuntimeError, KeyError, AssertionError) as error:
        why = str(error).strip() or type(error).__name__
        raise _refusal(name, why.splitlines()[0]) from error
    if options != [_numbers(group) for group in optimizer.param_groups]:
        raise _refusal(name, "it keeps state in its parameter groups")
    return params, optimizer, eager, writes


def _form(
    name: str, state: dict[str, Any], shape: tuple[int, ...], eager: bool
) -> OptimizerStateSpec:
    moments, scalars = [], []
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
            moments.append(key)
        elif isinstance(value, int | float) or (
            isinstance(value, torch.Tensor) and value.numel() == 1
        ):
            scalars.append(key)
        elif value is not None:
            found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise _refusal(name, f"its {key!r} ({found}) has not the parameter's shape")
    if any(state[key].dtype != torch.float32 for key in moments):
        raise _refusal(name, "it is not kept in float32")
    rest = {key: value for key, value in state.items() if key not in moments}
    return OptimizerStateSpec(tuple(sorted(moments)), tuple(sorted(scalars)), rest, eager)


def _is_same(left: torch.Tensor | None, given: torch.Tensor) -> bool:
    return left is not None and torch.equal(left, given)


def _numbers(group: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in group.items() if isinstance(value, int | float)}


def _refusal(name: str, why: str) -> ContractError:
    return ContractError("optimizer", f"the state of {name} cannot be cut by range: {why}")
