"""Checks of models and optimizers that would make replicas diverge or deadlock."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from resihp.contracts import ContractError

from ..rendezvous.joiners import describe_model
from .step import ReplicaCoordinates


def check_model(model: nn.Module, coordinates: ReplicaCoordinates) -> None:
    """Check a model. Raises `ContractError` that says what to change."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ContractError("model", "none of its parameters is trained")
    check_norms(norms_of(model))
    for name, module in model.named_modules():
        _check_module(f"model.{name}" if name else "model", module, coordinates)
    for name, parameter in model.named_parameters():
        _check_parameter(f"model.{name}", parameter, coordinates)


def norms_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with running statistics: BatchNorm, InstanceNorm and spectral norms."""
    return {
        f"model.{name}" if name else "model": module
        for name, module in model.named_modules()
        if (isinstance(module, _NormBase) and module.track_running_stats) or _is_spectral(module)
    }


def check_norms(norms: Mapping[str, nn.Module]) -> None:
    """Raise `ContractError` if running statistics are updated, which `train()` may begin."""
    for name, module in norms.items():
        if module.training and _is_spectral(module):
            raise ContractError(
                name,
                "spectral_norm iterates in each forward pass, of which replicas have different "
                "numbers: use torch.nn.utils.parametrizations.orthogonal or weight_norm, or "
                "freeze it with eval()",
            )
        if module.training:
            raise ContractError(
                name,
                "its running statistics depend on which microbatches a replica computes: use "
                "LayerNorm or GroupNorm, or track_running_stats=False, or freeze it with eval()",
            )


def _is_spectral(module: nn.Module) -> bool:
    """Return whether it normalizes by a vector that it iterates in each forward pass."""
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(h, SpectralNorm) for h in hooks)


def check_optimizers(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise `ContractError` if an optimizer updates parameters that are not the model's."""
    known = set(map(id, model.parameters()))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if not known.issuperset(map(id, group["params"])):
                raise ContractError(
                    "optimizer",
                    "it updates parameters that are not the model's: put all of them into one "
                    "module, and make the optimizer behind fully_shard",
                )


def describe(model: nn.Module, **settings: object) -> str:
    """Describe what must be alike in all replicas from the start on."""
    parameters = dict(model.named_parameters())
    told = describe_model((f"{name} {one.dtype}", one.shape) for name, one in parameters.items())
    dtypes = ", ".join(sorted({str(one.dtype) for one in parameters.values()}))
    given = ", ".join(f"{name}={value}" for name, value in settings.items())
    return f"{told} of {dtypes} with {given}"


def fingerprint(optimizers: Iterable[torch.optim.Optimizer]) -> float:
    """Return a number that is equal on ranks whose optimizers have equal settings."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    plain = [
        (name, _numbers(value))
        for group in groups
        for name, value in sorted(group.items())
        if name != "params"
    ]
    return float(zlib.crc32(repr(plain).encode()))


def _numbers(value: object) -> object:
    """Return a setting's numbers, such as a pair of betas, as floats; None for what is none."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    return float(value) if isinstance(value, int | float) else None


def _check_module(name: str, module: nn.Module, coordinates: ReplicaCoordinates) -> None:
    if isinstance(module, FullyShardedDataParallel):
        raise ContractError(name, "FSDP1 keeps its gradients to itself: use fully_shard (FSDP2)")
    if isinstance(module, DistributedDataParallel):
        size = module.process_group.size()
        if size > coordinates.members:
            raise ContractError(name, _across(f"DDP over {size} processes", coordinates))
        if module.gradient_as_bucket_view:
            raise ContractError(
                name,
                "its gradients are views of DDP's buckets, which the next microbatch overwrites: "
                "leave gradient_as_bucket_view=False",
            )
        module.register_forward_pre_hook(_refuse_no_sync)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        raise ContractError(name, "sparse gradients cannot be summed here: use sparse=False")


def _check_parameter(name: str, parameter: nn.Parameter, coordinates: ReplicaCoordinates) -> None:
    if (
        isinstance(parameter, DTensor)
        and (size := parameter.device_mesh.size()) > coordinates.members
    ):
        raise ContractError(name, _across(f"its mesh has {size} processes", coordinates))
    if parameter.requires_grad and getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ContractError(
            name, "a hook acts on its gradient before that is summed over the replicas"
        )


def _across(what: str, coordinates: ReplicaCoordinates) -> str:
    return (
        f"{what}, but a replica has {coordinates.members}: groups of torch stay within a replica. "
        "Make one group or mesh per replica"
    )


def _refuse_no_sync(module: nn.Module, _: Any) -> None:
    assert isinstance(module, DistributedDataParallel)
    if torch.is_grad_enabled() and not module.require_backward_grad_sync:
        raise ContractError(
            "no_sync", "each microbatch's gradients must be whole: a loss may come behind it"
        )
