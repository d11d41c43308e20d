"""Who computes what of a step: all of it, or what is left of it after a loss."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from resihp.contracts import Layout, Plan

from .ledger import Spans, SurvivingSum, indices, spans


@dataclass(frozen=True)
class Assignment:
    """One replica's part of a step.

    inherited  gradient sums that it takes over from the generation before, each exactly once
    todo       microbatches that it still has to compute, ascending
    """

    inherited: tuple[SurvivingSum, ...] = ()
    todo: tuple[int, ...] = ()

    @property
    def begun(self) -> Spans:
        """What its sum holds at the start."""
        return spans(index for kept in self.inherited for index in indices(kept.finished))

    @property
    def whole(self) -> Spans:
        """What its sum holds in the end."""
        return spans((*indices(self.begun), *self.todo))


def full_assignments(plan: Plan) -> tuple[Assignment, ...]:
    """The shares of a step from its beginning."""
    return remaining_assignments(plan, plan.layout, ())


def remaining_assignments(
    plan: Plan, before: Layout, kept: Sequence[SurvivingSum]
) -> tuple[Assignment, ...]:
    """The shares of the rest of a step: `kept` (of the layout `before`) stays, the rest is redone.

    Each kept sum goes to the replica of `plan` that has most of its ranks, so that least moves.
    Deterministic: every rank works it out for itself.
    """
    heirs: list[list[SurvivingSum]] = [[] for _ in plan.quotas]
    for one in kept:
        heirs[_heir(before.replicas[one.replica].ranks, plan.layout)].append(one)
    done = {index for one in kept for index in indices(one.finished)}
    left = [index for index in range(plan.microbatches) if index not in done]
    edges = [0, *accumulate(divide(plan, len(left)))]
    return tuple(
        Assignment(tuple(inherited), tuple(left[start:stop]))
        for inherited, (start, stop) in zip(heirs, pairwise(edges), strict=True)
    )


def divide(plan: Plan, microbatches: int) -> tuple[int, ...]:
    """Spread `microbatches` over the replicas so that the last one ends as early as possible.

    The plan's quotas tell how fast each replica is: with s stages, its quota of q microbatches
    takes one step, so one takes 1 / (q + s - 1) of it (1F1B), the first s times as long. As the
    scheduler chose the quotas, its view of speeds holds here too; and no replica gets more than
    its quota, so whatever memory has room for in a step has room for here.

    >>> grid = Layout.grid(dp=2, pp=1, tp=1, layers=1)
    >>> divide(Plan(version=0, layout=grid, quotas=(6, 3)), 3)
    (2, 1)
    """
    assert 0 <= microbatches <= plan.microbatches, "a step never grows"
    given = [0] * len(plan.quotas)
    ends = []
    for index, (quota, replica) in enumerate(zip(plan.quotas, plan.layout.replicas, strict=True)):
        if quota:
            stages = len(replica.stages)
            each = 1.0 / (quota + stages - 1)
            ends.append((stages * each, -quota, index, each))
    heapq.heapify(ends)
    for _ in range(microbatches):
        end, order, index, each = heapq.heappop(ends)
        given[index] += 1
        if given[index] < plan.quotas[index]:
            heapq.heappush(ends, (end + each, order, index, each))
    return tuple(given)


def _heir(ranks: Sequence[int], layout: Layout) -> int:
    """The replica of `layout` with most of `ranks`; the first of several."""
    shared = [len(set(ranks) & set(replica.ranks)) for replica in layout.replicas]
    return shared.index(max(shared))
