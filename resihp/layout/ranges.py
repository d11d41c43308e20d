"""Who holds which range, and ranges cut at one another's edges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from .parameters import Param, Range


def holders_of(
    held_by: Mapping[int, Mapping[Param, Range]],
) -> dict[Param, list[tuple[Range, int]]]:
    """Who holds which range of each parameter, ranks ascending."""
    holders: dict[Param, list[tuple[Range, int]]] = defaultdict(list)
    for rank, held in sorted(held_by.items()):
        for param, span in held.items():
            holders[param].append((span, rank))
    return holders


def without(span: Range, held: Range | None) -> list[Range]:
    """The parts of `span` outside `held`."""
    if held is None:
        return [span]
    parts = [(span[0], min(span[1], held[0])), (max(span[0], held[1]), span[1])]
    return [(start, stop) for start, stop in parts if start < stop]


def refine(span: Range, cuts: Iterable[Range]) -> list[Range]:
    """`span` cut at every edge in `cuts` that lies inside it."""
    inner = {edge for cut in cuts for edge in cut if span[0] < edge < span[1]}
    return list(pairwise([span[0], *sorted(inner), span[1]]))


def lightest(
    holders: Sequence[tuple[Range, int]], span: Range, sent: Mapping[int, int]
) -> int | None:
    """Of those who hold all of `span`, the rank that has `sent` least; None if there is none."""
    able = [rank for (a, b), rank in holders if a <= span[0] and span[1] <= b]
    return min(able, key=lambda rank: (sent.get(rank, 0), rank), default=None)
