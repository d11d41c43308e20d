"""Groups of parameters that FSDP2 has made of a model; torch has no public access to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def parameter_groups(model: nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP2 gathers together.

    In older versions of torch a module has one at most.
    """
    for module in _sharded_modules(model):
        state = module._get_fsdp_state()
        one = getattr(state, "_fsdp_param_group", None)
        yield from getattr(state, "_fsdp_param_groups", [one] if one is not None else [])


def sharded_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that FSDP2 shards: all of its modules but those it was told to ignore.

    Call it while none is gathered.
    """
    return {one.sharded_param for group in parameter_groups(model) for one in group.fsdp_params}


def reshard(model: nn.Module) -> None:
    """Reshard what FSDP2 has left gathered, as the root behind an evaluation; no collective.

    Until then a module shows other parameters than those that are trained.
    """
    for module in _sharded_modules(model):
        module.reshard()


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
