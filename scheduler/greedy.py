"""Greedy allocation of equal units, optimal for separable convex bottleneck objectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
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
