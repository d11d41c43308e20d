"""The sender of a node: one process sends for all ranks of a job on its host."""

from __future__ import annotations

import selectors
import threading
import uuid
from dataclasses import dataclass, field
from time import monotonic

from resihp.client import Client

from ._merger import HeartbeatMerger, MessageMerger, RankMessage, TelemetryMerger
from ._node_socket import SILENCE_S, Frame, FrameKind, FrameSocket, NodeListener
from ._pace import MessagePace
from ._stats import FailureLog

_WAIT_EVERY_S = 0.5
_MOST_RANKS = 256
_LONGEST_HOLD_S = 1.0
"""Longest time for which a heartbeat waits for those of other ranks."""
_CLOSE_S = 1.5
"""Time for what is on its way when the sender closes."""


@dataclass(eq=False)
class _Rank:
    """A connected rank; `held`: kinds of its messages that are not answered yet."""

    socket: FrameSocket
    held: set[FrameKind] = field(default_factory=set)


class NodeSender:
    """Sends the messages of the ranks that connect to `listener`.

    1. A rank connects and gets `WELCOME`.
    2. It hands in a message, `TELEMETRY` or `HEARTBEAT`; at most one of each kind at a time.
    3. The messages of all ranks are merged and sent. Meanwhile each rank gets `WAIT` every 0.5 s:
       after `SILENCE_S` without, it looks for another sender and hands its message in there.
    4. A rank that is about to end sends `FLUSH`: what is held is sent at once.
    5. It gets the sidecar's answer, in a frame of the same kind. Only then are its records sent.

    Nothing is sent that a rank has not handed in: a rank that hangs or dies falls silent here as it
    would at the sidecar. A sender that finds that it was itself stopped for `SILENCE_S` drops
    everything, because its ranks have left it with their messages.

    own  connection of the rank in whose process this is; its end closes the sender
    """

    def __init__(
        self,
        listener: NodeListener,
        own: FrameSocket,
        client: Client,
        job: str,
        *,
        interval_s: float,
        heartbeat_s: float,
        seed: int,
        failures: FailureLog,
    ) -> None:
        self._listener, self._failures = listener, failures
        self._own = _Rank(own)
        self._ranks: set[_Rank] = set()
        self._ran_s = monotonic()
        identity, pace = f"{uuid.uuid4().hex}-node", MessagePace(interval_s, seed)
        self._mergers: dict[FrameKind, MessageMerger] = {
            FrameKind.TELEMETRY: TelemetryMerger(
                client, job, identity, pace, failures, self._was_stopped
            ),
            FrameKind.HEARTBEAT: HeartbeatMerger(
                client, job, min(heartbeat_s, _LONGEST_HOLD_S), failures, self._was_stopped
            ),
        }
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="resihp-node", daemon=True)

    def start(self) -> None:
        """Start the threads. Raises `RuntimeError` if the process cannot have more."""
        self._ran_s = monotonic()
        try:
            for thread in (*(merger.thread for merger in self._mergers.values()), self._thread):
                thread.start()
        except RuntimeError:
            for merger in self._mergers.values():
                merger.close()
            raise

    def join(self, timeout_s: float) -> None:
        """Wait until it has closed, once the rank of this process has."""
        self._thread.join(max(0.0, timeout_s))

    def abandon(self) -> None:
        """Close this process's copies of the sockets. A forked child, which has no thread of it,
        does nothing else."""
        self._listener.close()
        for rank in (*self._ranks, self._own):
            rank.socket.close()
        self._selector.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 the boundary: the ranks look for another sender
            self._failures.add("the node's sender", error)
        self._listener.close()
        for merger in self._mergers.values():
            merger.close()
        deadline_s = monotonic() + _CLOSE_S
        for merger in self._mergers.values():
            merger.thread.join(max(0.0, deadline_s - monotonic()))
        self.abandon()

    def _serve(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._add(self._own)
        waits_s = self._ran_s
        while self._own in self._ranks:
            ready = self._selector.select(_WAIT_EVERY_S)
            if self._was_stopped():
                return
            self._ran_s = now_s = monotonic()
            for key, _ in ready:
                if key.data is None:
                    self._accept()
                else:
                    self._receive(key.data)
            if now_s - waits_s >= _WAIT_EVERY_S:
                waits_s = now_s
                for rank in [rank for rank in self._ranks if rank.held]:
                    self._send(rank, FrameKind.WAIT)

    def _was_stopped(self) -> bool:
        """Return whether the loop, which runs every 0.5 s, has not; from any thread."""
        return monotonic() - self._ran_s > SILENCE_S

    def _accept(self) -> None:
        try:
            rank = _Rank(self._listener.accept())
        except OSError as error:
            self._failures.warn_once("node", f"a rank could not connect: {error}")
            return
        if len(self._ranks) < _MOST_RANKS:
            self._add(rank)
            self._send(rank, FrameKind.WELCOME)
        else:
            rank.socket.close()

    def _add(self, rank: _Rank) -> None:
        self._ranks.add(rank)
        self._selector.register(rank.socket, selectors.EVENT_READ, rank)

    def _remove(self, rank: _Rank) -> None:
        self._ranks.discard(rank)
        self._selector.unregister(rank.socket)
        rank.socket.close()
        for merger in self._mergers.values():
            merger.forget(rank)

    def _receive(self, rank: _Rank) -> None:
        try:
            for frame in rank.socket.receive():
                self._take(rank, frame)
        except OSError:
            self._remove(rank)

    def _take(self, rank: _Rank, frame: Frame) -> None:
        kind = frame.kind
        if kind is FrameKind.FLUSH:
            self._mergers[FrameKind.TELEMETRY].flush()
            return
        if kind not in self._mergers or kind in rank.held:
            raise ConnectionError("a rank hands in one message of a kind at a time")

        def answer(content: bytes) -> None:
            if kind in rank.held:
                rank.held.discard(kind)
                self._send(rank, kind, content)

        rank.held.add(kind)
        self._mergers[kind].add(RankMessage(rank, frame.content, answer))

    def _send(self, rank: _Rank, kind: FrameKind, content: bytes = b"") -> None:
        """Send a frame, or disconnect a rank that is gone or reads nothing; from any thread."""
        try:
            rank.socket.send(kind, content)
        except OSError:
            rank.socket.shutdown()
