"""Whether a change of plan pays: what it saves over a horizon against what the migration costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from resihp.contracts import Job, Layout, Plan
from resihp.layout import Param, Parameters, holdings

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
    clear = plan.layout != current.layout and saved_ms > _LEAST_GAIN * now_ms
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
    """Bytes of parameters and optimizer state that each rank must receive."""
    model = job.model
    if model is None:
        return {}
    units = model.kv_heads
    layer = Param("layer", (units, model.layer_params // units), 0)
    end = Param("embedding", (units, model.embedding_params // units), 0)
    layers = tuple((Param(f"layers.{i}", layer.shape, 0),) for i in range(model.layers))
    parameters = Parameters(layers, (end,), (Param("head", end.shape, 0),))
    each = job.memory.bytes_per_param / 2.0 + job.memory.optimizer_bytes_per_param
    before = holdings(old, parameters)
    received: dict[int, float] = defaultdict(float)
    for rank, held in holdings(new, parameters).items():
        own = before.get(rank, {})
        for param, (start, stop) in held.items():
            a, b = own.get(param, (0, 0))
            kept = max(0, min(stop, b) - max(start, a))
            received[rank] += (stop - start - kept) * param.row_numel * each
    return {rank: size for rank, size in received.items() if size}
