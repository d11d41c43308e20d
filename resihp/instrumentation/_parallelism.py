"""Parallel groups of a module or of the stages of a pipeline, as this rank sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from resihp.layout.rank_groups import RankDescription


def own_rank() -> int | None:
    """Return the rank in the default process group; None without one."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return None


def describe_module(modules: Sequence[torch.nn.Module], rank: int) -> RankDescription:
    """Return the coordinates of a rank whose replica has no pipeline."""
    return RankDescription(rank, tensor_group(modules, rank), members=job_members(modules))


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


def job_members(modules: Sequence[torch.nn.Module]) -> tuple[int, ...] | None:
    """Return the ranks that train modules outside of pipelines; () for all that there are, None
    where their groups do not tell.

    They are those of DDP's group if there is no other, or of the mesh that holds all others, those
    of FSDP2 among them. A tensor-parallel group alone may be one of many, and DDP's beside a mesh,
    or a part of a larger mesh, the replicas of one share.
    """
    replicas = {group for module in modules for group in _ddp_groups(module)}
    sharding = [mesh for module in modules for mesh in _fsdp_meshes(module)]
    placed = [getattr(each, "device_mesh", None) for one in modules for each in one.parameters()]
    by_id = {id(mesh): mesh for mesh in (*sharding, *placed) if mesh is not None}
    groups = replicas | {_ranks_of(mesh) for mesh in by_id.values()}
    if not groups or _world() in groups:
        return ()
    largest = max(groups, key=len)
    within = [*groups, *map(_ranks_of_root, by_id.values())]
    is_told = len(groups) == 1 if replicas else bool(sharding)
    return tuple(sorted(largest)) if is_told and all(one <= largest for one in within) else None


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
    return {
        tuple(torch.distributed.get_process_group_ranks(mesh.get_group(at)))
        for mesh in _fsdp_meshes(module)
        for at in range(mesh.ndim)
    }


def _fsdp_meshes(module: torch.nn.Module) -> Iterator[Any]:
    for part in module.modules():
        get_state = getattr(part, "_get_fsdp_state", None)
        state = None if get_state is None else get_state()
        held = getattr(state, "_fsdp_param_groups", None) or [
            getattr(state, "_fsdp_param_group", None)
        ]
        for group in held:
            mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
            if mesh is not None:
                yield mesh


def _ddp_groups(module: torch.nn.Module) -> Iterator[frozenset[int]]:
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            yield frozenset(torch.distributed.get_process_group_ranks(part.process_group))


def _world() -> frozenset[int]:
    return frozenset(range(torch.distributed.get_world_size()))


def _ranks_of(mesh: Any) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def _ranks_of_root(mesh: Any) -> frozenset[int]:
    """Ranks of the mesh that `mesh` is a part of; all ranks where this torch does not tell."""
    get_root = getattr(mesh, "_get_root_mesh", None)
    return _world() if get_root is None else _ranks_of(get_root())
