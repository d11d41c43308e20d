"""Background thread that turns records into messages and sends them to the sidecar."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from multiprocessing.util import Finalize
from time import monotonic, sleep
from typing import Protocol

from resihp.contracts import ServiceError
from resihp.contracts.codec import WireFormat, encode

from ._batcher import Batcher, ready
from ._buffer import Buffer
from ._heartbeat import HeartbeatReceiver, HeartbeatSender
from ._node_link import NodeLink
from ._pace import UNKNOWN_JOB, MessagePace, is_temporary
from ._probes import Probes
from ._record import Record
from ._registration import Registration, Registry
from ._sampler import Sampler
from ._spans import Recording, Span
from ._stats import FailureLog
from ._workload import features

_POLL_S = 0.002
_LAST_DELAY_S = 0.1
"""Longest time before a repetition while the monitor closes."""
_LOST_PEER = (
    "by peer", "gloo/transport", "ncclRemoteError", "remote process exited", "DistNetworkError",
    "DistBackendError", "PeerLostError", "FencedOutError",
)  # fmt: skip
"""Marks of an error by which a process learns that another one is gone."""
_EXIT_TIMEOUT_S = 2.0
_SENDING_SHARE = 0.9
"""Share of the closing time in which messages are sent; the rest is for counting what is left."""


def fatal_error() -> BaseException | None:
    """Return the uncaught error that is ending this process, if any."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def current_error() -> BaseException | None:
    """Return the error that is being handled, if any."""
    return sys.exc_info()[1]


def own_fault(error: BaseException | None) -> str:
    """Describe the error that ends a process; "" for none, and for the loss of a peer, which is
    that peer's fault.

    >>> own_fault(ValueError("bad batch")), own_fault(RuntimeError("Connection closed by peer"))
    ('ValueError: bad batch', '')
    """
    if not isinstance(error, Exception):
        return ""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 the boundary: the error is to pass, whatever it is
        text = type(error).__name__
    return "" if any(sign in text for sign in _LOST_PEER) else text


class TelemetryReceiver(Registry, HeartbeatReceiver, Protocol):
    """Destination of messages; `resihp.Client` is one. Its methods raise `ServiceError`."""

    def send_telemetry(
        self, job: str, message: bytes, form: WireFormat, key: str | None = None
    ) -> object:
        """Deliver an encoded batch; the answer may ask for probes."""
        ...

    def answer_probe(
        self, job: str, *, probe: str, rank: int, ms: float | None, detail: str
    ) -> None:
        """Deliver the outcome of a probe."""
        ...


@dataclass
class Counts:
    """Counts of one process: messages and records accepted, repetitions, refusals."""

    batches: int = 0
    records: int = 0
    retries: int = 0
    refused: int = 0


