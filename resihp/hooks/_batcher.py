"""Encoding of records as a `TelemetryBatch`, in the sender's thread."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.contracts import Op, TelemetryBatch

from ._record import Record
from ._spans import Span
from ._stats import FailureLog
from ._workload import Features, Snapshot, features

_COLUMNS = Record._fields[1:]
_MOST_WORKS = 65_536
"""Works that are kept of one step, which never ends in a loop whose update is not seen."""


def ready(entry: Record | Span) -> bool:
    """Return whether the device has passed everything that the entry refers to."""
    if isinstance(entry, Record):
        return True
    try:
        return entry.ready() and (not isinstance(entry.work, Snapshot) or entry.work.ready())
    except Exception:  # noqa: BLE001 the boundary: reading it fails as well, and is counted there
        return True


class Batcher:
    """Makes batches of entries that are ready.

    The work of the present step's forward passes is kept for backward passes that have none.
    """

    def __init__(self, rank: int, failures: FailureLog) -> None:
        self._rank, self._failures = rank, failures
        self._step = -1
        self._works: dict[tuple[int, int], Features] = {}

    def batch(self, entries: Sequence[Record | Span]) -> TelemetryBatch:
        """Return the batch of entries of one plan version; invalid ones are left out and counted
        as failures."""
        records: list[Record] = []
        for entry in entries:
            try:
                records.append(entry if isinstance(entry, Record) else self._record(entry))
            except Exception as error:  # noqa: BLE001 the boundary: a time that cannot be read
                self._failures.add("a record", error)
        try:
            return _batch(records, self._rank)
        except Exception:  # noqa: BLE001 the boundary: what is wrong with which one is counted
            return TelemetryBatch.concat(self._valid(records))

    def _record(self, span: Span) -> Record:
        if span.work is None and span.op != Op.BACKWARD:
            return span.record(*Features())
        if span.step != self._step:
            self._step = span.step
            self._works.clear()
        return span.record(*self._work(span))

    def _work(self, span: Span) -> Features:
        key = (span.chunk, span.microbatch)
        if span.work is None:
            return self._works.get(key, Features())
        try:
            work = features(span.work)
        except Exception as error:  # noqa: BLE001 the boundary: the time is useful without it
            self._failures.add("reading a microbatch's work", error)
            return Features()
        if span.op == Op.FORWARD:
            self._works[key] = work
            if len(self._works) > _MOST_WORKS:
                del self._works[next(iter(self._works))]
        return work

    def _valid(self, records: Sequence[Record]) -> list[TelemetryBatch]:
        """Return a batch per valid record: one malformed record must not lose the others."""
        batches = []
        for record in records:
            try:
                batches.append(_batch([record], self._rank))
            except Exception as error:  # noqa: BLE001 the boundary: the others are sent
                self._failures.add("a record", error)
        return batches


def _batch(records: Sequence[Record], rank: int) -> TelemetryBatch:
    if not records:
        return TelemetryBatch.empty()
    versions, *columns = zip(*records, strict=True)
    named = {name: list(column) for name, column in zip(_COLUMNS, columns, strict=True)}
    return TelemetryBatch(rank=[rank] * len(records), plan_version=versions[0], **named)  # type: ignore[arg-type]
