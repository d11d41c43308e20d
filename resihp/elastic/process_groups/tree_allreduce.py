"""Deterministic all-reduce: flat tensors of several ranks summed along the fixed tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from ..microbatches.tree_sum import Node, put
from .abortable import AbortableProcessGroup


def tree_allreduce(
    group: AbortableProcessGroup,
    index: int,
    own: Sequence[Sequence[torch.Tensor]],
    size: int,
    nodes_of: Sequence[Sequence[Node]],
    leaves: int,
    *,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return the sum [size] of all leaves, equal to the bit on every rank; collective over `group`.

    index     position of this rank in the group
    own       this rank's sums, one for each of its nodes: tensors with `size` elements, fp32
    nodes_of  the nodes of each rank of the group, in its order; all ranks know them
    device    of the tensors, which a rank without nodes cannot tell; None: the group's

    Every rank sums one slice of all nodes, then slices are all-gathered: as many bytes as in a ring
    all-reduce where each rank holds one node, (k + 1) / 2 times as many for k nodes.
    """
    device = device or group.device
    width = -(-size // len(group))
    slices = [range(i * width, min((i + 1) * width, size)) for i in range(len(group))]
    flats = [torch.cat([tensor.reshape(-1) for tensor in one]) for one in own]
    sent = [flat[part.start : part.stop] for part in slices for flat in flats]
    mine = len(slices[index])
    received = torch.empty(mine * sum(map(len, nodes_of)), dtype=torch.float32, device=device)
    group.all_to_all(
        received,
        torch.cat(sent) if sent else received.new_empty(0),
        [mine * len(held) for held in nodes_of],
        [len(part) * len(own) for part in slices],
    )
    added = received.new_zeros(width)
    if mine:
        added[:mine] = _added(nodes_of, received.split(mine), leaves)
    return torch.cat(group.all_gather(added))[:size]


def _added(
    nodes_of: Sequence[Sequence[Node]], parts: Sequence[torch.Tensor], leaves: int
) -> torch.Tensor:
    """Sum the nodes of one slice, given rank by rank, along the tree.

    The second copies of a tied parameter hold other parts of the same leaves: they are summed in a
    second tree, which is added at the end and has gaps where a replica has a single copy.
    """
    trees: list[tuple[set[int], dict[Node, torch.Tensor]]] = []
    left = iter(parts)
    for nodes in nodes_of:
        covered = {leaf for node in nodes for leaf in range(*node)}
        free = [tree for tree in trees if tree[0].isdisjoint(covered)]
        if not free:
            free = [(set(), {})]
            trees += free
        seen, tree = free[0]
        seen |= covered
        for node in nodes:
            put(tree, node, next(left), leaves, torch.Tensor.add_)
    return reduce(torch.Tensor.add_, [tree[node] for _, tree in trees for node in sorted(tree)])