class Sender:
    """Sends the entries of a buffer every `interval_s`, in messages of at most `batch_records`;
    less often while the sidecar asks for it.

    A message that the sidecar refuses (4xx) is dropped. One that it could not accept (5xx, no
    answer, 408, 425, 429) or whose job it does not know (404) is repeated under the same key, at
    the times that `MessagePace` gives, until `close`; the buffer fills meanwhile.
    """

    def __init__(
        self,
        receiver: TelemetryReceiver | NodeLink,
        registration: Registration,
        rank: int,
        recording: Recording,
        *,
        capacity: int,
        batch_records: int,
        interval_s: float,
        heartbeat_s: float,
        stacks: bool,
        seed: int,
        probes: Probes,
        sensors: bool,
    ) -> None:
        self._receiver, self._job, self._rank = receiver, registration.name, rank
        self._link = receiver if isinstance(receiver, NodeLink) else None
        if self._link is not None:
            self._link.on_wait = self._wait_for_node
        self._registration, self._recording, self._probes = registration, recording, probes
        self._failures: FailureLog = recording.failures
        self._batch_records, self._interval_s, self._seed = batch_records, interval_s, seed
        self._heartbeat = HeartbeatSender(
            receiver, self._job, rank, recording, self._failures, interval_s=heartbeat_s,
            stacks=stacks, sampler=Sampler(recording) if sensors else None,
        )  # fmt: skip
        self._tick_s = min(interval_s, heartbeat_s or inf, threading.TIMEOUT_MAX)
        self.buffer = Buffer(capacity, self._start)
        self._forget_exit: Callable[[], object] = lambda: None
        self.reset()

    def reset(self) -> None:
        """Return to the initial state, with an empty buffer and no thread, as in a forked child."""
        self._forget_exit()
        self.buffer.reset()
        self._registration.reset()
        self.counts = Counts()
        self._batcher = Batcher(self._rank, self._failures)
        self._pace = MessagePace(self._interval_s, self._seed)
        if self._link is not None:
            self._link.reset()
        self._process = uuid.uuid4().hex
        self._heartbeat.reset(self._process)
        self._messages = 0
        self._taken = 0
        self._summed = 0  # of the oldest entries in the buffer: they are a few numbers
        self._reported = 0  # dropped records that the sidecar knows of
        self.in_flight = 0  # records out of the buffer that are neither sent nor dropped
        self._closing = threading.Event()
        self._deadline_s = 0.0
        self._error = ""
        self._thread: threading.Thread | None = None

    def close(self, timeout_s: float, error: Callable[[], BaseException | None]) -> None:
        """Send what is buffered, for at most `timeout_s`; the rest is dropped. `error()` is the
        error that ends the process, if any."""
        self._forget_exit()
        self.end(timeout_s, error)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(min(timeout_s, threading.TIMEOUT_MAX))

    def end(self, timeout_s: float, error: Callable[[], BaseException | None]) -> None:
        """Close without waiting for it; the end of the process does wait."""
        self._deadline_s = monotonic() + _SENDING_SHARE * timeout_s
        self._error = own_fault(error())
        self.buffer.close()
        self._closing.set()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="resihp-sender", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no threads left: the buffer fills and drops
            self._failures.add("starting the sender", error)
        else:
            self._thread = thread
            at_exit = weakref.finalize(thread, self.close, _EXIT_TIMEOUT_S, fatal_error)
            self._forget_exit = at_exit.detach
            if multiprocessing.parent_process() is not None:  # such a child runs no atexit callback
                Finalize(None, self.close, (_EXIT_TIMEOUT_S, current_error), exitpriority=0)

    def _run(self) -> None:
        tick_s = self._tick_s
        next_flush_s = monotonic() + self._interval_s
        self._guarded(self._beat)
        while not self._closing.wait(tick_s):
            if monotonic() >= next_flush_s - tick_s / 2:
                self._guarded(self._flush)
                next_flush_s = monotonic() + self._pace.interval_s
            self._guarded(self._beat)
        self._finish()
        self._forget_exit()

    def _finish(self) -> None:
        if self._link is not None:
            self._link.close()
        while self._guarded(self._flush) and self.buffer.entries and monotonic() < self._deadline_s:
            sleep(_POLL_S)
        self._registration.closed()
        self.buffer.drop(len(self.buffer.entries))
        self.buffer.entries.clear()
        if monotonic() < self._deadline_s:
            self._guarded(lambda: self._heartbeat.leave(self._error))
        if self._link is not None:
            self._link.join(self._deadline_s - monotonic())

    def _guarded(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception as error:  # noqa: BLE001 the boundary: the sender survives any trouble
            self._failures.add("the sender", error)
            return False
        return True

    def _beat(self) -> None:
        self._heartbeat.observe(self._taken + len(self.buffer.entries))
        self._heartbeat.beat_if_due()
        self._sum()

    def _sum(self) -> None:
        """Sum the work of entries that wait, and read their times: lengths of many positions, and
        the device's events, would take gigabytes while the sidecar is away."""
        self._adopt_device()
        waiting = self.buffer.entries
        while self._summed < len(waiting):
            entry = waiting[self._summed]
            if isinstance(entry, Span):
                if not ready(entry):
                    return
                with contextlib.suppress(Exception):  # counted as the entry is sent
                    entry.settle()
                    if entry.work is not None:
                        entry.work = features(entry.work)
            self._summed += 1

    def _adopt_device(self) -> None:
        if (device := self._recording.device) is not None:
            device.adopt_thread()

    def _flush(self) -> None:
        self._adopt_device()
        if not self._registration.is_ready(now=self._closing.is_set()):
            return
        self._answer_probes()
        while entries := self._take():
            self.in_flight, accepted = len(entries), 0
            try:
                accepted = self._deliver(entries)
            except Exception as error:  # noqa: BLE001 the boundary: only these records are lost
                self._failures.add("sending telemetry", error)
            self.buffer.drop(len(entries) - accepted)
            self.in_flight = 0

    def _take(self) -> list[Record | Span]:
        """Remove the oldest ready entries of one plan version; only this thread removes any."""
        waiting = self.buffer.entries
        taken: list[Record | Span] = []
        while waiting and len(taken) < self._batch_records:
            first = waiting[0]
            entry = first if isinstance(first, Span) else Record._make(first)
            if (taken and entry.plan_version != taken[0].plan_version) or not ready(entry):
                break
            taken.append(entry)
            waiting.popleft()
        self._taken += len(taken)
        self._summed = max(0, self._summed - len(taken))
        return taken

    def _deliver(self, entries: list[Record | Span]) -> int:
        """Send entries; return the number of records that the sidecar accepted."""
        batch = self._batcher.batch(entries)
        if not len(batch):
            return 0
        self._heartbeat.count(batch)
        dropped = self.buffer.dropped - self._reported
        message = encode(replace(batch, dropped=dropped) if dropped else batch)
        self._messages += 1
        if not self._send(message, f"{self._process}-{self._rank}-{self._messages}"):
            return 0
        self._reported += dropped
        self.counts.batches += 1
        self.counts.records += len(batch)
        return len(batch)

    def _send(self, message: bytes, key: str) -> bool:
        """Send a message until it is accepted; False if it was given up."""
        while True:
            try:
                self._registration.register_if_due(self._receiver)
                answer = self._receiver.send_telemetry(self._job, message, WireFormat.MSGPACK, key)
            except ServiceError as error:
                if not self._may_repeat(error) or not self._pause(self._pace.refused(error)):
                    return False
                self.counts.retries += 1
            else:
                self._pace.accepted(answer)
                self._registration.known()
                self._heartbeat.telemetry_accepted(self._pace.interval_s)
                self._probes.add(answer, self._rank)
                return True

    def _answer_probes(self) -> None:
        """Send the answers to probes once: the sidecar does not wait for one that is lost."""
        while self._probes.answers:
            answer = self._probes.answers.popleft()
            try:
                self._receiver.answer_probe(
                    self._job, probe=answer.id, rank=self._rank, ms=answer.ms, detail=answer.detail
                )
            except ServiceError as error:
                self._failures.warn_once("probe", f"the answer to a probe was lost: {error}")

    def _may_repeat(self, error: ServiceError) -> bool:
        if error.status == UNKNOWN_JOB:
            self._registration.unknown()
        elif is_temporary(error):
            self._failures.warn_once("away", f"telemetry waits for the sidecar: {error}")
        else:
            self.counts.refused += 1
            self._failures.warn_once("refused", f"the sidecar refuses telemetry: {error}")
            return False
        return True

    def _pause(self, delay_s: float) -> bool:
        """Wait before a repetition, beating; False when there is no time for another."""
        until_s = monotonic() + delay_s
        while (wait_s := until_s - monotonic()) > 0:
            if self._closing.wait(min(wait_s, self._tick_s)):
                left_s = self._deadline_s - monotonic()
                sleep(max(0.0, min(_LAST_DELAY_S, left_s)))
                return left_s > 0
            self._guarded(self._beat)
        return True

    def _wait_for_node(self) -> float:
        """Beat while the node's sender holds a message; return the seconds left for waiting."""
        self._guarded(self._beat)
        return self._deadline_s - monotonic() if self._closing.is_set() else float("inf")
