"""Rows of the buffer as a `TelemetryBatch`; done in the sender's thread."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

from resihp.contracts import ContractError, TelemetryBatch

from ._buffer import Row
from ._failures import Failures
from ._spans import DeviceSpan
from ._work import Snapshot, features

_COLUMNS = (
    "step", "microbatch", "chunk", "op", "compute_ms", "wait_ms",
    "tokens", "sequences", "sum_sq_len", "max_len", "peer",
)  # fmt: skip
_COMPUTE, _WAIT, _WORK = 5, 6, 12


def ready(row: Row) -> bool:
    """Whether everything that the row refers to has happened on its device."""
    compute, work = row[_COMPUTE], row[_WORK]
    try:
        return (not isinstance(compute, DeviceSpan) or compute.ready()) and (
            not isinstance(work, Snapshot) or work.ready()
        )
    except Exception:  # noqa: BLE001 the boundary: reading it fails as well, and is counted there
        return True


def to_batch(rows: Sequence[Row], rank: int, failures: Failures) -> TelemetryBatch:
    """The batch of rows that are ready and of one plan version. Rows that cannot be records are
    counted as dropped and as failures."""
    filled: list[Row] = []
    for row in rows:
        try:
            filled.append(_filled(row, failures))
        except Exception as error:  # noqa: BLE001 the boundary: a time that cannot be read
            failures.add("a record", error)
    try:
        batch = _batch(filled, rank)
    except (ContractError, TypeError):
        batch = TelemetryBatch.concat(_valid(filled, rank, failures))
    return batch


def _filled(row: Row, failures: Failures) -> Row:
    """The row with numbers in place of device times and lengths."""
    version, step, microbatch, chunk, op, compute, wait, *numbers, peer, work = row
    if isinstance(compute, DeviceSpan):
        compute, wait = compute.read()
    if work is not None:
        try:
            numbers = list(features(work))
        except Exception as error:  # noqa: BLE001 the boundary: the time is worth having without
            failures.add("reading sequence lengths", error)
    wait = nan if wait is None else wait
    return (version, step, microbatch, chunk, op, compute, wait, *numbers, peer)


def _batch(rows: Sequence[Row], rank: int) -> TelemetryBatch:
    if not rows:
        return TelemetryBatch.empty()
    versions, *columns = zip(*rows, strict=True)
    named = {name: list(column) for name, column in zip(_COLUMNS, columns, strict=True)}
    return TelemetryBatch(rank=[rank] * len(rows), plan_version=versions[0], **named)  # type: ignore[arg-type]


def _valid(rows: Sequence[Row], rank: int, failures: Failures) -> list[TelemetryBatch]:
    """One malformed record must not take the others with it."""
    batches = []
    for row in rows:
        try:
            batches.append(_batch([row], rank))
        except (ContractError, TypeError) as error:
            failures.add("a record", error)
    return batches
