"""The background thread that turns rows into messages and hands them to the sidecar."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic, sleep
from typing import Protocol

from resihp.contracts import ServiceError
from resihp.contracts.codec import WireFormat, encode

from ._batcher import Batcher, ready, version_of
from ._buffer import Buffer, Row
from ._clocks import CudaClock
from ._failures import Failures
from ._probes import Probes
from ._registration import Registration, Registry
from ._spans import Span

_RETRY_STATUSES = (408, 425, 429)
_UNKNOWN_JOB = 404
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 5.0
_POLL_S = 0.002
_TIME_TO_SEND = 0.9  # of the time that closing may take; the rest is for counting what is left


class Telemetry(Registry, Protocol):
    """Where messages go; `resihp.Client` is one. Its methods raise `ServiceError`."""

    def send_telemetry(
        self, job: str, message: bytes, form: WireFormat, key: str | None = None
    ) -> object:
        """What the sidecar answers, with the probes that it asks for."""
        ...

    def answer_probe(
        self, job: str, *, probe: str, rank: int, ms: float | None, detail: str
    ) -> None:
        """The outcome of a probe."""
        ...


@dataclass
class Counts:
    """Of one process: messages and records taken by the sidecar, repetitions, refusals."""

    batches: int = 0
    records: int = 0
    retries: int = 0
    refused: int = 0


class Sender:
    """Drains a buffer every `interval_s`, in messages of at most `batch_records`.

    A message that the sidecar refuses (4xx) is dropped; one that it could not take (5xx, no
    answer, 408, 425, 429) is repeated under the same key, after 0.1 s doubling up to 5 s, less a
    random part of at most half, until `close`. Meanwhile the buffer fills. So is one of a job that
    the sidecar does not know, where it can be registered.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        registration: Registration,
        rank: int,
        failures: Failures,
        *,
        capacity: int,
        batch_records: int,
        interval_s: float,
        seed: int,
        device: Callable[[], CudaClock | None],
        probes: Probes,
    ) -> None:
        self._telemetry, self._job, self._rank = telemetry, registration.name, rank
        self._registration = registration
        self._failures, self._probes = failures, probes
        self._batch_records, self._interval_s = batch_records, interval_s
        self._seed, self._device = seed, device
        self.buffer = Buffer(capacity, self._start)
        self.reset()

    def reset(self) -> None:
        """Be as new, with an empty buffer and no thread: the state of a forked child."""
        self.buffer.reset()
        self._registration.reset()
        self.counts = Counts()
        self._batcher = Batcher(self._rank, self._failures)
        self._random = random.Random(self._seed)
        self._process_key = uuid.uuid4().hex
        self._messages = 0
        self._reported = 0  # dropped records that the sidecar knows of
        self.in_hand = 0  # records out of the buffer whose fate is open
        self._closing = threading.Event()
        self._deadline = 0.0
        self._thread: threading.Thread | None = None

    def close(self, timeout_s: float) -> None:
        """Send what is buffered, for at most `timeout_s`; what is left then is dropped."""
        self._deadline = monotonic() + _TIME_TO_SEND * timeout_s
        self.buffer.close()
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="resihp-sender", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no threads left: the buffer fills and drops
            self._failures.add("starting the sender", error)
        else:
            self._thread = thread

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._guarded_flush()
        while self._guarded_flush() and self.buffer.rows and monotonic() < self._deadline:
            sleep(_POLL_S)
        self.buffer.drop(len(self.buffer.rows))
        self.buffer.rows.clear()

    def _guarded_flush(self) -> bool:
        try:
            self._flush()
        except Exception as error:  # noqa: BLE001 the boundary: the sender outlives any trouble
            self._failures.add("the sender", error)
            return False
        return True

    def _flush(self) -> None:
        device = self._device()
        if device is not None:
            device.adopt_thread()
        self._answer_probes()
        while rows := self._take():
            self.in_hand, taken = len(rows), 0
            try:
                taken = self._deliver(rows)
            except Exception as error:  # noqa: BLE001 the boundary: these rows are lost, later ones go on
                self._failures.add("sending telemetry", error)
            self.buffer.drop(len(rows) - taken)
            self.in_hand = 0

    def _take(self) -> list[Row | Span]:
        """The oldest rows of one plan version that are ready. Only this thread removes rows."""
        waiting = self.buffer.rows
        taken: list[Row | Span] = []
        version = version_of(waiting[0]) if waiting else None
        while waiting and len(taken) < self._batch_records:
            row = waiting[0]
            if version_of(row) != version or not ready(row):
                break
            taken.append(waiting.popleft())
        return taken

    def _deliver(self, rows: list[Row | Span]) -> int:
        """How many of the rows the sidecar took."""
        batch = self._batcher.batch(rows)
        if not len(batch):
            return 0
        dropped = self.buffer.dropped - self._reported
        message = encode(replace(batch, dropped=dropped) if dropped else batch)
        self._messages += 1
        if not self._send(message, f"{self._process_key}-{self._rank}-{self._messages}"):
            return 0
        self._reported += dropped
        self.counts.batches += 1
        self.counts.records += len(batch)
        return len(batch)

    def _send(self, message: bytes, key: str) -> bool:
        """Whether the sidecar took the message, in the end."""
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                self._registration.make_known(self._telemetry)
                answer = self._telemetry.send_telemetry(self._job, message, WireFormat.MSGPACK, key)
            except ServiceError as error:
                if not self._may_repeat(error) or not self._pause(delay_s):
                    return False
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
                self.counts.retries += 1
            else:
                self._registration.known()
                self._probes.take(answer)
                return True

    def _answer_probes(self) -> None:
        """An answer that does not get through is lost: the sidecar does not wait for it."""
        while self._probes.answers:
            answer = self._probes.answers.popleft()
            try:
                self._telemetry.answer_probe(
                    self._job, probe=answer.id, rank=self._rank, ms=answer.ms, detail=answer.detail
                )
            except ServiceError as error:
                self._failures.say_once("probe", f"the answer to a probe was lost: {error}")

    def _may_repeat(self, error: ServiceError) -> bool:
        status = error.status
        if status == _UNKNOWN_JOB and self._registration.is_possible:
            if not self._registration.unknown():
                return True
        elif status is not None and status < 500 and status not in _RETRY_STATUSES:
            self.counts.refused += 1
            self._failures.say_once("refused", f"the sidecar refuses telemetry: {error}")
            return False
        self._failures.say_once("away", f"telemetry waits for the sidecar: {error}")
        return True

    def _pause(self, delay_s: float) -> bool:
        """Wait before a repetition; False when there is no time for another."""
        delay_s *= self._random.uniform(0.5, 1.0)
        if not self._closing.wait(delay_s):
            return True
        left_s = self._deadline - monotonic()
        sleep(max(0.0, min(_FIRST_DELAY_S, left_s)))
        return left_s > 0
