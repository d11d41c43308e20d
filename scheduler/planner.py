"""A plan for the speed that is left: shares, layers and quotas together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resihp.contracts import InfeasibleError, Job, Layout, Plan, Replica, Stage

from .costs import transfer_ms
from .shares import shares_for
from .simulator import Speeds, simulate, speed_map, stage_times
from .spans import one_f_one_b_spans

_WORTH = 0.02


def make_plan(
    job: Job,
    speeds: Speeds,
    layout: Layout | None = None,
    *,
    version: int = 1,
    from_step: int = 0,
    time_limit_s: float | None = None,
) -> Plan:
    """The plan for devices of these speeds: 1.0 healthy (also where none is given), 0.0 dead.

    `layout` is the present one; default: the one the job started with. Raises `InfeasibleError`.
    """
    known = speed_map(speeds)
    current = layout or job.layout
    units = job.model.kv_heads if job.model else sum(current.replicas[0].stages[0].shares)
    replicas = [_fit(job, replica, known, units) for replica in current.replicas]
    whole = [replica for replica in replicas if replica is not None]
    if not whole:
        raise InfeasibleError("ranks", "every replica has a stage without a living rank")
    if job.microbatches < len(whole):
        raise InfeasibleError("microbatches", "fewer microbatches than replicas")
    quotas = _quotas(job, whole, known)
    planned = Layout(tuple(whole))
    step_ms = simulate(job, planned, quotas, known).step_ms
    slow = [f"rank {r} at speed {p:.2f}" for r, p in sorted(known.items()) if p != 1.0]
    return Plan(
        version=version,
        layout=planned,
        quotas=quotas,
        from_step=from_step,
        step_ms=step_ms,
        bound_ms=step_ms,
        reason=(f"fitted to {', '.join(slow)}" if slow else "all devices are healthy",),
    )


def replan(
    job: Job, current: Plan, speeds: Speeds, *, step: int, horizon_steps: int = 1000
) -> Plan | None:
    """A plan better than `current` under `speeds`; None where it is not worth the change."""
    known = speed_map(speeds)
    plan = make_plan(job, speeds, current.layout, version=current.version + 1, from_step=step + 1)
    if any(known.get(rank, 1.0) <= 0.0 for rank in current.layout.ranks):
        return plan
    now_ms = simulate(job, current.layout, current.quotas, known).step_ms
    return plan if plan.step_ms < (1.0 - _WORTH) * now_ms else None


def _fit(job: Job, replica: Replica, speeds: Mapping[int, float], units: int) -> Replica | None:
    """`replica` with shares by speed and the best layer ranges; None if a stage has died."""
    stages = []
    for stage in replica.stages:
        shares = shares_for([speeds.get(rank, 1.0) for rank in stage.ranks], units)
        held = [(rank, share) for rank, share in zip(stage.ranks, shares, strict=True) if share]
        if not held:
            return None
        stages.append(Stage(tuple(r for r, _ in held), stage.layers, tuple(q for _, q in held)))
    best = Replica(tuple(stages))
    span = _span(job, best, speeds)
    while True:
        options = [
            (_span(job, option, speeds), i, option) for i, option in enumerate(_neighbours(best))
        ]
        if not options or min(options)[0] >= span - 1e-9:
            return best
        span, _, best = min(options, key=lambda option: option[:2])


def _neighbours(replica: Replica) -> list[Replica]:
    """One layer moved from a stage to another."""
    counts = [stage.layers[1] - stage.layers[0] for stage in replica.stages]
    found = []
    for giver in range(len(counts)):
        for taker in range(len(counts)):
            if giver != taker and counts[giver] > 1:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                found.append(_with_layers(replica, moved))
    return found


def _with_layers(replica: Replica, counts: Sequence[int]) -> Replica:
    stages, start = [], 0
    for stage, count in zip(replica.stages, counts, strict=True):
        stages.append(Stage(stage.ranks, (start, start + count), stage.shares))
        start += count
    return Replica(tuple(stages))


def _span(
    job: Job, replica: Replica, speeds: Mapping[int, float], microbatches: int | None = None
) -> float:
    forward, backward = stage_times(job, replica, speeds)
    count = microbatches or max(1, job.microbatches // job.layout.dp)
    spans = one_f_one_b_spans(
        [forward], [backward], [count], p2p=transfer_ms(job), max_in_flight=job.max_in_flight
    )
    return float(spans[0])


def _quotas(job: Job, replicas: Sequence[Replica], speeds: Mapping[int, float]) -> tuple[int, ...]:
    """Each microbatch where the step ends first; every replica gets at least one."""
    quotas = [1] * len(replicas)
    for _ in range(job.microbatches - len(replicas)):
        ends = [
            (_span(job, r, speeds, q + 1), i)
            for i, (r, q) in enumerate(zip(replicas, quotas, strict=True))
        ]
        quotas[min(ends)[1]] += 1
    return tuple(quotas)
