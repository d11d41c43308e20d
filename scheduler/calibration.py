"""Calibration of a job's cost model to measured healthy steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial

from resihp.contracts import Job, LayerCost, Schedule

from .cost_model import all_reduce_ms, layer_cost, transfer_ms
from .simulator import simulate
from .step_time import ReplicaTimes

_CHORDS = 12
_FASTEST = 16.0  # times as fast as those of the job that links are taken to be
_CLOSE = 1e-4  # of a step; the rest becomes fixed cost


def compute_ms(job: Job) -> Mapping[int, tuple[float, float]]:
    """Forward and backward compute time by rank of the initial layout in one healthy step.

    In milliseconds for microbatches of mean work; without waiting, transfers and collectives.
    """
    cost = layer_cost(job)
    found = {}
    for replica, quota in zip(job.layout.replicas, job.quotas, strict=True):
        last = len(replica.stages) - 1
        for index, stage in enumerate(replica.stages):
            layers, units = stage.layer_count, sum(stage.shares)
            ends = (index == 0) * cost.embedding_ms + (index == last) * cost.head_ms
            for rank, units_held in zip(stage.ranks, stage.shares, strict=True):
                share = units_held / units
                forward = layers * (cost.fixed_ms + share * cost.forward_ms) + share * ends
                backward = layers * (cost.fixed_ms + share * cost.backward_ms) + 2 * share * ends
                found[rank] = (quota * forward, quota * backward)
    return found


def calibrated(
    job: Job,
    *,
    forward: float,
    backward: float,
    step_ms: float,
    besides_ms: float = 0.0,
    collective_ms: float | None = None,
) -> Job:
    """Job with a cost model under which its initial layout takes `step_ms` on healthy devices.

    forward, backward  ratios of measured compute time to `compute_ms`
    besides_ms         measured fixed cost of a step: data, gradient reduction, optimizer
    collective_ms      measured time of one layer's collectives in one direction; None: unknown

    The rest of the step (launches, contention) is modelled as latency of collectives and transfers
    if there are tensor-parallel groups, so that groups of one rank do not pay for it, but only up
    to the measured time of the collectives. What remains is fixed cost of a step: on a shared
    machine it is large, and as latency it would favour groups of one rank.

    If the model takes longer than the step, the fixed cost is reduced first. Then links are taken
    as faster: down to the measured time of the collectives, and further if that is not enough, as
    what overlaps with compute takes no time of the step; at most 16 times, as migrations use the
    same links. Only if compute is still too slow then, all costs are scaled down to the step.
    """
    cost = replace(_scaled(layer_cost(job), forward, backward), step_ms=0.0)
    fitted = replace(job, cost=cost)
    if _step_ms(fitted) > step_ms and transfer_ms(job):
        fitted = _with_faster_links(fitted, step_ms, collective_ms)
    modelled_ms = _step_ms(fitted)
    if modelled_ms > step_ms:
        ratio = step_ms / modelled_ms
        return replace(_with_links(fitted, ratio), cost=_scaled(cost, ratio, ratio))
    besides_ms = min(besides_ms, step_ms - modelled_ms)
    scaled = replace(fitted, cost=replace(cost, step_ms=besides_ms))
    if all_reduce_ms(job, 2) and any(s.tp > 1 for r in job.layout.replicas for s in r.stages):
        scaled = _with_latency(scaled, step_ms, collective_ms)
    left_ms = max(0.0, step_ms - _step_ms(scaled))  # not less for a rounding error
    return replace(scaled, cost=replace(cost, step_ms=besides_ms + left_ms))


def _with_faster_links(job: Job, step_ms: float, collective_ms: float | None) -> Job:
    """Job with the slowest links, not slower than its own, under which its step takes at most
    `step_ms` and the collectives of a layer `collective_ms`."""
    most, modelled_ms = 1.0, all_reduce_ms(job, job.layout.tp)
    if collective_ms is not None and collective_ms < modelled_ms:
        most = max(collective_ms / modelled_ms, 1.0 / _FASTEST)
    return _at_most(step_ms, partial(_with_links, job), 1.0 / _FASTEST, most)


def _with_links(job: Job, part: float) -> Job:
    """Job whose collectives and transfers take a part of their time."""
    links = job.links
    faster = replace(
        links,
        intra_gbytes_per_s=links.intra_gbytes_per_s / part,
        inter_gbytes_per_s=links.inter_gbytes_per_s / part,
        latency_ms=links.latency_ms * part,
    )
    return replace(job, links=faster) if transfer_ms(job) else job


def _with_latency(job: Job, step_ms: float, collective_ms: float | None) -> Job:
    """Job with the largest link latency under which its step takes at most `step_ms`.

    The collectives of a layer take at most `collective_ms`.
    """

    def at(latency_ms: float) -> Job:
        return replace(job, links=replace(job.links, latency_ms=latency_ms))

    low, most_ms = job.links.latency_ms, max(0.0, step_ms - _step_ms(job))  # not less, as above
    if collective_ms is not None:  # two collectives in each direction
        more_ms = (collective_ms - all_reduce_ms(job, job.layout.tp)) / 2.0
        most_ms = min(max(more_ms, 0.0), most_ms)
    return _at_most(step_ms, at, low, low + most_ms)


def _at_most(step_ms: float, at: Callable[[float], Job], low: float, high: float) -> Job:
    """Job at the largest value under which its step takes at most `step_ms`, or at `low`.

    A step is a longest path and therefore convex in the times of communication, so the secant
    iteration converges from below.
    """
    high_ms = _step_ms(at(high))
    if high_ms <= step_ms:
        return at(high)
    low_ms = _step_ms(at(low))
    for _ in range(_CHORDS):
        if high_ms - low_ms <= 0.0 or step_ms - low_ms < _CLOSE * step_ms:
            break
        low += (high - low) * (step_ms - low_ms) / (high_ms - low_ms)
        low_ms = _step_ms(at(low))
    return at(low)


def _scaled(cost: LayerCost, forward: float, backward: float) -> LayerCost:
    both = (forward + backward) / 2.0
    scaled = {name: both * value for name, value in asdict(cost).items()}
    scaled["forward_ms"] = forward * cost.forward_ms
    scaled["backward_ms"] = backward * cost.backward_ms
    return LayerCost(**scaled)


def _step_ms(job: Job) -> float:
    if job.schedule is Schedule.INTERLEAVED:
        return simulate(job, job.layout, job.quotas).step_ms
    return ReplicaTimes(job, job.layout.replicas, job.schedule, {}).step_ms(job.quotas)
