"""Groups of parameters that FSDP2 has made of a model; torch has no public access to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


class GatheredModels:
    """Models of FSDP2 that are gathered from a step's first microbatch on to its last."""

    def __init__(self) -> None:
        self._before: dict[nn.Module, list[tuple[Any, Any]]] = {}

    @contextmanager
    def passes(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Enclose the passes of a microbatch; behind the last one the model is set as before.

        Its forward passes reshard then, if they did: a model that an evaluation has left gathered
        would not see the next update.
        """
        assert isinstance(model, FSDPModule)
        if model not in self._before:
            groups = parameter_groups(model)
            self._before[model] = [(group, group.post_forward_mesh_info) for group in groups]
        model.set_reshard_after_forward(False)
        _end_with_reduction(model, is_last)
        try:
            yield
        except BaseException:
            self._restore(model)
            raise
        if is_last:
            self._restore(model)
            del self._before[model]

    def leave(self) -> None:
        """Reshard the models of a step that is left before its end, and drop its gradients."""
        while self._before:
            model = next(iter(self._before))
            self._restore(model)
            for group, _ in self._before.pop(model):
                for one in group.fsdp_params:
                    if "unsharded_accumulated_grad" in vars(one):  # not so from torch 2.15 on
                        one.unsharded_accumulated_grad = None
                    if hasattr(one, "_unsharded_param"):  # it was gathered
                        one._unsharded_param.grad = None
            reshard(model)

    def _restore(self, model: nn.Module) -> None:
        for group, mesh in self._before[model]:
            group.post_forward_mesh_info = mesh
        _end_with_reduction(model, True)


def _end_with_reduction(model: nn.Module, is_reduced: bool) -> None:
    """Set whether backward reduces gradients at its end, and reshards."""
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(is_reduced)
    model.set_requires_gradient_sync(is_reduced)


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
