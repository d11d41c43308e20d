"""Microbatches that a replica computes in a step: assigned to it, or claimed from others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from resihp.contracts import Plan

from ..microbatches.assignment import Assignment, assignments_by_work
from ..microbatches.balancing import work_of_step
from ..microbatches.stealing import (
    OWNER,
    THIEF,
    Claims,
    MicrobatchQueue,
    Progress,
    choose_victim,
)
from ..process_groups.layout_groups import LayoutGroups
from .setup import Setup

_MOST_READ = 16
"""Replicas from which one takes, so that a step costs as little in a large job."""


class StepMicrobatches:
    """Microbatches of this rank in one step, or in the remainder of one.

    `begin`, then compute one `following` after the other, with `ask` before its first pass,
    `advance` before its last one and `check` after it; unless `is_one_by_one`, compute all of `own`
    at once. All ranks of a replica get the same.

    shares      assignment of each replica
    is_claimed  replicas of one stage take microbatches from each other
    following   after the present one; None: no more
    is_stopped  `following` is not to be begun, after a failure elsewhere
    """

    def __init__(
        self,
        setup: Setup,
        groups: LayoutGroups,
        plan: Plan,
        shares: tuple[Assignment, ...],
    ) -> None:
        self._setup, self._groups, self._plan = setup, groups, plan
        self.shares = shares
        self.is_claimed = self.is_stopped = False
        self.following: int | None = None
        self._source = MicrobatchSource()

    @property
    def own(self) -> tuple[int, ...]:
        """Microbatches assigned to this rank's replica, ascending."""
        return self.shares[self._groups.place.dp].todo

    @property
    def is_one_by_one(self) -> bool:
        """True for a replica of one stage: each microbatch is done before the next one begins."""
        groups = self._groups
        return groups.before is None and groups.after is None and groups.chunks == 1

    def begin(self, step: int, claims: Claims | None) -> None:
        """Assign by work where the setup has it; claim microbatches where there are `claims`."""
        work = [1.0] * self._plan.microbatches
        if self._setup.work is not None:
            work = work_of_step(self._setup.work, step, self._plan.microbatches)
            self.shares = assignments_by_work(self.shares, self._plan.quotas, work)
        self.is_claimed = claims is not None
        if not (self.is_one_by_one and self.own):
            return
        place, queues = self._groups.place, self._queues(work)
        order = queues[place.dp].order
        self.following = order[0]
        if claims is None:
            self._source = AssignedMicrobatches(order[1:])
        elif place.tp == 0:
            ahead = self._setup.steal_ahead or 0.0
            self._source = ClaimedMicrobatches(claims, place.dp, queues, work, ahead=ahead)

    def ask(self) -> None:
        """Ask for the microbatch after the one that is about to begin, without waiting."""
        self._source.ask()

    def advance(self, is_broken: Callable[[], bool]) -> bool:
        """Find the microbatch after the present one, before its last pass; True if there is none.

        Collective over the stage if microbatches are claimed.
        """
        found = self._source.next()
        if self.is_claimed:
            stops = self._may_stop_early and is_broken()
            index, stopped = self._largest(-1 if found is None else found, int(stops))
            found = None if index < 0 else index
            self.is_stopped = bool(stopped) and found is not None
        self.following = found
        return found is None

    def check(self, is_broken: Callable[[], bool]) -> None:
        """Stop before `following` if another replica has failed; collective over the stage.

        Where microbatches are claimed, `advance` has checked.
        """
        if self.following is not None and self._may_stop_early and not self.is_claimed:
            self.is_stopped = self._largest(int(is_broken())) == [1]

    def stolen(self, computed_by: Sequence[int]) -> int:
        """Return the number of microbatches that another replica computed than was assigned."""
        return sum(
            computed_by[index] != replica
            for replica, share in enumerate(self.shares)
            for index in share.todo
        )

    @property
    def _may_stop_early(self) -> bool:
        """Return whether to check for a failure between two microbatches.

        Only if another replica has several ranks: a failed replica of one rank has no survivors.
        """
        layout, dp = self._groups.layout, self._groups.place.dp
        return any(len(other.ranks) > 1 for i, other in enumerate(layout.replicas) if i != dp)

    def _largest(self, *values: int) -> list[int]:
        """Return the largest of each value over the ranks of the stage."""
        if len(self._groups.tp) == 1:
            return list(values)
        told = torch.tensor(values, device=self._groups.device)
        largest: list[int] = self._groups.tp.all_reduce_max(told).tolist()
        return largest

    def _queues(self, work: Sequence[float]) -> dict[int, MicrobatchQueue]:
        """Return the microbatches of each replica of one stage in the order of computation.

        The longest come first if others may take the last ones.
        """
        queues = {}
        for replica, share in enumerate(self.shares):
            held = self._groups.layout.replicas[replica]
            if share.todo and len(held.stages) == held.chunks == 1:
                order = share.todo
                if self.is_claimed:
                    order = tuple(sorted(order, key=lambda index: (-work[index], index)))
                queues[replica] = MicrobatchQueue(order)
        return queues


