"""Division of equal units over entries so that the last entry to finish is as early as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from math import inf, isfinite
from typing import Any


def greedy_allocation(
    counts: Sequence[int], units: int, finish: Callable[[int, int], Any]
) -> list[int]:
    """Counts after `units` more units, each given to the entry that would finish it first.

    finish  key of the time at which an entry (its index) finishes a number of units; ties go to
            the smaller index

    >>> greedy_allocation([0, 0], 3, lambda index, count: count / (2.0, 1.0)[index])
    [2, 1]
    """
    allocated = list(counts)
    heap = [(finish(index, count + 1), index) for index, count in enumerate(allocated)]
    heapify(heap)
    for _ in range(units if heap else 0):
        index = heap[0][1]
        allocated[index] += 1
        heapreplace(heap, (finish(index, allocated[index] + 1), index))
    return allocated


def allocation_by_rate(
    ends: Sequence[float], rates: Sequence[float], counts: Sequence[int]
) -> list[int]:
    """Counts of the same sum, at least 1 each, by greedy allocation; the present ones if there are
    too few units for that, or if an entry never ends.

    An entry ends at `ends` with its present count; every unit more takes its rate longer. An
    entry that ends after the common level of the others with a single unit keeps that one.
    """
    if sum(counts) < len(counts) or not all(map(isfinite, ends)):
        return list(counts)
    offsets = [end - rate * count for end, rate, count in zip(ends, rates, counts, strict=True)]
    total, indices = sum(counts), range(len(counts))
    kept: Sequence[int] = indices
    level = -inf
    for _ in indices:
        units = total - (len(counts) - len(kept))
        earned = sum(offsets[i] / rates[i] for i in kept)
        level = (units + earned) / sum(1.0 / rates[i] for i in kept)
        longer = [i for i in kept if level > offsets[i] + rates[i]]
        if len(longer) in (0, len(kept)):
            break
        kept = longer
    fresh = [1] * len(counts)
    for i in kept:
        fresh[i] = max(1, int((level - offsets[i]) / rates[i]) - 1)
    return greedy_allocation(
        fresh, total - sum(fresh), lambda index, count: offsets[index] + rates[index] * count
    )


def exchange_units(
    counts: list[int],
    finish: Callable[[Sequence[tuple[int, int]]], Sequence[float]],
    expired: Callable[[], bool] = lambda: False,
) -> None:
    """Move single units, in place, from the last entry to finish to the best other one.

    finish  times at which entries finish, of pairs of an index and a count

    Ends when the entry that would finish first with one unit more would not end before the last
    one. An entry keeps at least one unit.
    """
    indices = range(len(counts))
    both = finish([(index, counts[index] + more) for more in (0, 1) for index in indices])
    ends, later = list(both[: len(counts)]), list(both[len(counts) :])
    for _ in range(4 * len(counts) + 16):
        worst = max(indices, key=lambda i: (ends[i], -i))
        taker = min(indices, key=lambda i: (i == worst, later[i], i))
        if taker == worst or counts[worst] <= 1 or expired():
            return
        if later[taker] >= ends[worst] * (1 - 1e-9):
            return
        counts[worst] -= 1
        counts[taker] += 1
        moved = worst, taker
        both = finish([(i, counts[i] + more) for more in (0, 1) for i in moved])
        ends[worst], ends[taker], later[worst], later[taker] = both
