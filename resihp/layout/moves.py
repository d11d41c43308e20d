"""Who holds what, and what must move from one layout to another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from heapq import heapify, heapreplace

from resihp.contracts import Layout, StateLostError

from .parameters import Param, Parameters, Range, refine, without


@dataclass(frozen=True)
class Move:
    """Rows [start, stop) of a parameter go from one rank to another."""

    param: Param
    start: int
    stop: int
    source: int
    target: int

    @property
    def numel(self) -> int:
        """Elements moved (of the parameter; its optimizer state moves along with it)."""
        return (self.stop - self.start) * self.param.row_numel


def holdings(layout: Layout, parameters: Parameters) -> dict[int, dict[Param, Range]]:
    """For every working rank, the range of each parameter that it holds."""
    held: dict[int, dict[Param, Range]] = {}
    for replica in layout.replicas:
        for place, stage in enumerate(replica.stages):
            ranges = [(p, p.ranges(stage.shares)) for p in parameters.of_stage(replica, place)]
            for index, rank in enumerate(stage.ranks):
                held[rank] = {param: r[index] for param, r in ranges if r[index][0] < r[index][1]}
    return held


def moves(
    old: Layout, new: Layout, parameters: Parameters, *, lost: Collection[int] = ()
) -> tuple[Move, ...]:
    """The moves that turn `old` into `new`, when the ranks in `lost` can send nothing any more.

    Nothing that a rank already holds is moved, so the bytes are the least possible; among the
    holders of a range, the one that sends least so far sends it. Deterministic. Raises
    `StateLostError` naming the ranges that no surviving rank holds.
    """
    before = {r: held for r, held in holdings(old, parameters).items() if r not in lost}
    holders = SenderSelector(before)
    planned: list[Move] = []
    gone: set[str] = set()
    for target, held in sorted(holdings(new, parameters).items()):
        for param, span in held.items():
            own = before.get(target, {}).get(param)
            for need in without(span, own):
                for (start, stop), source in holders.senders(param, need):
                    if source is None:
                        gone.add(f"{param.key}[{start}:{stop}]")
                    else:
                        planned.append(Move(param, start, stop, source, target))
    if gone:
        shown = ", ".join(sorted(gone)[:6])
        raise StateLostError(f"no surviving rank holds {shown} ({len(gone)} ranges in all)")
    return tuple(planned)


def least_numel(
    old: Layout, new: Layout, parameters: Parameters, *, lost: Collection[int] = ()
) -> int:
    """Lower bound of the elements that must move: what each rank holds after and not before."""
    before = {r: held for r, held in holdings(old, parameters).items() if r not in lost}
    return sum(
        sum(stop - start for start, stop in without(span, before.get(rank, {}).get(param)))
        * param.row_numel
        for rank, held in holdings(new, parameters).items()
        for param, span in held.items()
    )


def writers(layout: Layout, parameters: Parameters) -> dict[int, list[tuple[Param, Range]]]:
    """For every working rank, what it writes when the whole state is written exactly once.

    What several ranks hold is written by the one that writes least so far. Deterministic.
    """
    holders = SenderSelector(holdings(layout, parameters))
    written: dict[int, list[tuple[Param, Range]]] = {rank: [] for rank in layout.ranks}
    for param in parameters.all:
        for span, rank in holders.senders(param, (0, param.size)):
            assert rank is not None, "every layout holds every range"
            written[rank].append((param, span))
    return written


_Queue = list[tuple[int, int]]
"""Heap of (elements sent, rank). Ranks send from many, so that an entry may tell of less."""


class SenderSelector:
    """Picks a sender for one range after the other, so that all send about as much.

    In a large job thousands of ranks hold the same range, and thousands lack it: those that hold
    the same stand in one queue, however many parameters that is true of.
    """

    def __init__(self, held_by: Mapping[int, Mapping[Param, Range]]) -> None:
        by_span: dict[Param, dict[Range, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, held in sorted(held_by.items()):
            for param, span in held.items():
                by_span[param][span].append(rank)
        self._sent = dict.fromkeys(held_by, 0)
        queues: dict[tuple[int, ...], _Queue] = {}
        self._queues: dict[Param, dict[Range, _Queue]] = {}
        for param, spans in by_span.items():
            self._queues[param] = {
                span: queues.setdefault(tuple(ranks), [(0, rank) for rank in ranks])
                for span, ranks in spans.items()
            }
        for queue in queues.values():
            heapify(queue)
        self._routes: dict[tuple[Param, Range], list[tuple[Range, Collection[_Queue]]]] = {}

    def senders(self, param: Param, need: Range) -> list[tuple[Range, int | None]]:
        """Each part of `need`, with the rank that sends it; None where nobody holds it.

        It is the one that has sent least, or of those the first, and counts as sent from now on.
        """
        return [
            (span, self._lightest(queues, (span[1] - span[0]) * param.row_numel))
            for span, queues in self._route(param, need)
        ]

    def _route(self, param: Param, need: Range) -> list[tuple[Range, Collection[_Queue]]]:
        """The parts of `need`, and the queues of those who hold all of each."""
        route = self._routes.get((param, need))
        if route is None:
            held = self._queues.get(param, {})
            route = self._routes[param, need] = [
                (part, [queue for (a, b), queue in held.items() if a <= part[0] and part[1] <= b])
                for part in refine(need, held)
            ]
        return route

    def _lightest(self, queues: Collection[_Queue], numel: int) -> int | None:
        chosen = min((self._first(queue) for queue in queues), default=None)
        if chosen is None:
            return None
        self._sent[chosen[1]] += numel
        return chosen[1]

    def _first(self, queue: _Queue) -> tuple[int, int]:
        """The head of a queue, when those that have sent since have moved back in it."""
        while queue[0][0] < (sent := self._sent[queue[0][1]]):
            heapreplace(queue, (sent, queue[0][1]))
        return queue[0]
