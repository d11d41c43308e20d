"""Fixed order of summation: equal bits for any assignment of microbatches to replicas.

Microbatches are the leaves of a binary tree; a node is the sum of its left half and its right
half, in that order. The sum of a set of microbatches is held as sums of the largest nodes inside
the set: at most 2 log2(n) for n consecutive ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Node = tuple[int, int]
"""Microbatches [start, stop). Its width before the last leaf cuts it is a power of two."""

T = TypeVar("T")


def parent(node: Node, leaves: int) -> tuple[Node, Node, Node]:
    """Return the parent of `node` and its halves; the right half may be empty at the end.

    >>> parent((2, 3), 6)
    ((2, 4), (2, 3), (3, 4))
    >>> parent((4, 6), 6)
    ((0, 6), (0, 4), (4, 6))
    """
    start, stop = node
    width = 1
    while start + width < stop:
        width *= 2
    while True:
        above = start // (2 * width) * 2 * width
        middle = min(above + width, leaves)
        whole = (above, min(above + 2 * width, leaves))
        if whole != node:
            return whole, (above, middle), (middle, whole[1])
        width *= 2


def put(held: dict[Node, T], node: Node, value: T, leaves: int, add: Callable[[T, T], T]) -> None:
    """Insert the sum of `node` into `held`, and merge all pairs of halves that are complete.

    `add(left, right)` may reuse the memory of both.
    """
    while node != (0, leaves):
        whole, left, right = parent(node, leaves)
        other = right if node == left else left
        if other not in held:
            break
        value = add(value, held.pop(right)) if node == left else add(held.pop(left), value)
        node = whole
    assert node not in held, f"microbatches {node} are summed twice"
    held[node] = value


def nodes(microbatches: Iterable[int], leaves: int) -> tuple[Node, ...]:
    """Return the largest nodes that cover a set of microbatches, ascending.

    >>> nodes(range(1, 6), 6)
    ((1, 2), (2, 4), (4, 6))
    """
    held: dict[Node, None] = {}
    for index in microbatches:
        put(held, (index, index + 1), None, leaves, lambda left, right: None)
    return tuple(sorted(held))
