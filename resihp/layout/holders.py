"""Who holds which range of each parameter, and which of them has sent least so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from heapq import heapify, heapreplace

from .parameters import Param, Range
from .ranges import refine

_Queue = list[tuple[int, int]]
"""Heap of (elements sent, rank). Ranks send from many, so that an entry may tell of less."""


class Holders:
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
