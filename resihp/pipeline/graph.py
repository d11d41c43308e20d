"""Longest paths through a graph of timed operations, for many replicas and cases at once.

One template holds the operations of a replica. Arrays have the axes [operation, replica, case]:
every replica and every case (a step, a what-if scenario, or both) shares the template, so that one
pass over its levels replays them all.

An operation starts when the last of its predecessors ends. Operations of one group wait for each
other: each ends at `latest start in the group + its own duration`, which is how a transfer or a
collective behaves. A synced group waits for its members in all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import ContractError

Times = NDArray[np.floating]
_BLOCK = 1 << 18  # cells that `makespan` works on at a time


class _Level(NamedTuple):
    """Operations that can be timed together, as positions in level order."""

    start: int
    stop: int
    preds: list[NDArray[np.intp]]  # k-th predecessor of every operation; the first stands in
    members: list[NDArray[np.intp]]  # k-th member of every group, relative to `start`
    group: NDArray[np.intp]  # group of every operation, relative to the level
    synced: NDArray[np.intp]  # groups that wait for all replicas


class Graph:
    """Operations, what each waits for, and which of them wait for each other.

    predecessors  for every operation the operations that must have ended before it starts
    groups        lists of operations that wait for each other; all others stand alone
    synced        indices into `groups` of those that wait for every replica
    """

    def __init__(
        self,
        predecessors: Sequence[Sequence[int]],
        groups: Sequence[Sequence[int]] = (),
        synced: Sequence[int] = (),
    ) -> None:
        self.size = len(predecessors)
        group_of = np.full(self.size, -1, np.intp)
        for index, group in enumerate(groups):
            group_of[list(group)] = index
        alone = np.flatnonzero(group_of < 0)
        group_of[alone] = len(groups) + np.arange(alone.size)
        is_synced = np.zeros(int(group_of.max(initial=-1)) + 1, bool)
        is_synced[list(synced)] = True
        levels = _levels(predecessors, group_of)
        self._order = np.lexsort((group_of, levels[group_of]))
        self._rank = np.empty(self.size, np.intp)
        self._rank[self._order] = np.arange(self.size)
        self._levels: list[_Level] = []
        of_operation = levels[group_of][self._order]
        edges = [*np.flatnonzero(np.diff(of_operation, prepend=-1)).tolist(), self.size]
        for start, stop in pairwise(edges):
            operations = self._order[start:stop]
            waits_for = [
                [int(self._rank[p]) for p in predecessors[op]] or [self.size] for op in operations
            ]
            here, inverse = np.unique(group_of[operations], return_inverse=True)
            members: list[list[int]] = [[] for _ in here]
            for position, group in enumerate(inverse.tolist()):
                members[group].append(position)
            waits = np.flatnonzero(is_synced[here])
            self._levels.append(
                _Level(start, stop, _columns(waits_for), _columns(members), inverse, waits)
            )

    def replay(self, duration: Times, delay: Times | None = None) -> tuple[Times, Times]:
        """Start and end of every operation, from durations [operation, replica, case].

        An operation starts `delay` (of the same shape) after all that it waits for. Time 0 is the
        start of every case. The unit and the dtype are those of `duration`.
        """
        starts = np.empty_like(duration)
        ends = self._run(duration, delay, starts)
        return starts, ends[self._rank]

    def makespan(
        self,
        duration: Times,
        delay: Times | None = None,
        *,
        until: NDArray[np.intp] | None = None,
    ) -> Times:
        """End of the last operation of every case, [case], or of the last of `until`; see `replay`.

        Works on a few cases at a time, which takes little memory and stays in the cache.
        """
        cases = duration.shape[-1]
        block = max(_BLOCK // max(duration[..., :1].size, 1), 1)
        last = np.empty(cases, duration.dtype)
        for start in range(0, cases, block):
            part = slice(start, start + block)
            late = None if delay is None else delay[..., part]
            ends = self._run(duration[..., part], late)
            last[part] = (ends if until is None else ends[self._rank[until]]).max(axis=(0, 1))
        return last

    def _run(
        self, duration: Times, delay: Times | None = None, starts: Times | None = None
    ) -> Times:
        """Ends in level order, and a row of zeros; fills `starts` in the order of operations."""
        if duration.ndim != 3 or duration.shape[0] != self.size:
            raise ContractError("duration", f"must have the shape [{self.size}, replicas, cases]")
        ends = np.zeros((self.size + 1, *duration.shape[1:]), duration.dtype)
        for level in self._levels:
            operations = self._order[level.start : level.stop]
            start = ends[level.preds[0]]
            for column in level.preds[1:]:
                np.maximum(start, ends[column], out=start)
            if delay is not None:
                start += delay[operations]
            if starts is not None:
                starts[operations] = start
            rows = ends[level.start : level.stop]
            np.add(_ready(start, level), duration[operations], out=rows)
        return ends


def _ready(start: Times, level: _Level) -> Times:
    """Time at which all members of its group have started, for every operation of a level."""
    if len(level.members) == 1 and not level.synced.size:
        return start
    ready = start[level.members[0]]
    for column in level.members[1:]:
        np.maximum(ready, start[column], out=ready)
    if level.synced.size:
        ready[level.synced] = ready[level.synced].max(axis=1, keepdims=True)
    return ready[level.group]


def _levels(predecessors: Sequence[Sequence[int]], group_of: NDArray[np.intp]) -> NDArray[np.intp]:
    """Level of every group: one more than the highest level among what its members wait for."""
    count = int(group_of.max(initial=-1)) + 1
    levels = np.zeros(count, np.intp)
    waiting = [0] * count
    successors: list[list[int]] = [[] for _ in range(count)]
    groups = group_of.tolist()
    for operation, before in enumerate(predecessors):
        for predecessor in before:
            waiting[groups[operation]] += 1
            successors[groups[predecessor]].append(groups[operation])
    ready = [group for group in range(count) if not waiting[group]]
    for group in ready:  # grows while it is walked
        for successor in successors[group]:
            levels[successor] = max(levels[successor], levels[group] + 1)
            waiting[successor] -= 1
            if not waiting[successor]:
                ready.append(successor)
    if len(ready) < count:
        raise ContractError("predecessors", "the operations wait for each other in a circle")
    return levels


def _columns(lists: list[list[int]]) -> list[NDArray[np.intp]]:
    """Ragged lists as columns; a list that is too short repeats its first entry."""
    width = max(map(len, lists))
    padded = [entries + entries[:1] * (width - len(entries)) for entries in lists]
    return list(np.array(padded, np.intp).T.copy())
