"""Adds up flat tensors of several ranks along the fixed tree, whoever holds which node."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..worlds.comm import Group
from .tree import Node, put


def sum_in_order(
    group: Group,
    index: int,
    own: Sequence[torch.Tensor],
    size: int,
    nodes_of: Sequence[Sequence[Node]],
    leaves: int,
) -> torch.Tensor:
    """The sum [size] of all leaves, the same bits on every rank. Collective over `group`.

    index     this rank's place in the group
    own       this rank's sums [size], one for each of its nodes
    nodes_of  the nodes of each rank of the group, in its order; all ranks know them

    Every rank adds up one slice of all nodes, then slices are shared: as many bytes as a ring
    all-reduce where each rank holds one node, and for k nodes (k + 1) / 2 times as many.
    """
    width = -(-size // len(group))
    slices = [range(i * width, min((i + 1) * width, size)) for i in range(len(group))]
    sent = [flat[part.start : part.stop] for part in slices for flat in own]
    mine = len(slices[index])
    received = torch.empty(mine * sum(map(len, nodes_of)))
    group.all_to_all(
        received,
        torch.cat(sent) if sent else torch.empty(0),
        [mine * len(held) for held in nodes_of],
        [len(part) * len(own) for part in slices],
    )
    added = torch.zeros(width)
    order = [node for held in nodes_of for node in held]
    added[:mine] = _added(order, received.split(mine), leaves) if mine else torch.empty(0)
    return torch.cat(group.all_gather(added))[:size]


def _added(order: Sequence[Node], parts: Sequence[torch.Tensor], leaves: int) -> torch.Tensor:
    """Node sums of one slice, rank after rank, added up along the tree."""
    by_node: dict[Node, torch.Tensor] = {}
    for node, part in zip(order, parts, strict=True):
        # The two copies of a tied parameter hold different parts of the same microbatches.
        by_node[node] = by_node[node].add_(part) if node in by_node else part
    held: dict[Node, torch.Tensor] = {}
    for node, part in by_node.items():
        put(held, node, part, leaves, torch.Tensor.add_)
    return held[0, leaves]
