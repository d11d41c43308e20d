"""Load of the ingest benchmark: what the hooks of many hosts send, at given times."""

from __future__ import annotations

import itertools
import json
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import numpy as np

from resihp.contracts import Job, Layout, Op, TelemetryBatch, TrainingPosition, to_json
from resihp.contracts.codec import encode
from resihp.testing.scenarios import Fault, steps_of

_LENGTHS = (300, 700, 2000)
_TEMPLATES = 4  # different steps of healthy ranks, sent in turns; as many with the slow ranks
_FACTOR = 1.3  # by which the slow ranks are slow
_GOLDEN = 0.618034  # spreads the times of any number of hosts evenly over an interval
_UNCONDITIONAL = 10  # a heartbeat is sent once in so many of its intervals beside telemetry
_SEND_BUFFER = 1 << 18  # a whole message, so that no sending waits for a server that is busy
_ANSWER_S = 60.0  # wait for the last answers


@dataclass(frozen=True, kw_only=True)
class Load:
    """A job of which some ranks are slow from one step on.

    together      ranks whose records and heartbeats one sender sends: those of a host, or one
    step_s        time of a step
    interval_s    time between two messages of a sender; a step's time is a multiple of it
    microbatches  of each replica in a step; each makes two records
    slow          number of ranks that become slow
    """

    ranks: int
    together: int
    step_s: float
    interval_s: float
    microbatches: int
    slow: int = 1

    @property
    def slow_ranks(self) -> list[int]:
        """Ranks that become slow, in different replicas where there are enough."""
        return [number * self.ranks // self.slow + 13 for number in range(self.slow)]

    @property
    def parts(self) -> int:
        """Messages of a sender for one step."""
        return round(self.step_s / self.interval_s)

    @property
    def hosts(self) -> int:
        """Number of senders."""
        return self.ranks // self.together

    @property
    def records_per_s(self) -> float:
        """Records per second of all ranks."""
        return self.ranks * 2 * self.microbatches / self.step_s

    def steps(self, seconds: float) -> int:
        """Whole steps in a time."""
        return max(5, round(seconds / self.step_s))

    def first_slow_step(self, seconds: float) -> int:
        """Step in which the slow ranks become slow."""
        return max(2, self.steps(seconds) // 3)

    @property
    def beat_s(self) -> float:
        """Time between two heartbeats of a rank, which the hooks choose by the size of the job."""
        return max(1.0, self.ranks / 1_000)

    @property
    def job(self) -> Job:
        """Description of the job."""
        layout = Layout.grid(dp=self.ranks // 32, pp=4, tp=8, layers=32)
        return Job(name="bench", layout=layout, microbatches=self.microbatches * layout.dp)

    def batches(self) -> Iterator[list[list[TelemetryBatch]]]:
        """Records of one step after the other, by part and by host; those of the second half are
        with the slow ranks."""
        faults = [Fault(rank=r, factor=_FACTOR, from_step=_TEMPLATES) for r in self.slow_ranks]
        for step in steps_of(self.job, _LENGTHS, steps=2 * _TEMPLATES, seed=0, faults=faults):
            place = step.microbatch * self.parts // self.microbatches
            place = place * self.hosts + step.rank // self.together
            order = np.argsort(place, kind="stable")
            edges = np.searchsorted(place[order], np.arange(1, self.parts * self.hosts))
            found = [step.select(rows) for rows in np.split(order, edges)]
            yield [found[i : i + self.hosts] for i in range(0, len(found), self.hosts)]


@dataclass(frozen=True)
class _Template:
    """An encoded message whose column of steps, all of one step, is written anew."""

    head: bytes
    tail: bytes
    records: int

    @classmethod
    def of(cls, batch: TelemetryBatch) -> _Template:
        message, column = encode(batch), batch.step.tobytes()
        at = message.index(column, message.index(b"\xa4step"))
        return cls(message[:at], message[at + len(column) :], len(batch))

    def at(self, step: int) -> bytes:
        return b"".join([self.head, _column(step, self.records), self.tail])


@cache
def _column(step: int, records: int) -> bytes:
    return np.full(records, step, "<i8").tobytes()


@dataclass(eq=False)
class _Sender:
    """Connection of one host for its records or its heartbeats. It sends the next request when the
    last one is answered, as hooks do; those that are due meanwhile wait, and that time counts."""

    host: int
    accepted_s: float = float("-inf")
    number: int = 0
    waiting: deque[tuple[float, bytes, int]] = field(default_factory=deque)
    sent: tuple[float, bytes, int] | None = None
    socket: socket.socket | None = None
    beats: _Sender | None = None
    received: bytearray = field(default_factory=bytearray)


class LoadSender:
    """Sends a load to a service, at its times whatever the answers; what is refused is counted
    and not sent again."""

    def __init__(self, load: Load, url: str, seconds: float) -> None:
        parts = urlsplit(url)
        self._load, self._address = load, (parts.hostname, parts.port)
        self._steps, self._first_slow = load.steps(seconds), load.first_slow_step(seconds)
        self._selector = selectors.DefaultSelector()
        self._senders = [_Sender(host, beats=_Sender(host)) for host in range(load.hosts)]
        self._templates = [
            [[_Template.of(batch) for batch in part] for part in parts] for parts in load.batches()
        ]
        self._statuses: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._latencies_s: list[float] = []
        self._first_slow_s: dict[int, float] = {}

    def run(self) -> dict[str, object]:
        """Send everything; return counts, latencies and the times of the first slow records."""
        plan = self._plan()
        begun_s, spent_s = time.monotonic(), time.process_time()
        for due_s, sender, step, part in plan:
            while (left_s := begun_s + due_s - time.monotonic()) > 0:
                self._receive(left_s)
            if part is None:
                self._beat(sender, step)
            else:
                content, records = self._telemetry(sender, step, part)
                sender.waiting.append((begun_s + due_s, content, records))
                self._send(sender)
            self._receive(0.0)
        while (left_s := begun_s + self._steps * self._load.step_s - time.monotonic()) > 0:
            self._receive(left_s)
        seconds, in_time = time.monotonic() - begun_s, self._counts["accepted"]
        deadline_s = time.monotonic() + _ANSWER_S
        while any(s.sent for s in self._senders) and time.monotonic() < deadline_s:
            self._receive(0.1)
        p50_s, p99_s = np.percentile(self._latencies_s, [50, 99])
        return {
            "seconds": seconds,
            "accepted": self._counts["accepted"],
            "accepted_in_time": in_time,
            "telemetry": self._counts["telemetry"],
            "statuses": dict(self._statuses),
            "asked_slower": self._counts["asked_slower"],
            "reconnected": self._counts["reconnected"],
            "answer_p50_s": float(p50_s),
            "answer_p99_s": float(p99_s),
            "generator": (time.process_time() - spent_s) / (time.monotonic() - begun_s),
            "first_slow_step": self._first_slow,
            "first_slow_s": self._first_slow_s,
        }

    def _plan(self) -> list[tuple[float, _Sender, int, int | None]]:
        """Messages by their times: records of a part of a step; heartbeats where that is None."""
        load = self._load
        found: list[tuple[float, _Sender, int, int | None]] = []
        for number, sender in enumerate(self._senders):
            phase_s = load.interval_s * (number * _GOLDEN % 1.0)
            for step, part in itertools.product(range(self._steps), range(load.parts)):
                due_s = step * load.step_s + part * load.interval_s + phase_s
                found.append((due_s, sender, step, part))
            times = np.arange(phase_s, self._steps * load.step_s, load.beat_s)
            found += [(due_s, sender, int(due_s // load.step_s), None) for due_s in times.tolist()]
        return sorted(found, key=lambda each: (each[0], each[3] is None))

    def _beat(self, sender: _Sender, step: int) -> None:
        """Send heartbeats where they are due: neither they nor records were sent for an interval,
        or no heartbeats for ten."""
        now_s, beats, beat_s = time.monotonic(), sender.beats, self._load.beat_s
        assert beats is not None
        is_silent = now_s - max(sender.accepted_s, beats.accepted_s) >= beat_s
        if beats.sent is None and (
            is_silent or now_s - beats.accepted_s >= _UNCONDITIONAL * beat_s
        ):
            beats.number += 1
            beats.waiting.append((now_s, self._heartbeats(sender, step, beats.number), 0))
            self._send(beats)

    def _telemetry(self, sender: _Sender, step: int, part: int) -> tuple[bytes, int]:
        number = step % _TEMPLATES + _TEMPLATES * (step >= self._first_slow)
        template = self._templates[number][part][sender.host]
        sender.number += 1
        key = f"{sender.host}-{sender.number}"
        content = _request("telemetry", "application/msgpack", template.at(step), key)
        if step >= self._first_slow:
            self._first_slow_s.setdefault(sender.host, time.monotonic())
        return content, template.records

    def _heartbeats(self, sender: _Sender, step: int, number: int) -> bytes:
        first = sender.host * self._load.together
        sensors = {"seconds": 10.0, "busy": 0.91, "cpu_waiting": 0.002, "cpu_mhz": 2400.0}
        position = TrainingPosition(step=step, op=Op.FORWARD, microbatch=0)
        common = {
            "sequence": number, "step": step, "position": to_json(position), "sensors": sensors,
        }  # fmt: skip
        beats = [
            {"ranks": [rank], "process": f"{rank:032x}", **common}
            for rank in range(first, first + self._load.together)
        ]
        document = beats if self._load.together > 1 else beats[0]
        body = json.dumps(document, separators=(",", ":")).encode()
        return _request("heartbeats", "application/json", body)

    def _send(self, sender: _Sender) -> None:
        if sender.sent is not None or not sender.waiting:
            return
        sender.sent = sender.waiting.popleft()
        if sender.socket is None:
            sender.socket = socket.create_connection(self._address)
            sender.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            sender.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(sender.socket, selectors.EVENT_READ, sender)
        try:
            sender.socket.sendall(sender.sent[1])
        except ConnectionError:
            self._reconnect(sender)

    def _reconnect(self, sender: _Sender) -> None:
        """Follow the end of a connection, which servers close that are idle for some seconds."""
        assert sender.socket is not None
        self._selector.unregister(sender.socket)
        sender.socket.close()
        sender.socket = None
        sender.received.clear()
        if sender.sent is not None:
            sender.waiting.appendleft(sender.sent)
            sender.sent = None
            self._counts["reconnected"] += 1
            self._send(sender)

    def _receive(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            sender: _Sender = key.data
            assert sender.socket is not None
            try:
                content = sender.socket.recv(65_536)
            except ConnectionError:
                content = b""
            if not content:
                self._reconnect(sender)
                continue
            sender.received += content
            head, end, body = bytes(sender.received).partition(b"\r\n\r\n")
            if end and len(body) >= _content_length(head):
                sender.received.clear()
                self._answered(sender, head[9:12].decode(), body)
                self._send(sender)

    def _answered(self, sender: _Sender, status: str, body: bytes) -> None:
        assert sender.sent is not None
        due_s, _, records = sender.sent
        sender.sent = None
        self._statuses[status] += 1
        if status in ("200", "202"):
            sender.accepted_s = time.monotonic()
        if records:
            self._counts["telemetry"] += 1
            self._latencies_s.append(time.monotonic() - due_s)
            if status == "202":
                self._counts["accepted"] += records
                self._counts["asked_slower"] += b"interval_s" in body


def _request(path: str, form: str, body: bytes, key: str = "") -> bytes:
    head = f"POST /v1/jobs/bench/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {form}\r\n"
    head += f"Idempotency-Key: {key}\r\n" if key else ""
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _content_length(head: bytes) -> int:
    place = head.lower().index(b"content-length:")
    return int(head[place + 15 :].split(b"\r\n", 1)[0])


def send_load(connection: Connection, load: Load, url: str, seconds: float) -> None:
    """Run a `LoadSender` as a process: says when it is ready, and starts when it is told to."""
    sender = LoadSender(load, url, seconds)
    connection.send(None)
    connection.recv()
    connection.send(sender.run())
