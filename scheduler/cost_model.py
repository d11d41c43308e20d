"""Cost model: times of a tensor-parallel group per layer, of collectives and of transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from resihp.contracts import Job, LayerCost

_TFLOPS = {"H200": 450.0, "H100": 420.0, "H800": 400.0, "A100": 170.0, "V100": 60.0, "CPU": 0.05}
_USUAL_TFLOPS = 100.0
_ACTIVATION_BYTES = 2  # bf16


@dataclass(frozen=True)
class GroupCost:
    """Times of one tensor-parallel group in milliseconds for one mean microbatch.

    A collective follows every layer, so a layer takes the time of the slowest rank, and a stage
    takes the sum of its layers.
    """

    forward_ms: float
    backward_ms: float
    embedding_ms: float
    head_ms: float

    def stage(self, layers: int, *, first: bool, last: bool) -> tuple[float, float]:
        """Forward and backward time of a stage with `layers` layers."""
        extra = first * self.embedding_ms + last * self.head_ms
        return layers * self.forward_ms + extra, layers * self.backward_ms + 2 * extra


def layer_cost(job: Job) -> LayerCost:
    """Measured cost of the job, else one derived from the model shape, else unit costs.

    Derived: 2 FLOPs per parameter and token, causal attention over one sequence of all tokens of
    the microbatch, a backward of twice the forward (Narayanan et al., 2021, appendix), at the rate
    commonly achieved by the named device type, or 100 TFLOPS. `recompute` adds a forward to every
    backward.
    """
    model = job.model
    if job.cost is not None:
        return job.cost
    if model is None:
        cost = LayerCost(forward_ms=1.0, backward_ms=2.0)
    else:
        tokens = job.tokens_per_microbatch or 4096
        flops_per_ms = (_tflops(job.device) or _USUAL_TFLOPS) * 1e9
        layer_ms = tokens * (2.0 * model.layer_params + 2.0 * tokens * model.hidden) / flops_per_ms
        head_ms = 2.0 * tokens * model.embedding_params / flops_per_ms
        cost = LayerCost(forward_ms=layer_ms, backward_ms=2.0 * layer_ms, head_ms=head_ms)
    if job.recompute:
        cost = replace(cost, backward_ms=cost.backward_ms + cost.forward_ms)
    return cost


def _tflops(device: str) -> float | None:
    """Rate of a named device type; None for another one."""
    return next((rate for name, rate in _TFLOPS.items() if name in device.upper()), None)


def assumed_cost(job: Job) -> str:
    """Sentence on what the milliseconds of a job without measured cost stand for where neither is
    the job's own; empty otherwise."""
    if job.cost is not None:
        return ""
    if job.model is None:
        return "One forward of a layer counts as 1 ms: the job has neither cost nor model."
    if job.device == "cpu":
        return "The device counts as a CPU: the job names none, or a CPU, and has no cost."
    if _tflops(job.device) is None:
        known = ", ".join(_TFLOPS)
        return (
            f"The device {job.device!r} counts as {_USUAL_TFLOPS:.0f} TFLOPS: its rate is not "
            f"known, as those of {known} are, and the job has no cost."
        )
    return ""


def group_cost(
    job: Job,
    cost: LayerCost,
    shares: Sequence[int],
    speeds: Sequence[float],
    ranks: Sequence[int] = (),
    slowdown: float = 1.0,
) -> GroupCost:
    """Times of a group whose ranks hold `shares` of every layer and run at `speeds` (all > 0).

    A rank with share q and speed p takes `(fixed + q * layer) / p`; every layer has two
    all-reduces in each direction over the links between `ranks`, of which the slowest has the
    factor `slowdown`.
    """
    units = sum(shares)
    pairs = [(share / units, speed) for share, speed in zip(shares, speeds, strict=True)]
    collective = all_reduce_ms(job, len(shares), spread=spans_nodes(job, ranks), slowdown=slowdown)
    widest = max(q / p for q, p in pairs)
    return GroupCost(
        forward_ms=max((cost.fixed_ms + q * cost.forward_ms) / p for q, p in pairs) + collective,
        backward_ms=max((cost.fixed_ms + q * cost.backward_ms) / p for q, p in pairs) + collective,
        embedding_ms=cost.embedding_ms * widest,
        head_ms=cost.head_ms * widest,
    )


def _activation_bytes(job: Job) -> float:
    if job.model is None or job.tokens_per_microbatch is None:
        return 0.0
    return float(job.tokens_per_microbatch * job.model.hidden * _ACTIVATION_BYTES)


def spans_nodes(job: Job, ranks: Sequence[int]) -> bool:
    """True if ranks are in different nodes; nodes hold consecutive ranks."""
    return len({rank // job.links.ranks_per_node for rank in ranks}) > 1


def all_reduce_ms(job: Job, ranks: int, *, spread: bool = False, slowdown: float = 1.0) -> float:
    """Time of two ring all-reduces of one microbatch's activation; 0 without a model.

    spread    the ranks of the group are in different nodes
    slowdown  factor of the slowest link between them
    """
    size = _activation_bytes(job)
    if ranks < 2 or not size:
        return 0.0
    inside = ranks <= job.links.ranks_per_node and not spread
    rate = job.links.intra_gbytes_per_s if inside else job.links.inter_gbytes_per_s
    once_ms = 2.0 * (ranks - 1) / ranks * size / (rate * 1e6) + job.links.latency_ms
    return 2.0 * once_ms * slowdown


def transfer_ms(job: Job, slowdown: float = 1.0) -> float:
    """Time of one activation transfer between stages across nodes, all ranks in parallel.

    `slowdown`: factor of the slowest link between the two stages.
    """
    size = _activation_bytes(job)
    if not size:
        return 0.0
    rate = job.links.inter_gbytes_per_s * 1e6 * job.layout.tp
    return (job.links.latency_ms + size / rate) * slowdown
