"""Shares of a tensor-parallel group by the speed of its members, in whole units."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace


def shares_for(
    speeds: Sequence[float], units: int, *, fixed: float = 0.0, even: bool = False
) -> tuple[int, ...]:
    """Units for each member so that the slowest one is as fast as it can be; 0 drops a member.

    A member of speed p with q units needs `(fixed + q) / p`. Exact: every unit goes where it ends
    first (the greedy rule is optimal for separable convex bottlenecks), on a tie where fewer are
    held; a member that gets none does not take part. `even` gives equal shares to the members that
    take part, as runtimes without uneven shards need; as many as divide the units.

    >>> shares_for((1.0, 1.0, 0.5, 1.0), 8)
    (3, 2, 1, 2)
    >>> shares_for((1.0, 0.0, 0.1), 4)
    (4, 0, 0)
    """
    if even:
        return _even(speeds, units)
    finish = [((fixed + 1.0) / p, 0, i) for i, p in enumerate(speeds) if p > 0.0]
    held = [0] * len(speeds)
    heapify(finish)
    for _ in range(units if finish else 0):
        index = finish[0][2]
        held[index] += 1
        end = (fixed + held[index] + 1.0) / speeds[index]
        heapreplace(finish, (end, held[index], index))
    return tuple(held)


def _even(speeds: Sequence[float], units: int) -> tuple[int, ...]:
    """The degree k among the divisors of `units` that makes `k * min(speed)` largest."""
    fastest = sorted((i for i, p in enumerate(speeds) if p > 0.0), key=lambda i: (-speeds[i], i))
    degrees = [k for k in range(1, len(fastest) + 1) if units % k == 0]
    best = max(degrees, key=lambda k: (k * speeds[fastest[k - 1]], k), default=0)
    chosen = set(fastest[:best])
    return tuple(units // best if i in chosen else 0 for i in range(len(speeds)))
