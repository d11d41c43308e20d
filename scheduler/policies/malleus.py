"""Malleus (Hetu, arXiv 2410.13333): groups split around stragglers, then two min-max programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import permutations
from operator import itemgetter

from resihp.contracts import Job, Replica, Stage

from ..greedy import greedy_allocation
from .base import (
    STOPPED,
    PolicyOutcome,
    Speeds,
    Transition,
    counts_by_rate,
    timed,
    with_layers,
)

Members = tuple[int, ...]
Piece = tuple[float, Members]  # rate and members of a group
Pieces = list[Piece]
_EXCHANGES = 64


def malleus(job: Job, speeds: Speeds) -> PolicyOutcome:
    """Groups, pipelines, layers and quotas that minimise the largest `quota * layers / speed`.

    A group with a straggler may be split into groups of powers of two with equal shares, so that
    stragglers are alone or left out. Groups are reassigned to pipelines by the best move or swap
    while the objective falls (the paper solves an integer program); layers and quotas are the
    exact optima of its two min-max programs, with the slowest groups first in a pipeline (fewer
    layers, more microbatches in flight). The objective ignores warm-up and drain of the pipeline.
    """
    pieces = [
        [piece for stage in replica.stages for piece in split(stage.ranks, speeds)]
        for replica in job.layout.replicas
    ]
    pieces = sorted(filter(None, pieces), key=lambda row: -_total(row))[: job.microbatches]
    if not pieces:
        return STOPPED
    layers = job.layout.layers
    shaped = [_pipeline(row, layers) for row in _divided(pieces, layers, job.microbatches)]
    quotas = counts_by_rate([rate for rate, _ in shaped], job.microbatches)
    replicas = [replica for _, replica in shaped]
    return timed(job, replicas, quotas, speeds, transition=Transition.LIVE)


def _divided(pipelines: list[Pieces], layers: int, microbatches: int) -> list[Pieces]:
    """Pipelines after the moves and swaps of groups that lower the objective most."""
    bottleneck = cache(partial(_bottleneck, layers=layers))

    def objective(rows: Sequence[Pieces]) -> float:
        rates = [1.0 / bottleneck(_rates(row)) for row in rows]
        return least_largest(rates, microbatches)

    best = objective(pipelines)
    for _ in range(_EXCHANGES):
        options = [(objective(option), option) for option in _exchanged(pipelines)]
        least, option = min(options, key=itemgetter(0), default=(best, pipelines))
        if least >= best * (1 - 1e-9):
            break
        best, pipelines = least, option
    return pipelines


def _exchanged(pipelines: list[Pieces]) -> Iterator[list[Pieces]]:
    """Pipelines after each distinct move or swap of groups."""
    seen = set()
    for i, j in permutations(range(len(pipelines)), 2):
        pair = _rates(pipelines[i]), _rates(pipelines[j])
        if pair in seen:
            continue
        seen.add(pair)
        for piece in _one_each(pipelines[i]):
            others = _one_each(pipelines[j]) if i < j else []
            for back in (None, *(other for other in others if other[0] != piece[0])):
                fresh = list(pipelines)
                fresh[i] = [p for p in pipelines[i] if p is not piece]
                if back is not None:
                    fresh[i].append(back)
                fresh[j] = [piece, *(p for p in pipelines[j] if p is not back)]
                if fresh[i]:
                    yield fresh


def _one_each(row: Pieces) -> list[Piece]:
    """One group of each rate."""
    return list({piece[0]: piece for piece in row}.values())


def _rates(row: Pieces) -> tuple[float, ...]:
    return tuple(sorted((rate for rate, _ in row), reverse=True))


def _bottleneck(rates: tuple[float, ...], layers: int) -> float:
    """Least time of the slowest stage over all uses of groups with these rates."""
    counts = range(1, min(len(rates), layers) + 1)
    return min(least_largest(rates[:count], layers) for count in counts)


def least_largest(rates: Sequence[float], total: int) -> float:
    """Minimum of the largest `count / rate` over whole counts of at least 1 with that sum."""
    level = total / sum(rates)
    counts = [max(1, int(level * rate + 1e-9)) for rate in rates]
    counts = greedy_allocation(counts, total - sum(counts), lambda i, count: count / rates[i])
    return max(count / rate for count, rate in zip(counts, rates, strict=True))


def _pipeline(row: Pieces, layers: int) -> tuple[float, Replica]:
    """Rate of a pipeline and its stages; the slowest groups may be left out."""
    fastest = sorted(row, key=lambda piece: -piece[0])[:layers]
    rates = _rates(fastest)
    count = min(range(1, len(rates) + 1), key=lambda n: least_largest(rates[:n], layers))
    kept = sorted(fastest[:count])
    counts = counts_by_rate([rate for rate, _ in kept], layers)
    stages = [Stage(ranks, (0, 0)) for _, ranks in kept]
    return 1.0 / least_largest(rates[:count], layers), with_layers(stages, counts)


def split(ranks: Sequence[int], speeds: Speeds) -> list[tuple[float, Members]]:
    """Rate and members of the parts of one group: powers of two, fastest ranks first.

    The group stays whole if that is as fast as all parts together.

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
