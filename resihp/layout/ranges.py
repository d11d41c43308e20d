"""Ranges cut at one another's edges."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from .parameters import Range


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
