"""Moves of state between two layouts, and the writers of a complete state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from resihp.contracts import Layout, StateLostError

from .parameters import Param, Parameters, Range, refine, without
from .shards import StateCopies, StateRanges, state_ranges

_Queue = list[tuple[int, int]]
"""Heap of (elements sent, rank). A rank may be in several heaps, so entries can be out of date."""


@dataclass(frozen=True)
class Move:
    """Transfer of rows [start, stop) of a parameter from one rank to another."""

    param: Param
    start: int
    stop: int
    source: int
    target: int

    @property
    def numel(self) -> int:
        """Parameter elements moved; their optimizer state moves with them."""
        return (self.stop - self.start) * self.param.row_numel


def moves(
    old: Layout,
    new: Layout,
    parameters: Parameters,
    *,
    lost: Collection[int] = (),
    copies: StateCopies | None = None,
) -> tuple[Move, ...]:
    """Moves that turn `old` into `new` when the ranks in `lost` cannot send.

    copies  of the optimizer state of each range, which moves with the parameter; None: on all
            ranks that hold the parameter

    A rank receives only what it does not hold, so the number of bytes is minimal; among the
    holders of a range, the one that has sent least sends it. Deterministic. Raises
    `StateLostError` with the ranges that no surviving rank holds.
    """
    before = _alive(old, parameters, lost, copies)
    selector = SenderSelector(before)
    planned: list[Move] = []
    missing: set[str] = set()
    for target, held in sorted(state_ranges(new, parameters, copies).items()):
        for param, spans in held.items():
            for need in _needs(spans, before.get(target, {}).get(param, ())):
                for (start, stop), source in selector.senders(param, need):
                    if source is None:
                        missing.add(f"{param.key}[{start}:{stop}]")
                    else:
                        planned.append(Move(param, start, stop, source, target))
    if missing:
        shown = ", ".join(sorted(missing)[:6])
        raise StateLostError(f"no surviving rank holds {shown} ({len(missing)} ranges in all)")
    return tuple(planned)


def least_numel(
    old: Layout,
    new: Layout,
    parameters: Parameters,
    *,
    lost: Collection[int] = (),
    copies: StateCopies | None = None,
) -> int:
    """Lower bound of the elements to move: those that a rank holds after and not before."""
    before = _alive(old, parameters, lost, copies)
    return sum(
        (stop - start) * param.row_numel
        for rank, held in state_ranges(new, parameters, copies).items()
        for param, spans in held.items()
        for start, stop in _needs(spans, before.get(rank, {}).get(param, ()))
    )


def writers(
    layout: Layout, parameters: Parameters, copies: StateCopies | None = None
) -> dict[int, list[tuple[Param, Range]]]:
    """Ranges that each rank writes, so that the whole state is written exactly once.

    Of several holders of a range, the one that has written least writes it. Deterministic.
    """
    selector = SenderSelector(state_ranges(layout, parameters, copies))
    written: dict[int, list[tuple[Param, Range]]] = {rank: [] for rank in layout.ranks}
    for param in parameters.all:
        for span, rank in selector.senders(param, (0, param.size)):
            assert rank is not None, "every layout holds every range"
            written[rank].append((param, span))
    return written


def _alive(
    layout: Layout, parameters: Parameters, lost: Collection[int], copies: StateCopies | None
) -> dict[int, StateRanges]:
    held = state_ranges(layout, parameters, copies)
    return {rank: ranges for rank, ranges in held.items() if rank not in lost}


def _needs(spans: Sequence[Range], held: Sequence[Range]) -> list[Range]:
    """Parts of `spans` outside all ranges `held`."""
    for one in held:
        spans = [part for span in spans for part in without(span, one)]
    return [*spans]


class SenderSelector:
    """Greedy choice of a sender for one range after another that balances the elements sent.

    Ranks that hold the same range share one heap, whatever the number of parameters: in a large
    job thousands of ranks hold a range and thousands need it.
    """

    def __init__(self, held_by: Mapping[int, StateRanges]) -> None:
        by_span: dict[Param, dict[Range, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, held in sorted(held_by.items()):
            for param, ranges in held.items():
                for span in ranges:
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
        """Parts of `need`, each with the rank that sends it; None where no rank holds it.

        Selects the holder that has sent least (of equals, the lowest rank) and counts the part as
        sent.
        """
        return [
            (span, self._least_loaded(queues, (span[1] - span[0]) * param.row_numel))
            for span, queues in self._route(param, need)
        ]

    def _route(self, param: Param, need: Range) -> list[tuple[Range, Collection[_Queue]]]:
        """Parts of `need`, each with the heaps of the ranks that hold all of it."""
        route = self._routes.get((param, need))
        if route is None:
            held = self._queues.get(param, {})
            route = self._routes[param, need] = [
                (part, [queue for (a, b), queue in held.items() if a <= part[0] and part[1] <= b])
                for part in refine(need, held)
            ]
        return route

    def _least_loaded(self, queues: Collection[_Queue], numel: int) -> int | None:
        chosen = min((self._head(queue) for queue in queues), default=None)
        if chosen is None:
            return None
        self._sent[chosen[1]] += numel
        return chosen[1]

    def _head(self, queue: _Queue) -> tuple[int, int]:
        """Head of a heap after its outdated entries are updated."""
        while queue[0][0] < (sent := self._sent[queue[0][1]]):
            heapreplace(queue, (sent, queue[0][1]))
        return queue[0]
