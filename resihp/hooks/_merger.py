"""Messages of several ranks as one: collected, merged, sent, and the answer given to each rank."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Any

import msgpack

from resihp.client import Client
from resihp.contracts import (
    ContractError,
    Heartbeat,
    ServiceError,
    from_json,
    to_json,
)
from resihp.contracts.codec import EncodedBatch, WireFormat

from ._pace import UNKNOWN_JOB, MessagePace, is_temporary
from ._stats import FailureLog

_PATIENCE_S = 0.25
"""Time for which a message waits for those of the other ranks, once one is due."""
_MOST_BYTES = 4 << 20
_MOST_RECORDS = 65_536
"""Limits of one merged message, far below those of the sidecar."""

Answer = dict[str, Any]


@dataclass(frozen=True)
class RankMessage:
    """A message of one rank that waits to be sent, and `answer`, which is called once with what
    `packed_answer` or `packed_error` makes of the outcome."""

    source: object
    content: bytes
    answer: Callable[[bytes], None]
    arrived_s: float = field(default_factory=monotonic)

    def fail(self, error: ServiceError) -> None:
        """Answer that the message was not accepted."""
        self.answer(packed_error(error))


def packed_telemetry(key: str, message: bytes) -> bytes:
    """Content of a request: an encoded batch, and the key under which it is repeated."""
    packed: bytes = msgpack.packb((key, message))
    return packed


def packed_heartbeat(heartbeat: Heartbeat) -> bytes:
    """Content of a request: a heartbeat."""
    packed: bytes = msgpack.packb(to_json(heartbeat))
    return packed


def packed_answer(answer: Answer) -> bytes:
    """Content of an answer: that of the sidecar."""
    packed: bytes = msgpack.packb({"answer": answer})
    return packed


def packed_error(error: ServiceError) -> bytes:
    """Content of an answer that says why a message was not accepted."""
    packed: bytes = msgpack.packb({"error": str(error), "status": error.status})
    return packed


class MessageMerger(ABC):
    """Collects the messages of one kind and sends them together, in a thread of its own.

    A message is due an interval after the last one was answered. It is sent as soon as all ranks
    that took part in the last one have handed in theirs, or `_PATIENCE_S` after it was due. All of
    them get their answers at the same time and so hand in their next ones at the same time.

    is_stale  tells whether this process was stopped: what is held then is not sent, because it
              would pass for a sign of life of ranks that may have died meanwhile
    """

    def __init__(self, name: str, failures: FailureLog, is_stale: Callable[[], bool]) -> None:
        self._failures, self._is_stale = failures, is_stale
        self._changed = threading.Condition()
        self._waiting: list[RankMessage] = []
        self._last_sources: set[object] = set()
        self._answered_s = float("-inf")
        self._is_urgent = False
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def add(self, message: RankMessage) -> None:
        """Hand in a message."""
        with self._changed:
            self._waiting.append(message)
            self._changed.notify()

    def forget(self, source: object) -> None:
        """Wait no longer for a rank that is gone. What it has handed in is sent at once: later it
        would pass for a sign of life."""
        with self._changed:
            self._last_sources.discard(source)
            self._is_urgent |= any(message.source is source for message in self._waiting)
            self._changed.notify()

    def flush(self) -> None:
        """Send at once what is waiting."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify()

    def close(self) -> None:
        """Send nothing more, except what is on its way."""
        self.closing.set()
        with self._changed:
            self._changed.notify()

    @property
    @abstractmethod
    def interval_s(self) -> float:
        """Present time between two messages."""

    @abstractmethod
    def send(self, messages: list[RankMessage]) -> None:
        """Send messages and answer each."""

    def _run(self) -> None:
        while messages := self._collected():
            if self._is_stale():
                _fail(messages, "the node's sender was stopped")
                continue
            try:
                self.send(messages)
            except Exception as error:  # noqa: BLE001 the boundary: these ranks repeat theirs
                self._failures.add("the node's sender", error)
                _fail(messages, f"the node's sender failed: {error!r}")

    def _collected(self) -> list[RankMessage]:
        """Wait for the next messages to send; [] once it is closed."""
        with self._changed:
            self._answered_s = monotonic()
            while not self.closing.is_set():
                if (left_s := self._left_s()) <= 0:
                    messages, self._waiting, self._is_urgent = self._waiting, [], False
                    self._last_sources = {message.source for message in messages}
                    return messages
                self._changed.wait(None if left_s == float("inf") else left_s)
        return []

    def _left_s(self) -> float:
        if not self._waiting:
            return float("inf")
        present = {message.source for message in self._waiting}
        if self._is_urgent or self._last_sources <= present:
            return 0.0
        due_s = max(self._answered_s + self.interval_s, self._waiting[0].arrived_s)
        return due_s + min(_PATIENCE_S, self.interval_s / 2) - monotonic()


def _fail(messages: Sequence[RankMessage], reason: str) -> None:
    for message in messages:
        message.fail(ServiceError(reason))


