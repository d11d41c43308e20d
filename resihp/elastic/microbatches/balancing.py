"""Distribution of a step's microbatches over ranks of unequal speed, by count or by their work.

All functions are pure and deterministic: every rank computes the same result for itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import ContractError, ModelShape, even_quotas

Floats = NDArray[np.float64]

StepWork = Callable[[int], Sequence[float]]
"""Returns the work of each microbatch of a step, in any unit, alike on every rank."""

_UNKNOWN_HIDDEN = 4096
_ROUNDS = 64
"""Exchanges at most. After a few the last end hardly moves, however many microbatches there are."""
_LEAST_GAIN = 1e-9


def microbatch_flops(seq_lens: Sequence[int], model: ModelShape | None = None) -> float:
    """Return the FLOPs of a microbatch's forward pass through a decoder, from its sequences.

    2 per parameter and token in the matrices of the layers and of the head, and causal attention
    with `2 * hidden * length**2` per layer: the terms by which the detector expects compute times.
    Without `model` the ratio of the two terms is that of hidden size 4096.

    >>> microbatch_flops([512, 512]) / microbatch_flops([1024]) < 1.0
    True
    """
    tokens = float(sum(seq_lens))
    squares = float(sum(length * length for length in seq_lens))
    if model is None:
        return 24.0 * _UNKNOWN_HIDDEN**2 * tokens + 2.0 * _UNKNOWN_HIDDEN * squares
    matrices = 2.0 * (model.layers * model.layer_params + model.embedding_params)
    return matrices * tokens + 2.0 * model.layers * model.heads * model.head_dim * squares


def quotas_by_speed(microbatches: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Spread equal microbatches over ranks so that the last rank ends as early as possible.

    A rank of speed 0 gets none, unless all have it: then they count alike.

    >>> quotas_by_speed(16, [1.0, 1.0, 1.0, 0.5])
    (5, 5, 4, 2)
    """
    if len(set(speeds)) == 1:
        return even_quotas(microbatches, len(speeds))
    given = [0] * len(speeds)
    ends = [(1.0 / speed, -speed, rank) for rank, speed in enumerate(speeds) if speed > 0.0]
    heapq.heapify(ends)
    for _ in range(microbatches):
        _, speed, rank = heapq.heappop(ends)
        given[rank] += 1
        heapq.heappush(ends, ((given[rank] + 1) / -speed, speed, rank))
    return tuple(given)


def at_least_one(quotas: Sequence[int]) -> tuple[int, ...]:
    """Give a microbatch to each rank without one, from the ranks that have most.

    >>> at_least_one([6, 5, 5, 0])
    (5, 5, 5, 1)
    """
    given = list(quotas)
    while 0 in given and max(given) > 1:
        given[given.index(max(given))] -= 1
        given[given.index(0)] += 1
    return tuple(given)


def speeds_of_quotas(quotas: Sequence[int]) -> tuple[float, ...]:
    """Return the relative speeds that quotas imply; all 1.0 where they are as even as they go."""
    if max(quotas) - min(quotas) <= 1:
        return (1.0,) * len(quotas)
    return tuple(float(quota) for quota in quotas)


def work_of_step(work: StepWork, step: int, microbatches: int) -> list[float]:
    """Return the work of each microbatch of a step.

    Raises `ContractError` unless `work` returns that many finite numbers above 0.
    """
    found = [float(amount) for amount in work(step)]
    if len(found) != microbatches or not all(0.0 < one < math.inf for one in found):
        raise ContractError("work", f"must be {microbatches} numbers above 0, not {found[:8]}")
    return found


