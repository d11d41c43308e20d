"""Heartbeats of a rank, with the position of its training thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from typing import Protocol

import numpy as np

from resihp.contracts import Heartbeat, Op, ServiceError, TelemetryBatch, TrainingPosition

from ._flight_recorder import last_collective
from ._pace import UNKNOWN_JOB
from ._sampler import Sampler
from ._spans import FORWARD, Recording, Span
from ._stack import stack_of
from ._stats import FailureLog

_UNCONDITIONAL = 10
"""A heartbeat is sent once in so many intervals even while telemetry shows that the rank lives."""
_SENSORS_EVERY = 5
"""Sensors are told once in so many intervals at most."""
_SLOWEST = 4.0
"""Longest interval under a sidecar that is behind, in usual ones; a rank counts as dead after many
more."""
_MARGIN = 1.25  # of the interval of messages, which are signs of life too
_EXCHANGES = (Op.P2P, Op.COLLECTIVE)


class HeartbeatReceiver(Protocol):
    """Destination of heartbeats, e.g. `resihp.Client`. Raises `ServiceError`."""

    def send_heartbeat(self, job: str, heartbeat: Heartbeat) -> object:
        """Deliver one heartbeat; the answer may ask for the stack of the training thread."""
        ...


class HeartbeatSender:
    """Sends a heartbeat every `interval_s` in which no telemetry was accepted; 0: never. While the
    sidecar asks for fewer messages, the interval is longer.

    All methods are called by the sender's thread, and the position is what this thread sees of the
    training thread, which therefore pays nothing. A heartbeat that is lost is not repeated.

    stacks  the next heartbeat has the stack of the training thread if the sidecar asks for it,
            once for each place where the thread stays
    """

    def __init__(
        self,
        receiver: HeartbeatReceiver,
        job: str,
        rank: int,
        recording: Recording,
        failures: FailureLog,
        *,
        interval_s: float,
        stacks: bool = True,
        sampler: Sampler | None = None,
    ) -> None:
        self._stacks = stacks
        self._receiver, self._job, self._rank = receiver, job, rank
        self._recording, self._failures, self._sampler = recording, failures, sampler
        self.interval_s = interval_s
        self.reset("")

    def reset(self, process: str) -> None:
        """Start as the process `process` that has not sent anything."""
        self._process, self._sequence = process, 0
        self._is_known = False
        self._last_sign_s = self._last_beat_s = self._sensors_s = float("-inf")
        self._message_interval_s = 0.0
        self._seen: tuple[int, Span | None, bool, int] | None = None
        self._since_s = monotonic()
        self._step, self._passes = -1, 0
        if self._sampler is not None:
            self._sampler.reset()
        self._is_asked = False
        self._told_since_s = 0.0

    def count(self, batch: TelemetryBatch) -> None:
        """Count the passes in a batch of records, in their order."""
        if self._sampler is not None:
            self._sampler.count(batch)
        step = int(batch.step[-1])
        if step != self._step:
            self._step, self._passes = step, 0
        passes = (batch.step == step) & (batch.op <= Op.BACKWARD)
        self._passes += int(np.count_nonzero(passes))

    def telemetry_accepted(self, interval_s: float) -> None:
        """Note that a message of records has shown that this rank lives; the next one follows after
        `interval_s`.

        A heartbeat follows the first one at once: those before were of an unknown job.
        """
        if not self._is_known:
            self._is_known, self._last_beat_s = True, float("-inf")
        self._last_sign_s, self._message_interval_s = monotonic(), interval_s

    def observe(self, entries: int) -> None:
        """Look where the training thread is; `entries` counts the records that it has made."""
        recording = self._recording
        span = recording.open
        seen = (recording.step, span, span is not None and span.waiting, entries)
        if seen != self._seen:
            self._seen, self._since_s = seen, monotonic()

    def beat_if_due(self) -> None:
        """Send a heartbeat if neither it nor telemetry was sent for an interval."""
        now_s, interval_s = monotonic(), self.interval_s
        if interval_s <= 0:
            return
        if self._sampler is not None:
            self._sampler.tick()
        since_beat_s = now_s - self._last_beat_s
        silence_s = min(max(interval_s, _MARGIN * self._message_interval_s), _SLOWEST * interval_s)
        is_silent = now_s - max(self._last_sign_s, self._last_beat_s) >= silence_s
        if is_silent or since_beat_s >= _UNCONDITIONAL * interval_s:
            self._last_beat_s = now_s
            self._send(left=False, error="")

    def leave(self, error: str) -> None:
        """Say that this process ends; `error` is what ended it, "" if nothing did."""
        if self.interval_s > 0 and self._sequence:
            self._send(left=True, error=error)

    def _send(self, *, left: bool, error: str) -> None:
        self._sequence += 1
        position, now_s = self._position(), monotonic()
        is_old = now_s - self._sensors_s >= (_SENSORS_EVERY - 0.5) * self.interval_s
        sampler = self._sampler if is_old and not left else None
        heartbeat = Heartbeat(
            ranks=(self._rank,),
            process=self._process,
            sequence=self._sequence,
            step=position.step,
            position=position,
            sensors=sampler.sample() if sampler is not None else None,
            left=left,
            error=error[:1_000],
        )
        is_asked, self._is_asked = self._is_asked, False  # once, whatever becomes of it
        if is_asked and not left:
            heartbeat = self._with_stack(heartbeat)
        try:
            answer = self._receiver.send_heartbeat(self._job, heartbeat)
        except ServiceError as lost:
            self._last_beat_s -= (_UNCONDITIONAL - 1) * self.interval_s
            refused = lost.status is not None and 400 <= lost.status < 500
            if refused and lost.status not in (UNKNOWN_JOB, 429):
                self._failures.warn_once("heartbeat", f"the sidecar refuses heartbeats: {lost}")
        else:
            if heartbeat.sensors is not None and sampler is not None:
                sampler.keep()
                self._sensors_s = now_s
            if is_asked:
                self._told_since_s = self._since_s
            is_told = self._told_since_s == self._since_s
            asks = isinstance(answer, Mapping) and answer.get("stack") is True
            self._is_asked = self._stacks and asks and not is_told
            if self._is_asked:
                self._last_beat_s = float("-inf")

    def _with_stack(self, heartbeat: Heartbeat) -> Heartbeat:
        collective = ""
        try:
            collective = last_collective()
        except Exception as error:  # noqa: BLE001 private to torch: the stack is told without it
            self._failures.add("reading torch's flight recorder", error)
        threads = (self._recording.pass_thread, self._recording.loop_thread)
        return replace(heartbeat, stack=stack_of(threads), collective=collective)

    def _position(self) -> TrainingPosition:
        step, span, waiting, _ = self._seen or (self._recording.step, None, False, 0)
        step = step or max(self._step, 0)  # an engine that times itself counts no steps here
        op: Op | None = None
        microbatch = -1
        if span is not None and not (span.op == FORWARD and span.microbatch < 0):  # not a step
            op, microbatch = Op(span.op), span.microbatch
        return TrainingPosition(
            step=step,
            microbatch=microbatch,
            op=op,
            waiting=waiting or op in _EXCHANGES,
            passes=self._passes if self._step == step else 0,
            for_s=round(monotonic() - self._since_s, 3),
        )
