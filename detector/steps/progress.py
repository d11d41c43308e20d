"""Progress of steps: which of them are whole, for everything that works step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import TelemetryBatch
from resihp.contracts.telemetry import COLUMNS

from ..arrays import Bools, Ints, appended, positions
from ..persistence import Persistent
from .digests import Digests, digests
from .records import is_pass
from .restarts import REACH_STEPS, Restarts

SILENT_STEPS = 3
"""Closed steps without a record after which a rank is no longer waited for."""
_LAG_STEPS = 3
"""Later steps, and later messages of one rank, after which a step is closed without the missing
records."""
_ANY_STEP = (1 << 63) - 1
_LEAST_OPEN, _MOST_OPEN, _MOST_COUNTS = 256, _LAG_STEPS * 8_192, 1 << 20
"""Open steps beyond which the oldest one is closed: at least, and at most, which is as many as
there are in the messages that one rank may be ahead by; and the numbers of records of ranks in
them, which bound it between the two."""
_RECORD_BYTES = sum(dtype.itemsize for dtype, _ in COLUMNS.values()) + 8  # of its key
_MUCH_KEPT, _MOST_KEPT = (256 << 20) // _RECORD_BYTES, (1 << 30) // _RECORD_BYTES
"""Records kept of open steps: messages of many steps, as after an outage or where senders are asked
for fewer, open as many. Beyond the first number a step waits for one later message of a rank only:
where one is lost, the steps of three would be open. Beyond the second the oldest of more steps than
`_LAG_STEPS` is closed."""
_MOST_AHEAD = 128
"""Steps that ranks far ahead of most others may open by many messages."""
_HABIT_STEPS = 8
"""Closed steps whose numbers of records tell how many are to be waited for."""
_KNOWN_STEPS = 64
"""Closed steps that are known again when they are sent a second time."""


@dataclass
class _OpenStep:
    """Records of each rank so far and their digests, the number of messages when the step was
    opened, and the number of records that are kept until it is closed."""

    counts: Ints
    digests: Digests
    opened_at: int
    kept: int = 0


class StepProgress(Persistent):
    """Tracks which steps of a job are whole, by the records of each rank; arrays over ranks.

    A rank is done with a step once it has sent `expected` records of it (or, from the second step
    on, as many as it sent of any of the last `_HABIT_STEPS` steps, if these are fewer; its most of
    all steps, while further ones come late); a record of a later step proves nothing,
    for messages overtake each other. Without `expected` every record counts, and a rank is done
    once it has sent one of a later step. A step is whole when all ranks that still report are
    done with it. It is closed incomplete when some rank is ahead by `_LAG_STEPS` steps and as many
    messages, or one where many records are kept, unless most of the ranks that still send are in
    earlier steps: one whose numbers of steps are off does not decide for them. Numbers of steps may
    have gaps; but once a whole step has come after a later one, a step waits as long for those
    between it and the last. The caller passes each message to `admit`, then the records of each
    step to `count`, and takes the steps that `close` returns at the end, and before while it
    `is_full`: a message of thousands of steps opens few of them at a time.

    ranks     ranks of the layout, sorted
    expected  records of each rank and step; None where it is not known
    late      records of the last message whose steps were closed before
    astray    records of the last message that are too far ahead of all other steps
    """

    _saved = (
        "silent", "_habit", "_counts", "_most", "_open", "_kept", "_closed", "_gap", "_fills",
        "_messages", "_heard_at", "_restarts", "_taken",
    )  # fmt: skip
    _open: dict[int, _OpenStep]
    _taken: dict[int, Digests]

    def __init__(self, ranks: Ints, expected: Ints | None = None) -> None:
        size = ranks.size
        self.ranks, self._expected = ranks, expected
        self._habit = np.ones(size, np.int64) if expected is None else expected.copy()
        self._counts = np.empty((0, size), np.int32)  # of the last closed steps
        self._most = np.zeros(size, np.int64)
        self.silent = np.zeros(size, np.int64)
        self._open = {}
        self._kept = 0  # records of open steps
        self._closed, self._gap, self._fills = -1, 0, False
        self._messages = np.zeros(size, np.int64)
        self._heard_at = np.full(size, -1, np.int64)  # most messages of any rank by then
        self.late = self.astray = 0
        self._most_open = max(_LEAST_OPEN, min(_MOST_OPEN, _MOST_COUNTS // size))
        self._restarts = Restarts(ranks)
        self._taken = {}  # of the last closed steps

    @property
    def newest(self) -> int:
        """Newest step of which any rank has sent a record; -1 before the first."""
        return int(self._restarts.newest.max())

    @property
    def is_begun(self) -> Bools:
        """Mask of the ranks as which other processes work that have sent nothing yet."""
        return self._restarts.is_begun

    @property
    def is_full(self) -> bool:
        """True if so many steps are open, or records kept, that `close` returns one of them."""
        is_most = self._kept > _MOST_KEPT and len(self._open) > _LAG_STEPS
        return is_most or len(self._open) > self._most_open

    def index(self, ranks: NDArray[np.integer]) -> Ints:
        """Positions of ranks; -1 for those that are not in the layout."""
        return positions(self.ranks, ranks)

    def expect(self, ranks: Iterable[int]) -> None:
        """Note that other processes work as these ranks now, perhaps from an earlier step on."""
        at = self.index(np.array(list(ranks), np.int64))
        self._restarts.is_begun[at[at >= 0]] = True

    def admit(self, batch: TelemetryBatch) -> TelemetryBatch:
        """The records of a message that belong to open steps of this layout."""
        index, newest = self.index(batch.rank), self.newest
        usable = index >= 0
        self._restarts.observe(batch, index, usable, self._lag(), self._digests_of)
        behind = self._closed - batch.step
        # Also where they are late, or a rank that was late once would stay so for ever; but not
        # where they are so far away that no step can wait for them.
        near = usable & (np.abs(behind) <= self._reach(batch.step[usable]))
        self.silent[index[near]] = 0
        self._fills |= bool((usable & (behind > 0) & (behind < self._gap)).any())
        in_time = usable & (behind < 0)
        self.late = int(np.count_nonzero(usable & ~in_time))
        self._learn_late(index[near & ~in_time & is_pass(batch.op)])
        usable = in_time & (batch.step <= self._last_admitted(newest))
        self.astray = int(np.count_nonzero(in_time & ~usable))
        senders = np.unique(index[usable])
        self._messages[senders] += 1
        self._heard_at[senders] = self._messages.max()
        return batch if usable.all() else batch.select(usable)

    def _reach(self, steps: Ints) -> int:
        """Largest distance from the last closed step at which records of a message may still be in
        time, or the next ones of these ranks may: messages may be late by a few, and hold several
        steps each."""
        return _LAG_STEPS * max(self._gap, int(np.ptp(steps)) + 1 if steps.size else 1)

    def _last_admitted(self, newest: int) -> int:
        """Last step whose records are admitted, where `newest` was the newest one before. Ranks far
        ahead of most others open few steps, unless by large messages, as after an outage."""
        half = len(self._open) // 2
        if half >= _MOST_AHEAD // 2:
            middle = sorted(self._open)[half]
            sent = int(self._messages.max()) - self._open[middle].opened_at
            if sent >= _LAG_STEPS and self._is_ahead(middle):
                return max(self._open)
        return newest + REACH_STEPS if newest >= 0 else _ANY_STEP

    def _is_ahead(self, step: int) -> bool:
        """True if most ranks that have sent since an open step was opened are in earlier ones."""
        sending = self._heard_at >= self._open[step].opened_at
        behind = np.count_nonzero(sending & (self._restarts.newest < step))
        return bool(2 * behind > np.count_nonzero(sending))

    def _lag(self) -> int:
        """Distance of steps by which messages overtake each other, in numbers that have gaps."""
        return _LAG_STEPS * min((after - step for step, after in pairwise(self._taken)), default=1)

    def _digests_of(self, step: int) -> tuple[Digests, Digests] | None:
        """Digests of a step so far and of the last closed one beside it, which are 0 before the
        first; None of a step that is not known."""
        opened = self._open.get(step)
        now = self._taken.get(step) if opened is None else opened.digests
        others = (taken for number, taken in reversed(self._taken.items()) if number != step)
        return None if now is None else (now, next(others, np.zeros_like(now)))

    def restart(self) -> list[TelemetryBatch]:
        """The messages that most of the reporting ranks have sent since the job went back to an
        earlier step, as after a checkpoint is loaded, or far from the newest one, as where that was
        an error; empty if it has not.

        The caller then begins anew with these messages.
        """
        return self._restarts.messages(self.silent < SILENT_STEPS)

    def count(self, step: int, index: Ints, marks: Ints, *, kept: int = 0) -> None:
        """Counts records of a step by the positions of their ranks and their `record_marks`, and
        those that the caller keeps until it is closed."""
        opened = self._open.get(step)
        if opened is None:
            size = self.ranks.size
            none, nothing = np.zeros(size, np.int64), np.zeros(size, np.uint32)
            opened = _OpenStep(none, nothing, int(self._messages.max()))
            self._open[step] = opened
        opened.counts += np.bincount(index, minlength=self.ranks.size)
        opened.digests += digests(marks, index, self.ranks.size)
        opened.kept += kept
        self._kept += kept

    def close(self, lost: Iterable[int] = (), *, at_end: bool = False) -> Iterator[int]:
        """Closes the steps that are whole or overdue, in order; `lost` ranks are not waited for,
        and `at_end` of all records none is."""
        waited, newest = ~np.isin(self.ranks, list(lost)), self._restarts.newest
        steps = sorted(self._open)
        for at, step in enumerate(steps):
            opened, late = self._open[step], at_end or self.is_full
            done = newest > step if self._expected is None else opened.counts >= self._habit
            whole = done[waited & (self.silent < SILENT_STEPS)].all() and opened.counts.any()
            whole &= not self._fills or step == self._closed + 1
            sent = int(self._messages.max()) - opened.opened_at
            if sent >= (1 if self._kept > _MUCH_KEPT else _LAG_STEPS):
                later = steps[at + _LAG_STEPS : at + _LAG_STEPS + 1]
                late |= bool(later) and not self._is_ahead(later[0])
            if not (whole or late):
                return
            del self._open[step]
            self._kept -= opened.kept
            self._taken[step] = opened.digests
            if len(self._taken) > _KNOWN_STEPS:
                del self._taken[next(iter(self._taken))]
            self._gap = step - self._closed if self._closed >= 0 else step + 1
            self._fills &= self._gap == 1
            self._closed, present = step, opened.counts > 0
            self.silent = np.where(present | (self._habit == 0), 0, self.silent + 1)
            if self._expected is not None and present.any():
                self._learn_habit(np.minimum(opened.counts, self._expected))
            yield step

    def _learn_habit(self, counts: Ints) -> None:
        """Takes the number of records of each rank in a closed step."""
        self._counts = appended(self._counts, counts, _HABIT_STEPS)
        self._most = np.maximum(self._most, counts)
        usual = self._counts.max(axis=0)
        self._habit = np.where(usual > 0, usual, self._habit)

    def _learn_late(self, index: Ints) -> None:
        """Takes that ranks have sent more records of a step than there were when it was closed."""
        index = index[self._most[index] > 0]
        if index.size:
            self._counts[-1, index] = self._habit[index] = self._most[index]
