"""Records of a message: those of each step, those that are passes, and those that came before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Op, TelemetryBatch

from ..arrays import ODD, Bools, Ints


def is_pass(op: NDArray[np.integer]) -> Bools:
    """Mask of the records of forward and backward passes."""
    result: Bools = (op == Op.FORWARD) | (op == Op.BACKWARD)
    return result


def by_step(batch: TelemetryBatch) -> Iterator[tuple[int, TelemetryBatch]]:
    """The records of each step, in the order of steps."""
    if (batch.step[1:] < batch.step[:-1]).any():
        batch = batch.select(np.argsort(batch.step, kind="stable"))
    starts = [0, *(np.flatnonzero(np.diff(batch.step)) + 1).tolist(), len(batch)]
    for start, stop in pairwise(starts):
        if start < stop:
            part = batch if stop - start == len(batch) else batch.select(slice(start, stop))
            yield int(part.step[0]), part


@dataclass
class KnownRecords:
    """Records of an open step by their keys, in parts; `by_rank` lists the parts of each rank. One
    that is sent twice is known the second time."""

    keys: list[Ints] = field(default_factory=list)
    by_rank: dict[int, list[int]] = field(default_factory=dict)

    def add(self, part: TelemetryBatch, index: Ints) -> Ints:
        """Adds records of ranks at these positions; the rows of those that are new, in order."""
        keys, members = _keys(part, index), np.unique(index).tolist()
        _, first = np.unique(keys, return_index=True)
        numbers = {number for rank in members for number in self.by_rank.get(rank, ())}
        if numbers:
            known = np.concatenate([self.keys[number] for number in numbers])
            first = first[~np.isin(keys[first], known)]
        new: Ints = np.sort(first)
        if new.size:
            for rank in members:
                self.by_rank.setdefault(rank, []).append(len(self.keys))
            self.keys.append(keys[new])
        return new

    def forget(self, ranks: Bools) -> None:
        """Forgets the records of the ranks of a mask."""
        self.keys = [keys[~ranks[_indices(keys)]] for keys in self.keys]

    def join(self) -> Ints:
        """Makes one part of all, however they came; the order of their rows in it."""
        keys = np.concatenate([np.empty(0, np.int64), *self.keys])
        order = np.argsort(keys, kind="stable")
        self.keys, self.by_rank = [keys[order]], {rank: [0] for rank in sorted(self.by_rank)}
        return order


def _keys(part: TelemetryBatch, index: Ints) -> Ints:
    """One number for each record: equal for the same record sent twice, and its sort key.

    Several transfers of one microbatch may differ in nothing but their time, so that for those
    the time is part of the identity.
    """
    key = (index << 3) | part.op
    key = (key << 20) | ((part.microbatch.astype(np.int64) + 1) & 0xFFFFF)
    key = (key << 12) | (part.chunk.astype(np.int64) & 0xFFF)
    other = ~is_pass(part.op)
    if other.any():
        mixed = ((part.microbatch[other].astype(np.int64) << 32) ^ part.peer[other]).view(np.uint64)
        for name in ("compute_ms", "wait_ms", "start_ms"):
            value = np.nan_to_num(getattr(part, name)[other], nan=-1.0)
            mixed = (mixed ^ (mixed >> np.uint64(32)) ^ value.view(np.uint64)) * ODD
        place = (index[other] << 3) | part.op[other]
        key[other] = (place << 35) | (mixed >> np.uint64(29)).astype(np.int64)
        key[other] |= np.int64(1) << 62
    return key


def _indices(keys: Ints) -> Ints:
    """The positions of ranks that `_keys` was made of."""
    other = np.int64(1) << 62
    result: Ints = np.where(keys & other, (keys ^ other) >> 38, keys >> 35)
    return result
