"""Stealing within a step: claims on the microbatches of a replica, and the choice of a victim.

All functions are pure. A replica computes its microbatches from the front of a queue; a replica
that has none left takes them from the back of the queue of the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

OWNER = 1
"""Added to the counter of a queue by its owner to claim the microbatch at the front."""
THIEF = 1 << 32
"""Added by another replica to claim the one at the back."""
_FORWARD_PART = 1.0 / 3.0
"""Of a microbatch's work, after which its replica takes from others, if it is its last one. The
gradient sum overlaps with the last backward pass, so no other may follow that pass."""


class Claims(Protocol):
    """Counters of the queues of one step, each changed atomically; 0 at first."""

    def add(self, replica: int, amount: int) -> Callable[[], int | None]:
        """Begin to add to the counter of a replica's queue; the result waits for its new value.

        None: unknown; the addition may or may not have been made.
        """
        ...

    def read(self, replicas: Sequence[int]) -> Mapping[int, int]:
        """Return the counters of these queues; those that are unknown are left out."""
        ...


@dataclass(frozen=True)
class MicrobatchQueue:
    """Microbatches of one replica in the order in which it computes them; the first is its own.

    Each later one is claimed by an addition to one counter, which holds the number of claims from
    the front (low 32 bits) and from the back. Only its first `len(order) - 1` additions claim
    something, so every microbatch is claimed at most once, whoever adds in whatever order.

    >>> queue = MicrobatchQueue((4, 5, 6))
    >>> queue.claimed(THIEF, THIEF), queue.claimed(THIEF + OWNER, OWNER)
    (6, 5)
    >>> queue.claimed(2 * THIEF + OWNER, THIEF) is None
    True
    """

    order: tuple[int, ...]

    def claimed(self, counter: int, amount: int) -> int | None:
        """Return the microbatch claimed by the addition of `amount` that gave this value."""
        front, back = _split(counter)
        if front + back >= len(self.order):
            return None
        return self.order[front] if amount == OWNER else self.order[-back]

    def pending(self, counter: int) -> tuple[int, ...]:
        """Return the microbatches that nobody has claimed."""
        front, back = _split(counter)
        return self.order[front + 1 : max(front + 1, len(self.order) - back)]

    def progress(self, counter: int, work: Sequence[float]) -> Progress:
        """Return the most that the owner can have done, with what is left to it.

        It claims the microbatch after the one that it is about to begin.
        """
        front, _ = _split(counter)
        done = sum(work[index] for index in self.order[:front])
        left = sum(work[index] for index in (self.order[front], *self.pending(counter)))
        return Progress(done, left)


@dataclass(frozen=True)
class Progress:
    """Work that a replica has done in a step, and that which is left to it."""

    done: float
    left: float

    @classmethod
    def before_backward(cls, begun: Sequence[int], work: Sequence[float]) -> Progress:
        """Progress before the backward pass of the last microbatch `begun`."""
        before, last = sum(work[index] for index in begun[:-1]), work[begun[-1]]
        return cls(before + _FORWARD_PART * last, (1.0 - _FORWARD_PART) * last)

    def with_left(self, work: float) -> Progress:
        """Progress of a replica that has `work` more to do."""
        return Progress(self.done, self.left + work)

    @property
    def until_end(self) -> float:
        """Time until it ends, over the time since the step began, at its pace in this step."""
        return self.left / self.done if self.done else inf


def choose_victim(
    own: Progress,
    queues: Mapping[int, MicrobatchQueue],
    counters: Mapping[int, int],
    work: Sequence[float],
    *,
    ahead: float,
) -> int | None:
    """Return the replica that ends last if a replica with progress `own` is to take work of it.

    It is, if the victim would end later than the thief does with the microbatch at the back of the
    victim's queue and `ahead` mean microbatches more. Both ends follow from the pace in this step:
    all replicas began it at the same time, so no clock is compared, and a replica that stalls or is
    slow for any reason shows it by its counter alone.
    """
    ends = {
        replica: queue.progress(counters[replica], work).until_end
        for replica, queue in queues.items()
        if replica in counters and queue.pending(counters[replica])
    }
    if not ends:
        return None
    victim = max(ends, key=lambda replica: (ends[replica], -replica))
    taken = work[queues[victim].pending(counters[victim])[-1]]
    margin = ahead * sum(work) / len(work)
    return victim if own.with_left(taken + margin).until_end <= ends[victim] else None


def _split(counter: int) -> tuple[int, int]:
    """Return the numbers of claims from the front and from the back."""
    return counter % THIEF, counter // THIEF
