"""Whether a change of plan pays: what it saves over a horizon against what the migration costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from resihp.contracts import Job, Layout, Plan, Schedule
from resihp.layout import Param, Parameters, holdings

from .costs import layer_cost, transfer_ms
from .simulator import stage_times
from .spans import one_f_one_b_spans

_LEAST_GAIN = 0.02  # of the step; less is within what the speeds are known to
_LEAST_GAIN_QUOTAS = 0.005  # where nothing but quotas changes, which costs nothing


def is_worth_it(
    job: Job, current: Plan, plan: Plan, speeds: Mapping[int, float], horizon_steps: int
) -> bool:
    """Whether `plan` saves more over `horizon_steps` than it costs to get there.

    Nobody knows how long a device stays slow. A change whose cost is earned back within the
    horizon is never more than twice as dear as the best decision in hindsight (ski rental).
    """
    now_ms = present_ms(job, current, plan.schedule, speeds)
    saved_ms = now_ms - plan.step_ms
    if plan.layout == current.layout:
        return saved_ms > _LEAST_GAIN_QUOTAS * now_ms
    if saved_ms <= _LEAST_GAIN * now_ms:
        return False
    return saved_ms * horizon_steps > migration_ms(job, current.layout, plan.layout)


def present_ms(job: Job, plan: Plan, schedule: Schedule, speeds: Mapping[int, float]) -> float:
    """What a step of `plan` takes at these speeds; all of its ranks are alive."""
    rows: dict[int, dict[tuple[tuple[float, ...], tuple[float, ...], int], None]]
    rows = defaultdict(dict)
    for replica, quota in zip(plan.layout.replicas, plan.quotas, strict=True):
        forward, backward = stage_times(job, replica, speeds)
        rows[len(forward)][tuple(forward), tuple(backward), quota] = None
    spans = [
        one_f_one_b_spans(
            [forward for forward, _, _ in alike],
            [backward for _, backward, _ in alike],
            [quota for _, _, quota in alike],
            p2p=transfer_ms(job),
            max_in_flight=job.max_in_flight,
            schedule=schedule,
        ).max()
        for alike in rows.values()
    ]
    return float(max(spans)) + layer_cost(job).step_ms


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
