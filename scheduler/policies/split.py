"""The scheduler's own plan with a split backward (ZB-H1) in place of 1F1B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from resihp.contracts import Job, Layout, Replica, Schedule
from resihp.pipeline.orders import stage_order
from resihp.pipeline.replay import pass_durations, replay

from ..costs import layer_cost, transfer_ms
from ..simulator import stage_times
from .base import Outcome, Speeds, layers_by_rate, with_layers

Span = Callable[[int, int], float]


def split_backward(job: Job, planned: Outcome, speeds: Speeds) -> Outcome:
    """`planned` with layers and quotas for a split backward, where these are better.

    Filling and draining matter less, so that layers follow the slowest stage alone; quotas go on
    from the planned ones and from even ones by exchange.
    """
    assert planned.layout is not None
    own: Sequence[Replica] = planned.layout.replicas
    levelled: Sequence[Replica] = [_levelled(job, replica, speeds) for replica in own]
    even = _even(job.microbatches, len(own))
    best: tuple[float, Sequence[Replica], tuple[int, ...]] | None = None
    for replicas in (own, levelled):
        span = _spans(job, replicas, speeds)
        for quotas in (planned.quotas, even):
            end, found = _exchanged(span, quotas)
            if best is None or end < best[0]:
                best = end, replicas, found
    assert best is not None
    end, replicas, quotas = best
    step_ms = end + layer_cost(job).step_ms
    return replace(planned, step_ms=step_ms, layout=Layout(tuple(replicas)), quotas=quotas)


def _levelled(job: Job, replica: Replica, speeds: Speeds) -> Replica:
    forward, backward = stage_times(job, replica, speeds)
    rates = [
        (s.layers[1] - s.layers[0]) / (f + b)
        for s, f, b in zip(replica.stages, forward, backward, strict=True)
    ]
    return with_layers(replica.stages, layers_by_rate(rates, job.layout.layers))


def _even(total: int, parts: int) -> tuple[int, ...]:
    return tuple(total // parts + (index < total % parts) for index in range(parts))


def _spans(job: Job, replicas: Sequence[Replica], speeds: Speeds) -> Span:
    """Span of a replica with a number of microbatches."""
    times = [stage_times(job, replica, speeds) for replica in replicas]
    keys = [(tuple(forward), tuple(backward)) for forward, backward in times]

    @cache
    def span(forward: tuple[float, ...], backward: tuple[float, ...], quota: int) -> float:
        stages = len(forward)
        orders = [
            stage_order(Schedule.ZERO_BUBBLE, stage=s, stages=stages, microbatches=quota)
            for s in range(stages)
        ]
        durations = pass_durations(orders, [[f] for f in forward], [[b] for b in backward])
        return replay(orders, durations, p2p=transfer_ms(job)).span

    return lambda index, quota: span(*keys[index], quota)


def _exchanged(span: Span, quotas: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """Moves single microbatches from the last replica to end as long as that helps."""
    held = list(quotas)
    for _ in range(sum(held)):
        ends = [span(index, quota) for index, quota in enumerate(held)]
        worst = max(range(len(held)), key=lambda i: ends[i])
        later = {i: span(i, held[i] + 1) for i in range(len(held)) if i != worst}
        taker = min(later, key=lambda i: later[i], default=worst)
        if held[worst] <= 1 or not later or later[taker] >= ends[worst] * (1 - 1e-9):
            break
        held[worst] -= 1
        held[taker] += 1
    return max(span(index, quota) for index, quota in enumerate(held)), tuple(held)