class MicrobatchSource:
    """Microbatches of a replica after its first one; none on a rank that follows another one."""

    def ask(self) -> None:
        """Ask for the next one before the forward pass of the present one, if that takes time."""

    def next(self) -> int | None:
        """Return the next microbatch before the backward pass of the present one; None: no more."""
        return None


class AssignedMicrobatches(MicrobatchSource):
    """Microbatches that were assigned before the step."""

    def __init__(self, rest: Iterable[int]) -> None:
        self._rest = iter(rest)

    def next(self) -> int | None:
        """Return the next one."""
        return next(self._rest, None)


class ClaimedMicrobatches(MicrobatchSource):
    """Microbatches from the front of the replica's own queue, then from the back of others'.

    It ends once the replica is to take none. A claim without an answer is none: the microbatch may
    have been claimed by another replica. Those of its own queue are then left to the count.

    replica  of this rank, which is the only one of its stage to claim
    queues   of the replicas that take part, by index
    work     of each microbatch of the step
    ahead    threshold of `choose_victim`
    """

    def __init__(
        self,
        claims: Claims,
        replica: int,
        queues: Mapping[int, MicrobatchQueue],
        work: Sequence[float],
        *,
        ahead: float,
    ) -> None:
        self._claims, self._replica, self._work, self._ahead = claims, replica, work, ahead
        self._own = queues[replica]
        # Those behind this one, in a circle. A queue of one microbatch is never claimed from.
        behind = sorted(queues, key=lambda other: (other <= replica, other))
        others = [other for other in behind if other != replica and len(queues[other].order) > 1]
        self._others = {other: queues[other] for other in others[:_MOST_READ]}
        self._begun = [self._own.order[0]]
        self._is_own_empty = len(self._own.order) == 1
        self._asked: Callable[[], int | None] | None = None

    def ask(self) -> None:
        """Begin to claim the next microbatch of the own queue."""
        if not self._is_own_empty and self._asked is None:
            self._asked = self._claims.add(self._replica, OWNER)

    def next(self) -> int | None:
        """Claim the next microbatch."""
        found = self._next_own()
        if found is None:
            found = self._steal()
        if found is not None:
            self._begun.append(found)
        return found

    def _next_own(self) -> int | None:
        """Return what was asked for; None if the own queue is empty, and from then on."""
        self.ask()
        if self._asked is None:
            return None
        counter, self._asked = self._asked(), None
        self._is_own_empty = counter is None or not self._own.pending(counter)
        return None if counter is None else self._own.claimed(counter, OWNER)

    def _take(self, victim: int) -> int | None:
        """Claim from the queue of another replica; None if it is empty, and from then on."""
        counter = self._claims.add(victim, THIEF)()
        found = None if counter is None else self._others[victim].claimed(counter, THIEF)
        if found is None:
            del self._others[victim]
        return found

    def _steal(self) -> int | None:
        own = Progress.before_backward(self._begun, self._work)
        while self._others:
            counters = self._claims.read(list(self._others))
            self._others = {
                replica: queue
                for replica, queue in self._others.items()
                if replica in counters and queue.pending(counters[replica])
            }
            victim = choose_victim(own, self._others, counters, self._work, ahead=self._ahead)
            if victim is None:
                return None
            found = self._take(victim)
            if found is not None:
                return found
        return None
