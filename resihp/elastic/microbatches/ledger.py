"""Which microbatches of the present step are in whose gradient sum, and what of it a loss leaves.

Every rank keeps its own account in memory; accounts meet only in the reports of the survivors.
A microbatch is named by its index over all replicas. A replica's sum is spread over its ranks, so
it counts only if all of them are alive and have finished the very same microbatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Spans = tuple[tuple[int, int], ...]
"""Microbatches as ascending half-open ranges."""


@dataclass(frozen=True)
class GradientHolding:
    """What one rank's gradients of the step in progress stand for, in one generation.

    generation     the generation after whose layout they are cut
    replica   index of the rank's replica there
    members   number of ranks of that replica
    finished  microbatches in the rank's local sum
    summed    the rank holds the sum over all replicas too, whole, beside the local one
    """

    generation: int
    replica: int
    members: int
    finished: Spans = ()
    summed: bool = False


@dataclass(frozen=True)
class SurvivingSum:
    """A gradient sum that all ranks of one replica still hold.

    total  it is the sum over all replicas, so nothing else of the step may be added to it
    """

    replica: int
    finished: Spans
    total: bool = False


def surviving_sums(
    holdings: Iterable[GradientHolding], microbatches: int
) -> tuple[SurvivingSum, ...]:
    """The sums from which the survivors go on, each microbatch in at most one of them.

    `holdings` are those of all survivors in the generation that holds. Where one replica has the
    sum over all of them, that is all there is to keep; otherwise each replica's own, if it is
    whole.
    """
    by_replica: Mapping[int, list[GradientHolding]] = defaultdict(list)
    for holding in holdings:
        by_replica[holding.replica].append(holding)
    whole = {r: held for r, held in sorted(by_replica.items()) if len(held) == held[0].members}
    for replica, held in whole.items():
        if all(holding.summed for holding in held):
            return (SurvivingSum(replica, ((0, microbatches),), total=True),)
    return tuple(
        SurvivingSum(replica, held[0].finished)
        for replica, held in whole.items()
        if held[0].finished and len({holding.finished for holding in held}) == 1
    )


def spans(microbatches: Iterable[int]) -> Spans:
    """Indices as ranges.

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
    """Ranges as ascending indices."""
    return tuple(index for start, stop in given for index in range(start, stop))
