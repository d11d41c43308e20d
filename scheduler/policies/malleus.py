"""Malleus (Hetu; arXiv 2410.13333): groups split around stragglers, then two min-max problems."""

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
    timed,
    with_layers,
)

Members = tuple[int, ...]


def malleus(job: Job, speeds: Speeds) -> Outcome:
    """Groups, layers and quotas that minimise the largest `quota * layers / speed`.

    A group with a straggler may split into groups of powers of two, each with equal shares, so
    that stragglers stand alone or are left out; the pieces are further stages of the same replica,
    the slowest first (they hold fewer layers and more in-flight microbatches). The objective
    counts the steady state and no filling or draining, as in the paper's formulation.
    """
    shaped = []
    for replica in job.layout.replicas:
        best = _pipeline(job, replica, speeds)
        if best is not None:
            shaped.append(best)
    shaped = sorted(shaped, key=lambda pair: pair[0])[: job.microbatches]
    if not shaped:
        return STOPPED
    quotas = quotas_by_rate([1.0 / slowest for slowest, _ in shaped], job.microbatches)
    return timed(job, [replica for _, replica in shaped], quotas, speeds, pause=Pause.LIVE)


def _pipeline(job: Job, replica: Replica, speeds: Speeds) -> tuple[float, Replica] | None:
    """The least bottleneck of a replica and its stages; None where no rank is left."""
    pieces: list[tuple[float, Members]] = []
    for stage in replica.stages:
        pieces += split(stage.ranks, speeds)
    layers = job.layout.layers
    pieces = sorted(pieces, key=lambda piece: -piece[0])[:layers]
    if not pieces:
        return None
    best: tuple[float, list[int], list[tuple[float, Members]]] | None = None
    for count in range(len(pieces), 0, -1):  # the slowest pieces may not be worth a stage
        kept = sorted(pieces[:count])
        counts = layers_by_rate([rate for rate, _ in kept], layers)
        slowest = max(n / rate for n, (rate, _) in zip(counts, kept, strict=True))
        if best is not None and slowest > best[0] * (1 + 1e-9):
            break
        best = (slowest, counts, kept)
    assert best is not None
    slowest, counts, kept = best
    stages = [Stage(ranks, (0, 0)) for _, ranks in kept]
    return slowest, with_layers(stages, counts)


def split(ranks: Sequence[int], speeds: Speeds) -> list[tuple[float, Members]]:
    """Rate and members of the pieces of one group: powers of two of ranks of falling speed.

    Whole where that is as fast as all pieces together.

    >>> split((0, 1, 2, 3), {3: 0.4})
    [(2.0, (0, 1)), (1.0, (2,)), (0.4, (3,))]
    >>> split((0, 1, 2, 3), {})
    [(4.0, (0, 1, 2, 3))]
    """
    order = sorted(
        (r for r in ranks if speeds.get(r, 1.0) > 0.0), key=lambda r: (-speeds.get(r, 1.0), r)
    )
    best: list[tuple[float, Members]] = []
    for first in _powers(len(order)):
        head = order[:first]
        rate = first * speeds.get(head[-1], 1.0)
        rest = split(order[first:], speeds) if first < len(order) else []
        option = [(rate, tuple(sorted(head))), *rest]
        if _total(option) > _total(best) * (1 + 1e-9):
            best = option
    return best


def _powers(limit: int) -> list[int]:
    """Powers of two up to `limit`, the largest first."""
    return [1 << k for k in reversed(range(limit.bit_length()))] if limit else []


def _total(pieces: Sequence[tuple[float, Members]]) -> float:
    return sum(rate for rate, _ in pieces)
