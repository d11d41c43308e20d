"""One rank's way to the sidecar: by the sender of its node, or by itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from time import monotonic

import msgpack

from resihp.client import Client
from resihp.contracts import Heartbeat, Job, ServiceError
from resihp.contracts.codec import WireFormat

from ._merger import Answer, packed_heartbeat, packed_telemetry
from ._node_sender import NodeSender
from ._node_socket import (
    MOST_BYTES,
    SILENCE_S,
    SLOTS,
    FrameKind,
    FrameSocket,
    NodeAddress,
    NodeListener,
)
from ._stats import FailureLog

_ROUNDS = 8
"""Attempts to find a sender, for ranks that start at the same time."""
_ALONE_S = 10.0
"""Time for which a rank that found no sender sends by itself before it looks again."""


class NodeLink:
    """Sends what one rank has to say; all methods are called by the rank's sender thread.

    The ranks of a job on one host hand their records and heartbeats to one of them, which sends
    them merged: the first that listens at the job's address. Where it ends, or is silent for
    `SILENCE_S`, another one takes over, and each rank hands in again what was not answered. A
    message in flight at that moment may arrive twice; none is lost. A rank that finds no sender,
    and one that closes, sends by itself.

    client   sends what this process sends
    on_wait  called every 0.5 s while the node's sender holds records; returns the seconds for
             which this rank can still wait, finite if it is about to end
    """

    def __init__(
        self,
        client: Client,
        address: NodeAddress,
        job: str,
        rank: int,
        failures: FailureLog,
        *,
        interval_s: float,
        heartbeat_s: float,
        seed: int,
    ) -> None:
        self._client, self._address, self._job, self._rank = client, address, job, rank
        self._failures, self._seed = failures, seed
        self._interval_s, self._heartbeat_s = interval_s, heartbeat_s
        self.on_wait: Callable[[], float] = lambda: float("inf")
        self._socket: FrameSocket | None = None
        self._sender: NodeSender | None = None
        self._restart()

    def _restart(self) -> None:
        self._answers: dict[FrameKind, bytes] = {}
        self._is_waiting = self._is_closed = False
        self._slot = self._silent_slot = -1
        self._alone_until_s = float("-inf")

    def reset(self) -> None:
        """Return to the initial state in a forked child, whose parent's sockets it must not use."""
        if self._sender is not None:
            self._sender.abandon()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._sender = None
        self._restart()

    def close(self) -> None:
        """Send by itself from now on; if this process is the node's sender, that closes."""
        self._is_closed = True
        self._disconnect()

    def join(self, timeout_s: float) -> None:
        """Wait until the node's sender in this process, if any, has sent what was on its way."""
        if self._sender is not None:
            self._sender.join(timeout_s)

    def register(self, job: Job) -> None:
        """Register the job; by this process."""
        self._client.register(job)

    def answer_probe(
        self, job: str, *, probe: str, rank: int, ms: float | None, detail: str
    ) -> None:
        """Deliver the outcome of a probe; by this process."""
        self._client.answer_probe(job, probe=probe, rank=rank, ms=ms, detail=detail)

    def send_telemetry(
        self, job: str, message: bytes, form: WireFormat, key: str | None = None
    ) -> Answer:
        """Deliver an encoded batch. Raises `ServiceError`."""
        request = packed_telemetry(key or "", message)
        answer = self._request(FrameKind.TELEMETRY, request)
        return self._client.send_telemetry(job, message, form, key) if answer is None else answer

    def send_heartbeat(self, job: str, heartbeat: Heartbeat) -> Answer:
        """Deliver a heartbeat of this rank. Raises `ServiceError`."""
        answer = self._request(FrameKind.HEARTBEAT, packed_heartbeat(heartbeat))
        if answer is None:
            return self._client.send_heartbeat(job, heartbeat)
        return {"stack": self._rank in answer.get("stacks", ())}

    def _request(self, kind: FrameKind, content: bytes) -> Answer | None:
        """Hand a message to the node's sender and wait for the answer; None if there is no sender.

        Raises `ServiceError`, also where `on_wait` gives up.
        """
        if self._is_closed or len(content) > MOST_BYTES:
            return None
        if self._is_waiting:
            return self._nested(kind, content) if self._socket is not None else None
        self._is_waiting = True
        try:
            for _ in range(2):
                if not self._join_sender():
                    return None
                with contextlib.suppress(OSError):
                    return self._exchange(kind, content)
                self._disconnect()
            return None
        finally:
            self._is_waiting = False

    def _nested(self, kind: FrameKind, content: bytes) -> Answer | None:
        """Request within `on_wait`. Where the connection has ended, the outer request finds out:
        there may still be an answer for it to read."""
        try:
            return self._exchange(kind, content)
        except TimeoutError:
            self._disconnect()
        except OSError:
            pass
        return None

    def _exchange(self, kind: FrameKind, content: bytes) -> Answer:
        """Send a request and wait for its answer. Raises `OSError` if the connection ends before
        or is silent, and `ServiceError`."""
        used, read_s = self._socket, monotonic()
        assert used is not None
        try:
            used.send(kind, content)
            while kind not in self._answers:
                read_s = monotonic()
                for frame in used.receive():
                    if frame.kind is not FrameKind.WAIT:
                        self._answers[frame.kind] = frame.content
                    elif kind is FrameKind.TELEMETRY:
                        self._wait(used)
        except TimeoutError:
            if monotonic() - read_s < 1.5 * SILENCE_S:  # else this process was stopped
                self._silent_slot = self._slot
            raise
        document = msgpack.unpackb(self._answers.pop(kind))
        if "error" in document:
            raise ServiceError(document["error"], status=document["status"])
        answer: Answer = document["answer"]
        return answer

    def _wait(self, used: FrameSocket) -> None:
        left_s = self.on_wait()
        if left_s <= 0:
            self._disconnect()
            raise ServiceError("closed before the node's sender had an answer")
        if left_s < float("inf"):
            with contextlib.suppress(OSError):  # there may still be an answer to read
                used.send(FrameKind.FLUSH)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._answers.clear()

    def _join_sender(self) -> bool:
        """Connect to the node's sender, or become it; False if this rank sends by itself."""
        if self._socket is not None:
            return True
        if monotonic() < self._alone_until_s:
            return False
        try:
            self._socket = self._found()
        except (OSError, RuntimeError) as error:  # no such sockets, or no threads left
            self._failures.add("sharing the node's sender", error)
            self._alone_until_s = float("inf")
            return False
        self._silent_slot = -1
        if self._socket is None:
            self._alone_until_s = monotonic() + _ALONE_S
        return self._socket is not None

    def _found(self) -> FrameSocket | None:
        """Connect at the first address that answers, else listen at the first that is free."""
        for _ in range(_ROUNDS):
            free = []
            for self._slot in (slot for slot in range(SLOTS) if slot != self._silent_slot):
                try:
                    if (found := self._address.connect(self._slot)) is not None:
                        return found
                    free.append(self._slot)
                except OSError:  # a process that is stopped, or another user's
                    continue
            if not free:
                return None
            self._slot = free[0]
            if (listener := self._address.listen(self._slot)) is not None:
                return self._started(listener)
        return None

    def _started(self, listener: NodeListener) -> FrameSocket:
        own_end, other_end = socket.socketpair()
        self._sender = NodeSender(
            listener, FrameSocket(other_end, 0.0), self._client, self._job,
            interval_s=self._interval_s, heartbeat_s=self._heartbeat_s, seed=self._seed,
            failures=self._failures,
        )  # fmt: skip
        try:
            self._sender.start()
        except RuntimeError:
            self._sender.abandon()
            raise
        return FrameSocket(own_end, SILENCE_S)
