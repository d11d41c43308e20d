"""Spread of a copy over several steps, where one step is shorter than the copy.

What was copied beside a step is brought up to date at its new holders with that step's gradients,
as GoCkpt does for checkpoints (arXiv 2511.07035).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch

from resihp.layout import Move, Param, Parameters

from ..process_groups.abortable import AbortableProcessGroup
from ..process_groups.transport import ProcessGroupTransport, Transport, complete
from ..step.shard import STATE_DTYPE
from .buffers import buffer_zeros
from .exchange import Pair
from .shared_memory import PeerLink

_PROBE_NUMEL = 1 << 20
_SAFETY = 2.0
"""Other transfers and training share the links."""


@dataclass(frozen=True)
class CopyPace:
    """Durations of a copy and of a step on one rank, by which all agree on a number of steps.

    copy_s      seconds that the copy takes on this rank
    step_s      seconds of its steps
    most_steps  over which it may be spread
    """

    copy_s: float = 0.0
    step_s: float = inf
    most_steps: float = inf

    def agree(self, group: AbortableProcessGroup) -> int:
        """Return the number of steps for all ranks of `group`: slowest copy, shortest step."""
        own = torch.tensor(
            [self.copy_s, -self.step_s, -self.most_steps], dtype=torch.float64, device=group.device
        )
        copy_s, step_s, most_steps = map(float, group.all_reduce_max(own).abs().tolist())
        needed = _SAFETY * copy_s / step_s if step_s else 1.0
        return max(1, math.ceil(min(needed, most_steps)))


def time_links(links: Mapping[Pair, PeerLink], rank: int) -> dict[int, float]:
    """Seconds that a byte takes to this rank, from each of its peers; all ranks call it.

    One transfer at a time on a rank, behind a barrier of its two ends.
    """
    seconds = {}
    for pair, link in sorted(links.items()):
        buffer = buffer_zeros(_PROBE_NUMEL, device=link.group.device)
        for source in pair:
            transport: Transport | None = link.memory.get(source)
            transport = transport or ProcessGroupTransport(link.group, source)
            link.group.all_reduce(torch.zeros(1, device=link.group.device))
            start = time.perf_counter()
            complete((transport.send if source == rank else transport.recv)([buffer]))
            if source != rank:
                seconds[source] = (time.perf_counter() - start) / buffer.nbytes
        link.group.all_reduce(torch.zeros(1, device=link.group.device))  # the buffer was read
    return seconds


def copy_seconds(
    planned: Sequence[Move], copies: int, rank: int, seconds_of: Mapping[int, float]
) -> float:
    """Seconds in which a rank receives `copies` tensors of its moves, one after the other.

    seconds_of  a byte, by the source
    """
    nbytes = copies * STATE_DTYPE.itemsize
    return sum(
        move.numel * nbytes * seconds_of[move.source] for move in planned if move.target == rank
    )


def segments(planned: Sequence[Move], parameters: Parameters, count: int) -> list[set[Param]]:
    """All parameters, in up to `count` groups of which about as much moves."""
    if count == 1:
        return [set(parameters.all)]
    moved = defaultdict[Param, int](int)
    for move in planned:
        moved[move.param] += move.numel
    total, before = sum(moved.values()), 0
    groups = defaultdict[int, set[Param]](set)
    for param in parameters.all:
        groups[min(count - 1, before * count // max(1, total))].add(param)
        before += moved[param]
    return [groups[index] for index in sorted(groups)]
