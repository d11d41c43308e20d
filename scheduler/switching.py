"""Whether a change of plan pays: what it saves over a horizon against what the migration costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from resihp.contracts import Job, Layout, Plan

from .fleet import layout_bound
from .reasons import reasons
from .requota import Replicas

_LEAST_GAIN = 0.02  # of the step; less is within what the speeds are known to
_LEAST_GAIN_QUOTAS = 0.005  # where nothing but quotas changes, which costs nothing


def choose(
    job: Job, current: Plan, plan: Plan, speeds: Mapping[int, float], horizon_steps: int
) -> Plan | None:
    """`plan`, or other quotas for the current layout, or None; all current ranks are alive.

    Other quotas cost nothing, so they are taken for a small gain. A new layout must gain more than
    what the speeds are known to, beyond what quotas alone gain, and must earn back within
    `horizon_steps` what its moves cost.
    """
    replicas = Replicas(job, current.layout, plan.schedule, speeds)
    now_ms = replicas.step_ms(current.quotas)
    quotas = replicas.best_quotas(current.quotas)
    cheap_ms = replicas.step_ms(quotas)
    saved_ms = cheap_ms - plan.step_ms
    clear = plan.layout != current.layout and saved_ms > _LEAST_GAIN * cheap_ms
    if clear and saved_ms * horizon_steps > migration_ms(job, current.layout, plan.layout):
        return plan
    if now_ms - cheap_ms <= _LEAST_GAIN_QUOTAS * now_ms:
        return None
    bound_ms = layout_bound(job, current.layout, quotas, plan.schedule, speeds)
    told = reasons(job, current.layout, current.layout, quotas, speeds)
    return replace(
        plan,
        layout=current.layout,
        quotas=quotas,
        step_ms=cheap_ms,
        bound_ms=min(bound_ms, cheap_ms),
        reason=(*told, "a new layout would not pay for its moves"),
    )


def migration_ms(job: Job, old: Layout, new: Layout) -> float:
    """How long the state that must move takes over the links between nodes; 0 without a model.

    Parameters and optimizer state travel; each rank takes in its own, so that the one that takes
    in most decides.
    """
    taken = received_bytes(job, old, new)
    if not taken:
        return 0.0
    return job.links.latency_ms + max(taken.values()) / (job.links.inter_gbytes_per_s * 1e6)


def received_bytes(job: Job, old: Layout, new: Layout) -> dict[int, float]:
    """Bytes of parameters and optimizer state that each rank must receive; empty without a model.

    Every rank holds a range of layers times a range of each layer, and keeps what it has.
    """
    model = job.model
    if model is None:
        return {}
    each = job.memory.bytes_per_param / 2.0 + job.memory.optimizer_bytes_per_param
    before = dict(_holdings(old))
    received = {}
    for rank, held in _holdings(new):
        had = before.get(rank, _NOTHING)
        width, common = held.part[1] - held.part[0], _overlap(held.part, had.part)
        inner = (held.layers[1] - held.layers[0]) * width
        inner -= _overlap(held.layers, had.layers) * common
        ends = held.ends * width - min(held.ends, had.ends) * common
        if held.first != had.first and held.ends == had.ends:
            ends = held.ends * width  # from one end of the model to the other
        size = each * (inner * model.layer_params + ends * model.embedding_params)
        if size > 0.0:
            received[rank] = size
    return received


class _Held(NamedTuple):
    """Layers, the part of each, and of how many of embedding and head."""

    layers: tuple[int, int]
    part: tuple[float, float]
    ends: int = 0
    first: bool = False


_NOTHING = _Held((0, 0), (0.0, 0.0))


def _holdings(layout: Layout) -> Iterator[tuple[int, _Held]]:
    for replica in layout.replicas:
        for stage in replica.stages:
            first, last = stage.layers[0] == 0, stage.layers[1] == layout.layers
            units, edge = sum(stage.shares), 0
            for rank, share in zip(stage.ranks, stage.shares, strict=True):
                part = (edge / units, (edge + share) / units)
                yield rank, _Held(stage.layers, part, int(first) + int(last), first)
                edge += share


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