def assign_by_count(quotas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return consecutive microbatches for each rank.

    >>> assign_by_count([2, 1])
    ((0, 1), (2,))
    """
    edges = [0, *accumulate(quotas)]
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(edges))


def assign_by_work(
    work: Sequence[float],
    speeds: Sequence[float],
    quotas: Sequence[int],
    *,
    may_idle: bool = False,
) -> tuple[tuple[int, ...], ...]:
    """Return the microbatches of each rank, ascending, so that the last rank ends early.

    work      of each microbatch, above 0, in any unit
    speeds    of each rank, above 0; at most as many ranks as microbatches, unless they may idle
    quotas    by which microbatches are assigned where that ends no later
    may_idle  ranks may have no microbatch; else each has at least one

    Longest processing time first on uniform machines, each rank with at least one microbatch; then
    single microbatches move from the last rank, or change places with others, while that helps.
    The last end is at most 5/3 of the least possible (Friesen, 1987; with equal speeds 4/3,
    Graham, 1969): only the smallest microbatches, one a rank, are ever given to ranks that would
    have none, of which no assignment can give them less.
    """
    found = _exchange(_longest_first(work, speeds, may_idle), work, speeds, may_idle)
    counted = assign_by_count(quotas)
    is_better = last_end(found, work, speeds) < last_end(counted, work, speeds)
    return found if is_better else counted


def last_end(
    assigned: Sequence[Sequence[int]], work: Sequence[float], speeds: Sequence[float]
) -> float:
    """Return the time at which the last rank ends, in units of work at speed 1."""
    return max(
        sum(work[index] for index in own) / speed
        for own, speed in zip(assigned, speeds, strict=True)
    )


def _longest_first(
    work: Sequence[float], speeds: Sequence[float], may_idle: bool
) -> list[list[int]]:
    """Assign microbatches by falling work, each to the rank that would end it first.

    Ranks of equal speed share a heap of their loads, so that only one of them is compared.
    """
    assert may_idle or len(work) >= len(speeds), "each rank needs a microbatch"
    assigned: list[list[int]] = [[] for _ in speeds]
    heaps: dict[float, list[tuple[float, int]]] = {}
    for rank, speed in enumerate(speeds):
        heaps.setdefault(speed, []).append((0.0, rank))
    empty = len(speeds)
    for place, index in enumerate(sorted(range(len(work)), key=lambda i: (-work[i], i))):
        must_fill = not may_idle and len(work) - place == empty
        choices = [
            ((heap[0][0] + work[index]) / speed, -speed)
            for speed, heap in heaps.items()
            if not (must_fill and heap[0][0])
        ]
        heap = heaps[-min(choices)[1]]
        load, rank = heap[0]
        empty -= not assigned[rank]
        assigned[rank].append(index)
        heapq.heapreplace(heap, (load + work[index], rank))
    return assigned


def _exchange(
    assigned: list[list[int]], work: Sequence[float], speeds: Sequence[float], may_idle: bool
) -> tuple[tuple[int, ...], ...]:
    """Move or swap single microbatches of the rank that ends last, while it then ends earlier."""
    amount, speed = np.asarray(work, np.float64), np.asarray(speeds, np.float64)
    holder = np.empty(len(work), np.int64)
    for rank, own in enumerate(assigned):
        holder[own] = rank
    for _ in range(_ROUNDS):
        loads = np.asarray(np.bincount(holder, amount, len(speed)), np.float64)
        last = int(np.argmax(loads / speed))
        if not _improve(last, holder, amount, loads, speed, least=0 if may_idle else 1):
            break
    return tuple(tuple(np.flatnonzero(holder == rank).tolist()) for rank in range(len(speed)))


def _improve(
    last: int,
    holder: NDArray[np.int64],
    work: Floats,
    loads: Floats,
    speed: Floats,
    *,
    least: int,
) -> bool:
    """Make the best move or swap of rank `last`; False if none lets both ranks end earlier."""
    own = np.flatnonzero(holder == last)
    others = np.flatnonzero(holder != last)
    end = loads[last] / speed[last]
    best, change = end * (1.0 - _LEAST_GAIN), None
    if len(others):
        less = work[own][:, None] - work[others][None, :]  # [own, others] by which `last` shrinks
        to = holder[others]
        ends = np.maximum((loads[last] - less) / speed[last], (loads[to] + less) / speed[to])
        at = np.unravel_index(int(np.argmin(ends)), ends.shape)
        if ends[at] < best:
            best, change = float(ends[at]), (own[at[0]], int(to[at[1]]), others[at[1]])
    if len(own) > least and len(speed) > 1:
        left = (loads[last] - work[own])[:, None] / speed[last]
        ends = np.maximum(left, (loads[None, :] + work[own][:, None]) / speed[None, :])
        ends[:, last] = np.inf
        at = np.unravel_index(int(np.argmin(ends)), ends.shape)
        if ends[at] < best:
            change = (own[at[0]], int(at[1]), None)
    if change is None:
        return False
    given, to_rank, taken = change
    holder[given] = to_rank
    if taken is not None:
        holder[taken] = last
    return True
