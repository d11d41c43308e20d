"""Microbatches in each replica's partial gradient, and the partial gradients that survive a loss.

Every rank keeps its own entry in memory; entries meet in the reports of survivors only. A
microbatch is identified by its index over all replicas. A replica's sum is sharded over its ranks:
it survives only if all of them are alive and have finished the same microbatches (ReCoVer,
arXiv 2605.11215).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Spans = tuple[tuple[int, int], ...]
"""Microbatches as ascending half-open ranges."""


@dataclass(frozen=True)
class GradientHolding:
    """Content of one rank's gradients in the step in progress.

    generation  whose layout shards them
    replica     index of the rank's replica in that layout
    members     number of ranks of that replica
    finished    microbatches in the local sum
    summed      the rank also holds its shard of the sum over all replicas
    buckets     leading gradient buckets of which it holds that sum, where `summed` is False
    is_scattered
                that sum is scattered over the ranks that update with it: no replica has all of its
                own
    """

    generation: int
    replica: int
    members: int
    finished: Spans = ()
    summed: bool = False
    buckets: int = 0
    is_scattered: bool = False


@dataclass(frozen=True)
class SurvivingSum:
    """Gradient sum that all ranks of one replica still hold.

    total  the sum over all replicas: no other sum may be added
    """

    replica: int
    finished: Spans
    total: bool = False


def surviving_sums(
    holdings: Iterable[GradientHolding], microbatches: int
) -> tuple[SurvivingSum, ...]:
    """Return the sums to continue from, each microbatch in at most one of them.

    `holdings` are those of all survivors in the committed generation. If one replica has the sum
    over all replicas, only that is kept; otherwise the sum of each replica whose ranks agree.
    """
    by_replica: Mapping[int, list[GradientHolding]] = defaultdict(list)
    for holding in holdings:
        by_replica[holding.replica].append(holding)
    whole = {r: held for r, held in sorted(by_replica.items()) if len(held) == held[0].members}
    for replica, held in whole.items():
        if all(holding.summed and not holding.is_scattered for holding in held):
            return (SurvivingSum(replica, ((0, microbatches),), total=True),)
    return tuple(
        SurvivingSum(replica, held[0].finished)
        for replica, held in whole.items()
        if held[0].finished and len({holding.finished for holding in held}) == 1
    )


def spans(microbatches: Iterable[int]) -> Spans:
    """Return indices as half-open ranges.

    >>> spans({0, 1, 2, 5})
    ((0, 3), (5, 6))
    """
    found: list[tuple[int, int]] = []
    for index in sorted(microbatches):
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return tuple(found)


def indices(given: Spans) -> tuple[int, ...]:
    """Return ranges as ascending indices."""
    return tuple(index for start, stop in given for index in range(start, stop))
