"""Oobleck (SOSP'23): every replica runs the pipeline template for the nodes that it has left."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.contracts import Job, Replica, Stage

from .base import (
    STOPPED,
    Outcome,
    Pause,
    Speeds,
    layers_by_rate,
    quotas_by_rate,
    replica_spans,
    speed_of,
    timed,
    with_layers,
)


def oobleck(job: Job, speeds: Speeds) -> Outcome:
    """Templates for fewer groups where some died, microbatches by the speed of the pipelines.

    Templates spread layers as if all groups were alike. Stragglers are not its subject: a replica
    leaves them out as if they had died where that is quicker.
    """
    chosen = []
    for replica in job.layout.replicas:
        options = _templates(job, replica, speeds)
        if options:
            spans = replica_spans(job, options, [job.microbatches] * len(options), speeds)
            best = min(range(len(options)), key=lambda i: (spans[i], i))
            chosen.append((job.microbatches / spans[best], options[best]))
    chosen = sorted(chosen, key=lambda pair: -pair[0])[: job.microbatches]
    if not chosen:
        return STOPPED
    quotas = quotas_by_rate([rate for rate, _ in chosen], job.microbatches)
    return timed(job, [replica for _, replica in chosen], quotas, speeds, pause=Pause.LIVE)


def _templates(job: Job, replica: Replica, speeds: Speeds) -> list[Replica]:
    """The replica without its dead groups, and without ever more of its slowest ones."""
    living = [stage for stage in replica.stages if speed_of(speeds, stage) > 0.0]
    options = []
    while living:
        options.append(_evenly(living, job.layout.layers))
        slowest = min(living, key=lambda stage: speed_of(speeds, stage))
        if speed_of(speeds, slowest) >= 1.0:
            break
        living = [stage for stage in living if stage is not slowest]
    return options


def _evenly(stages: Sequence[Stage], layers: int) -> Replica:
    return with_layers(stages, layers_by_rate([1.0] * len(stages), layers))
