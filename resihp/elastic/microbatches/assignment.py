"""Assignment of a step's microbatches to replicas, whole or after a loss."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from resihp.contracts import Layout, Plan

from .balancing import assign_by_work, speeds_of_quotas
from .ledger import Spans, SurvivingSum, indices, spans


@dataclass(frozen=True)
class Assignment:
    """Microbatches of one replica in a step.

    inherited  gradient sums taken over from the previous generation, each by one replica
    todo       microbatches to compute, ascending
    """

    inherited: tuple[SurvivingSum, ...] = ()
    todo: tuple[int, ...] = ()

    @property
    def begun(self) -> Spans:
        """Microbatches in its sum at the start."""
        return spans(index for kept in self.inherited for index in indices(kept.finished))

    @property
    def whole(self) -> Spans:
        """Microbatches in its sum at the end."""
        return spans((*indices(self.begun), *self.todo))


def full_assignments(plan: Plan) -> tuple[Assignment, ...]:
    """Return the assignments of a whole step."""
    return remaining_assignments(plan, plan.layout, ())


def remaining_assignments(
    plan: Plan, before: Layout, kept: Sequence[SurvivingSum]
) -> tuple[Assignment, ...]:
    """Return the assignments of what is left of a step besides the sums `kept`.

    Each kept sum (of the layout `before`) goes to the replica of `plan` that has most of its ranks,
    so that least moves. Deterministic: every rank computes it for itself.
    """
    successors: list[list[SurvivingSum]] = [[] for _ in plan.quotas]
    for one in kept:
        ranks = set(before.replicas[one.replica].ranks)
        shared = [len(ranks & set(replica.ranks)) for replica in plan.layout.replicas]
        successors[shared.index(max(shared))].append(one)
    done = {index for one in kept for index in indices(one.finished)}
    left = [index for index in range(plan.microbatches) if index not in done]
    edges = [0, *accumulate(divide(plan, len(left)))]
    return tuple(
        Assignment(tuple(inherited), tuple(left[start:stop]))
        for inherited, (start, stop) in zip(successors, pairwise(edges), strict=True)
    )


def assignments_by_work(
    counted: Sequence[Assignment],
    quotas: Sequence[int],
    work: Sequence[float],
    *,
    speeds: Sequence[float] = (),
    may_idle: bool = True,
) -> tuple[Assignment, ...]:
    """Return the assignments of the same microbatches by their work; kept sums stay where they are.

    counted   assignments by count
    quotas    of a whole step; a replica without quota gets nothing
    work      of each microbatch of the step
    speeds    of each replica, 0.0 where it is not known; then the quotas are the measure
    may_idle  replicas may have nothing to compute; else each with a quota has a microbatch

    >>> counted = (Assignment(todo=(0, 1)), Assignment(todo=(2, 3)))
    >>> [share.todo for share in assignments_by_work(counted, (2, 2), (3.0, 3.0, 1.0, 1.0))]
    [(0, 2), (1, 3)]
    """
    left = [index for share in counted for index in share.todo]
    taking = [place for place, quota in enumerate(quotas) if quota]
    known = [speeds[place] for place in taking] if speeds else []
    found = assign_by_work(
        [work[index] for index in left],
        known if known and all(known) else speeds_of_quotas([quotas[place] for place in taking]),
        [len(counted[place].todo) for place in taking],
        may_idle=may_idle,
    )
    todo = dict(zip(taking, found, strict=True))
    return tuple(
        replace(share, todo=tuple(left[index] for index in todo.get(place, ())))
        for place, share in enumerate(counted)
    )


def divide(plan: Plan, microbatches: int) -> tuple[int, ...]:
    """Spread `microbatches` over the replicas so that the last replica ends as early as possible.

    The quotas imply the speed of a replica: with s stages, its quota of q microbatches takes one
    step, so one microbatch takes 1 / (q + s - 1) of it (1F1B), and the first one s times as long.
    A replica gets at most its quota, so memory that suffices for a step suffices here.

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
