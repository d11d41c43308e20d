"""Rows of the buffer as a `TelemetryBatch`; done in the sender's thread."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.contracts import ContractError, Op, TelemetryBatch

from ._buffer import Row
from ._failures import Failures
from ._spans import Span
from ._workload import Features, Snapshot, features

_COLUMNS = (
    "step", "microbatch", "chunk", "op", "compute_ms", "wait_ms",
    "tokens", "sequences", "sum_sq_len", "max_len", "peer",
)  # fmt: skip
_TOKENS = 7


def version_of(record: Row | Span) -> int:
    """The plan version under which it was made."""
    return record.plan_version if isinstance(record, Span) else record[0]


def ready(record: Row | Span) -> bool:
    """Whether everything that it refers to has happened on its device."""
    if not isinstance(record, Span):
        return True
    try:
        return record.ready() and (not isinstance(record.work, Snapshot) or record.work.ready())
    except Exception:  # noqa: BLE001 the boundary: reading it fails as well, and is counted there
        return True


class Batcher:
    """Makes batches of records that are ready; remembers the work of the present step's forward
    passes, for the backward passes that come without."""

    def __init__(self, rank: int, failures: Failures) -> None:
        self._rank, self._failures = rank, failures
        self._step = -1
        self._works: dict[tuple[int, int], Features] = {}

    def batch(self, records: Sequence[Row | Span]) -> TelemetryBatch:
        """The batch of records of one plan version, without those that cannot be records, which
        are counted as failures."""
        rows: list[Row] = []
        for record in records:
            try:
                rows.append(self._row(record) if isinstance(record, Span) else record)
            except Exception as error:  # noqa: BLE001 the boundary: a time that cannot be read
                self._failures.add("a record", error)
        try:
            return _batch(rows, self._rank)
        except (ContractError, TypeError):
            return TelemetryBatch.concat(self._valid(rows))

    def _row(self, span: Span) -> Row:
        row = span.row()
        if span.work is None and span.op != Op.BACKWARD:
            return row
        if span.step != self._step:
            self._step = span.step
            self._works.clear()
        return (*row[:_TOKENS], *self._work(span), span.peer)

    def _work(self, span: Span) -> Features:
        place = (span.chunk, span.microbatch)
        if span.work is None:
            return self._works.get(place, Features())
        try:
            work = features(span.work)
        except Exception as error:  # noqa: BLE001 the boundary: the time is worth having without
            self._failures.add("reading a microbatch's work", error)
            return Features()
        if span.op == Op.FORWARD:
            self._works[place] = work
        return work

    def _valid(self, rows: Sequence[Row]) -> list[TelemetryBatch]:
        """One malformed record must not take the others with it."""
        batches = []
        for row in rows:
            try:
                batches.append(_batch([row], self._rank))
            except (ContractError, TypeError) as error:
                self._failures.add("a record", error)
        return batches


def _batch(rows: Sequence[Row], rank: int) -> TelemetryBatch:
    if not rows:
        return TelemetryBatch.empty()
    versions, *columns = zip(*rows, strict=True)
    named = {name: list(column) for name, column in zip(_COLUMNS, columns, strict=True)}
    return TelemetryBatch(rank=[rank] * len(rows), plan_version=versions[0], **named)  # type: ignore[arg-type]