class TelemetryMerger(MessageMerger):
    """Sends the records of several ranks in one message for each plan version.

    A merged message is repeated under its key until the sidecar accepts or refuses it. If it is
    refused, each part is sent by itself, so that an invalid one costs no other rank's records.
    """

    def __init__(
        self,
        client: Client,
        job: str,
        identity: str,
        pace: MessagePace,
        failures: FailureLog,
        is_stale: Callable[[], bool],
    ) -> None:
        super().__init__("resihp-node-telemetry", failures, is_stale)
        self._client, self._job, self._pace = client, job, pace
        self._keys = (f"{identity}-{number}" for number in count(1))

    @property
    def interval_s(self) -> float:
        """Present time between two messages."""
        return self._pace.interval_s

    def send(self, messages: list[RankMessage]) -> None:
        """Send the batches in `messages`, merged."""
        parts = []
        for message in messages:
            try:
                parts.append(_TelemetryPart.read(message))
            except (ContractError, ValueError, TypeError) as error:
                message.fail(ServiceError(f"an invalid message: {error}", status=422))
        for merged in _mergeable(parts):
            self._deliver(merged)

    def _deliver(self, parts: list[_TelemetryPart]) -> None:
        if len(parts) == 1:
            key, content = parts[0].key, parts[0].content
        else:
            key = next(self._keys)
            content = EncodedBatch.merge([part.batch for part in parts])
        outcome = self._repeat(key, content)
        if isinstance(outcome, ServiceError):
            can_divide = not is_temporary(outcome) and outcome.status != UNKNOWN_JOB
            for part in parts:
                if can_divide and len(parts) > 1:
                    self._deliver([part])
                else:
                    part.message.fail(outcome)
            return
        if self._pace.interval_s > self._pace.base_s:
            outcome = {**outcome, "interval_s": self._pace.interval_s}
        for part in parts:
            part.message.answer(packed_answer(outcome))

    def _repeat(self, key: str, content: bytes) -> Answer | ServiceError:
        """Send until there is an answer that is not temporary, or the merger closes or is stale."""
        while True:
            try:
                answer = self._client.send_telemetry(self._job, content, WireFormat.MSGPACK, key)
            except ServiceError as error:
                if not is_temporary(error):
                    return error
                self._failures.warn_once("away", f"telemetry waits for the sidecar: {error}")
                if self.closing.wait(self._pace.refused(error)) or self._is_stale():
                    return error
            else:
                self._pace.accepted(answer)
                return answer


@dataclass(frozen=True)
class _TelemetryPart:
    message: RankMessage
    key: str
    content: bytes
    batch: EncodedBatch

    @classmethod
    def read(cls, message: RankMessage) -> _TelemetryPart:
        key, content = msgpack.unpackb(message.content)
        return cls(message, key, content, EncodedBatch.read(content))


def _mergeable(parts: Sequence[_TelemetryPart]) -> Iterator[list[_TelemetryPart]]:
    """Divide parts into groups of one plan version and of a bounded size."""
    for version in sorted({part.batch.plan_version for part in parts}):
        group: list[_TelemetryPart] = []
        size = records = 0
        for part in (part for part in parts if part.batch.plan_version == version):
            size, records = size + len(part.content), records + len(part.batch)
            if group and (size > _MOST_BYTES or records > _MOST_RECORDS):
                yield group
                group, size, records = [], len(part.content), len(part.batch)
            group.append(part)
        yield group


class HeartbeatMerger(MessageMerger):
    """Sends the heartbeats of several ranks in one list; one that is lost is not repeated."""

    def __init__(
        self,
        client: Client,
        job: str,
        interval_s: float,
        failures: FailureLog,
        is_stale: Callable[[], bool],
    ) -> None:
        super().__init__("resihp-node-heartbeats", failures, is_stale)
        self._client, self._job, self._interval_s = client, job, interval_s

    @property
    def interval_s(self) -> float:
        """Time between two messages."""
        return self._interval_s

    def send(self, messages: list[RankMessage]) -> None:
        """Send the heartbeats in `messages` as one list."""
        parts = []
        for message in messages:
            try:
                parts.append((message, from_json(Heartbeat, msgpack.unpackb(message.content))))
            except (ContractError, ValueError, TypeError) as error:
                message.fail(ServiceError(f"an invalid heartbeat: {error}", status=422))
        if parts:
            self._deliver(parts)

    def _deliver(self, parts: list[tuple[RankMessage, Heartbeat]]) -> None:
        try:
            answer = self._client.send_heartbeats(self._job, [beat for _, beat in parts])
        except ServiceError as error:
            can_divide = not is_temporary(error) and error.status != UNKNOWN_JOB
            for part in parts:
                if can_divide and len(parts) > 1:
                    self._deliver([part])
                else:
                    part[0].fail(error)
        else:
            for message, _ in parts:
                message.answer(packed_answer(answer))
