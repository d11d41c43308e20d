"""Parallel groups of a module or of the stages of a pipeline, as this rank sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from resihp.layout.rank_groups import RankDescription


def own_rank() -> int | None:
    """Return the rank in the default process group; None without one."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return None


def describe_module(modules: Sequence[torch.nn.Module], rank: int) -> RankDescription:
    """Return the coordinates of a rank whose replica has no pipeline."""
    return RankDescription(rank, tensor_group(modules, rank))


def describe_stages(stages: Sequence[Any], rank: int) -> RankDescription:
    """Return the coordinates of a rank that holds stages of a pipeline."""
    modules = [stage.submod for stage in stages if isinstance(stage.submod, torch.nn.Module)]
    group = getattr(stages[0], "group", None)
    ranks = torch.distributed.get_process_group_ranks(group)
    return RankDescription(
        rank,
        tensor_group(modules, rank),
        tuple(ranks),
        int(stages[0].num_stages),
        len(stages),
    )


def tensor_group(modules: Iterable[torch.nn.Module], rank: int) -> tuple[int, ...]:
    """Return the ranks that hold parts of one layer together: those along the dimensions of the
    parameters' device mesh that are neither FSDP's nor only replicated."""
    for module in modules:
        sharded = _fsdp_groups(module)
        for parameter in module.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is None:
                continue
            for at, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
                members = tuple(torch.distributed.get_process_group_ranks(mesh.get_group(at)))
                if not placement.is_replicate() and len(members) > 1 and members not in sharded:
                    return members
    return (rank,)


def has_compiled_parts(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether a module, or one in it, was compiled by `torch.compile`, in whatever way."""
    return any(
        hasattr(part, "_orig_mod")
        or getattr(part, "_compiled_call_impl", None) is not None
        or hasattr(getattr(part, "forward", None), "_torchdynamo_orig_callable")
        for module in modules
        for part in module.modules()
    )


def _fsdp_groups(module: torch.nn.Module) -> set[tuple[int, ...]]:
    """Ranks of the groups over which FSDP2 shards or replicates the parameters of `module`."""
    groups: set[tuple[int, ...]] = set()
    for part in module.modules():
        get_state = getattr(part, "_get_fsdp_state", None)
        state = None if get_state is None else get_state()
        held = getattr(state, "_fsdp_param_groups", None) or [
            getattr(state, "_fsdp_param_group", None)
        ]
        for group in held:
            mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
            if mesh is not None:
                for at in range(mesh.ndim):
                    groups.add(tuple(torch.distributed.get_process_group_ranks(mesh.get_group(at))))
    return groups
