"""Records of a layout's ranks, collected into whole steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Op, TelemetryBatch

from ..arrays import Bools, Ints
from ..persistence import Persistent, State
from ..rank_table import RankTable
from .digests import record_marks
from .progress import SILENT_STEPS, StepProgress
from .records import KnownRecords, by_step, is_pass

COMPUTE = (int(Op.FORWARD), int(Op.BACKWARD))
_SMALL_QUOTA = 4_096
"""Microbatches over which arrays are small, however few have a record."""
_SPARE, _FEW_CELLS = 4, 1 << 14
"""Microbatches of a step as a multiple of what ranks usually have, and passes of a step if every
rank had as many, up to which none is left out."""


@dataclass
class _OpenRecords:
    """Records of an open step in parts, those of `known`."""

    parts: list[TelemetryBatch] = field(default_factory=list)
    known: KnownRecords = field(default_factory=KnownRecords)

    def join(self) -> None:
        """Makes one part of all."""
        order = self.known.join()
        self.parts = [TelemetryBatch.concat(self.parts).select(order)] if self.parts else []


class StepAssembler(Persistent):
    """Collects the records of a layout's ranks into whole steps.

    The outcome does not depend on how the records were cut into messages: those of a step are put
    into one canonical order, and a record that is sent twice counts once. A broken rank may send
    thousands of microbatches of a step, and what is expected of a step takes time and memory by
    the largest number: those beyond all quotas and four times as many as ranks have in the step
    are left out, unless a step of so many is small.

    excess  records left out of the last step that was closed
    """

    _saved = ("progress", "_records")
    _records: dict[int, _OpenRecords]

    def __init__(self, places: RankTable, quotas: tuple[int, ...], chunks: int) -> None:
        self._places, self._largest_quota = places, max(quotas)
        each = chunks * len(COMPUTE)
        self._few = max(self._largest_quota, _FEW_CELLS // (places.size * each))
        expected = np.array(quotas, np.int64)[places.dp] * each
        self.progress = StepProgress(places.ranks, expected)
        self.excess = 0
        self._records = {}

    @property
    def silent(self) -> Bools:
        """Ranks without a record in the last closed steps."""
        return self.progress.silent >= SILENT_STEPS

    def add(self, batch: TelemetryBatch) -> Iterator[TelemetryBatch]:
        """Takes a message; the steps that it completes, in order. Each is closed when it is asked
        for, so that `silent` is as of that step."""
        for step, part in by_step(self.progress.admit(batch)):
            self._put(step, part)
            if self.progress.is_full:
                yield from self._close()
        yield from self._close()

    def finish(self) -> Iterator[TelemetryBatch]:
        """Closes all open steps, as nothing more is to come; in order, like `add`."""
        return self._close(at_end=True)

    def _close(self, *, at_end: bool = False) -> Iterator[TelemetryBatch]:
        for step in self.progress.close(at_end=at_end):
            yield self._assembled(self._records.pop(step))

    def _put(self, step: int, part: TelemetryBatch) -> None:
        opened = self._records.setdefault(step, _OpenRecords())
        index = self._places.index(part.rank)
        new = opened.known.add(part, index)
        fresh = part.select(new)
        passes = is_pass(fresh.op)
        if new.size:
            opened.parts.append(fresh)
        marks = record_marks(fresh, passes)
        self.progress.count(step, index[new][passes], marks[passes], kept=new.size)

    def _assembled(self, opened: _OpenRecords) -> TelemetryBatch:
        self.excess = 0
        if not opened.parts:
            return TelemetryBatch.empty()
        whole = TelemetryBatch.concat(opened.parts)
        whole = whole.select(np.argsort(np.concatenate(opened.known.keys), kind="stable"))
        index = self._places.index(whole.rank)
        # A number beyond all records, of a job of very many microbatches, tells nothing of a step.
        usual = min(self._largest_quota, max(_SMALL_QUOTA, len(whole)))
        number = numbered(self._places.dp[index], whole.microbatch, usual)
        if not np.array_equal(number, whole.microbatch):
            whole = replace(whole, microbatch=number.astype(np.int32))
        if int(number.max(initial=-1)) < self._few:
            return whole
        passes = is_pass(whole.op) & (number >= 0)
        rows = number < max(self._few, _SPARE * self._usual_count(index[passes], number[passes]))
        self.excess = int(np.count_nonzero(~rows))
        return whole.select(rows)

    def _usual_count(self, index: Ints, microbatch: Ints) -> int:
        """Median number of different microbatches of a rank, 0 for one without any."""
        distinct = np.unique((index << 32) | microbatch)
        return int(np.median(np.bincount(distinct >> 32, minlength=self._places.size)))

    def state(self) -> State:
        """The saved attributes, the parts of each open step joined."""
        for opened in self._records.values():
            opened.join()
        return super().state()


def numbered(parts: Ints, microbatch: NDArray[np.integer], usual: int) -> Ints:
    """The microbatches of each part (a step of a replica) numbered from 0 in their order, so that
    arrays over them stay as small as a step is.

    Some trainers number them through the whole job, and a broken record may hold any number.
    Where all are below `usual`, the microbatches of a replica in a step, they stay as they are; -1
    (of no microbatch) always does.

    >>> numbered(np.array([0, 0, 1, 1, 1]), np.array([70, 71, 72, -1, 70]), 2).tolist()
    [0, 1, 1, -1, 0]
    """
    number: Ints = microbatch.astype(np.int64)
    some = number >= 0
    if int(number.max(initial=-1)) < usual:
        return number
    key = (parts[some] << 32) | number[some]
    distinct, at = np.unique(key, return_inverse=True)
    part = distinct >> 32
    position = np.arange(distinct.size) - np.searchsorted(part, part)
    number[some] = position[at.reshape(-1)]
    return number
