"""Malleus (Hetu; arXiv 2410.13333): groups split around stragglers, then two min-max problems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from heapq import heapify, heapreplace
from itertools import permutations
from operator import itemgetter

from resihp.contracts import Job, Replica, Stage

from .base import (
    STOPPED,
    PolicyOutcome,
    Speeds,
    Transition,
    layers_by_rate,
    quotas_by_rate,
    timed,
    with_layers,
)

Members = tuple[int, ...]
Piece = tuple[float, Members]  # rate and members of a group
Pieces = list[Piece]
_EXCHANGES = 64


def malleus(job: Job, speeds: Speeds) -> PolicyOutcome:
    """Groups, pipelines, layers and quotas that minimise the largest `quota * layers / speed`.

    A group with a straggler may split into groups of powers of two, each with equal shares, so
    that stragglers stand alone or are left out. The groups are divided anew over the pipelines
    where that lowers the objective, by the best move or swap of two groups as long as there is one
    (the paper solves an integer program); layers and quotas are then the exact optima of its two
    min-max programs, the slowest groups first in a pipeline (they hold fewer layers and more
    in-flight microbatches). The objective counts the steady state and no filling or draining.
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
    quotas = quotas_by_rate([1.0 / slowest for slowest, _ in shaped], job.microbatches)
    return timed(job, [replica for _, replica in shaped], quotas, speeds, pause=Transition.LIVE)


def _divided(pipelines: list[Pieces], layers: int, microbatches: int) -> list[Pieces]:
    """The pipelines after the moves and swaps of groups that lower the objective most."""
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
    """The pipelines after each move or swap of two groups; once for those that are alike."""
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
    """The least time that a pipeline of such groups can have for its slowest one."""
    counts = range(1, min(len(rates), layers) + 1)
    return min(least_largest(rates[:count], layers) for count in counts)


def least_largest(rates: Sequence[float], total: int) -> float:
    """The least largest `count / rate` of whole counts, 1 at least, with that sum."""
    level = total / sum(rates)
    counts = [max(1, int(level * rate + 1e-9)) for rate in rates]
    ends = [
        ((count + 1) / rate, index)
        for index, (count, rate) in enumerate(zip(counts, rates, strict=True))
    ]
    heapify(ends)
    for _ in range(total - sum(counts)):
        index = ends[0][1]
        counts[index] += 1
        heapreplace(ends, ((counts[index] + 1) / rates[index], index))
    return max(count / rate for count, rate in zip(counts, rates, strict=True))


def _pipeline(row: Pieces, layers: int) -> tuple[float, Replica]:
    """The least bottleneck of a pipeline and its stages; the slowest groups may be left out."""
    fastest = sorted(row, key=lambda piece: -piece[0])[:layers]
    rates = _rates(fastest)
    count = min(range(1, len(rates) + 1), key=lambda n: least_largest(rates[:n], layers))
    kept = sorted(fastest[:count])
    counts = layers_by_rate([rate for rate, _ in kept], layers)
    stages = [Stage(ranks, (0, 0)) for _, ranks in kept]
    return least_largest(rates[:count], layers), with_layers(stages, counts)


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
