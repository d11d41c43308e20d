"""Load of the ingest benchmark: what the hooks of many hosts send, at the times that they keep."""

from __future__ import annotations

import heapq
import itertools
import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import numpy as np

from resihp.contracts import (
    Job,
    Layout,
    Op,
    ServiceError,
    TelemetryBatch,
    TrainingPosition,
    to_json,
)
from resihp.contracts.codec import EncodedBatch, encode
from resihp.hooks._pace import MessagePace, heartbeat_interval_s
from resihp.testing.scenarios import Fault, steps_of

_LENGTHS = (300, 700, 2000)
_TEMPLATES = 4  # different steps of healthy ranks, sent in turns; as many with the slow ranks
_FACTOR = 1.3  # by which the slow ranks are slow
_GOLDEN = 0.618034  # spreads the times of any number of hosts evenly over an interval
_UNCONDITIONAL = 10  # a heartbeat is sent once in so many of its intervals beside telemetry
_SENSORS_EVERY = 4.5  # of its intervals
_SEND_BUFFER = 1 << 18  # a whole message, so that no sending waits for a server that is busy
_ANSWER_S = 60.0  # wait for the last answers


@dataclass(frozen=True, kw_only=True)
class Load:
    """Jobs, in some of which some ranks are slow from one step on.

    ranks         of each job
    together      ranks whose records and heartbeats one sender sends: those of a host, or one
    step_s        time of a step
    interval_s    time between two messages of a sender; a step's time is a multiple of it
    microbatches  of each replica in a step; each makes two records
    slow          number of ranks that become slow, in each job that has some
    jobs          number of jobs, of which the first `slow_jobs` have slow ranks
    workers       of the service
    """

    ranks: int
    together: int
    step_s: float
    interval_s: float
    microbatches: int
    slow: int = 1
    jobs: int = 1
    slow_jobs: int = 1
    workers: int = 1

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
        """Number of senders of a job."""
        return self.ranks // self.together

    @property
    def records_per_s(self) -> float:
        """Records per second of all ranks."""
        return self.jobs * self.ranks * 2 * self.microbatches / self.step_s

    def steps(self, seconds: float) -> int:
        """Whole steps in a time."""
        return max(5, round(seconds / self.step_s))

    def first_slow_step(self, seconds: float) -> int:
        """Step in which the slow ranks become slow."""
        return max(2, self.steps(seconds) // 3)

    @property
    def beat_s(self) -> float:
        """Time between two heartbeats of a rank, which the hooks choose by the size of the job."""
        return heartbeat_interval_s(1.0, self.ranks)

    @cached_property
    def descriptions(self) -> list[Job]:
        """The jobs, which differ in their names."""
        layout = Layout.grid(dp=self.ranks // 32, pp=4, tp=8, layers=32)
        job = Job(name="bench", layout=layout, microbatches=self.microbatches * layout.dp)
        return [job, *(replace(job, name=f"bench-{number}") for number in range(1, self.jobs))]

    def batches(self) -> Iterator[list[list[TelemetryBatch]]]:
        """Records of one step after the other, by part and by host; those of the second half are
        with the slow ranks."""
        faults = [Fault(rank=r, factor=_FACTOR, from_step=_TEMPLATES) for r in self.slow_ranks]
        for step in steps_of(
            self.descriptions[0], _LENGTHS, steps=2 * _TEMPLATES, seed=0, faults=faults
        ):
            place = step.microbatch * self.parts // self.microbatches
            place = place * self.hosts + step.rank // self.together
            order = np.argsort(place, kind="stable")
            edges = np.searchsorted(place[order], np.arange(1, self.parts * self.hosts))
            found = [step.select(rows) for rows in np.split(order, edges)]
            yield [found[i : i + self.hosts] for i in range(0, len(found), self.hosts)]


@cache
def _column(step: int, records: int) -> bytes:
    return np.full(records, step, "<i8").tobytes()


@dataclass(eq=False)
class _Connection:
    """A connection for one request after the other, and what is called with the status and body of
    the answer to the one on its way."""

    socket: socket.socket | None = None
    request: bytes | None = None
    answered: Callable[[str, bytes], None] = lambda status, body: None
    received: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class _Host:
    """Sender of the ranks of one host. As those of the hooks it sends the next message when the
    last one is answered, all together that was due meanwhile, and not before the interval is over
    that the sidecar asks for. `allowed_s` is the end of that interval."""

    job: int
    number: int
    pace: MessagePace
    records: _Connection = field(default_factory=_Connection)
    beats: _Connection = field(default_factory=_Connection)
    waiting: list[tuple[float, EncodedBatch]] = field(default_factory=list)
    allowed_s: float = float("-inf")
    accepted_s: float = float("-inf")
    beaten_s: float = float("-inf")
    sensors_s: float = float("-inf")
    messages: int = 0


class LoadSender:
    """Sends a load to a service as the hooks of its ranks would; what is refused is counted and not
    sent again."""

    def __init__(self, load: Load, url: str, seconds: float) -> None:
        parts = urlsplit(url)
        self._load, self._address = load, (parts.hostname, parts.port)
        self._steps, self._first_slow = load.steps(seconds), load.first_slow_step(seconds)
        self._selector = selectors.DefaultSelector()
        self._hosts = [
            _Host(job, number, MessagePace(load.interval_s, seed=0))
            for job in range(load.jobs)
            for number in range(load.hosts)
        ]
        self._templates = [
            [[EncodedBatch.read(encode(batch)) for batch in part] for part in parts]
            for parts in load.batches()
        ]
        self._later: list[tuple[float, int, _Host]] = []  # hosts that wait for their intervals
        self._numbers = itertools.count()
        self._statuses: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._latencies_s: list[float] = []
        self._first_slow_s: dict[tuple[int, int], float] = {}

    def run(self) -> dict[str, object]:
        """Send everything; return counts, latencies and the times of the first slow records."""
        plan = self._plan()
        begun_s, spent_s = time.monotonic(), time.process_time()
        for due_s, host, step, part in plan:
            self._receive_until(begun_s + due_s)
            if part is None:
                self._beat(host, step)
            else:
                self._record(host, step, part, begun_s + due_s)
            self._receive(0.0)
        self._receive_until(begun_s + self._steps * self._load.step_s)
        seconds, in_time = time.monotonic() - begun_s, self._counts["accepted"]
        deadline_s = time.monotonic() + _ANSWER_S
        while self._later or any(h.records.request or h.beats.request for h in self._hosts):
            self._receive_until(min(time.monotonic() + 0.1, deadline_s))
            if time.monotonic() >= deadline_s:
                break
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

    def _plan(self) -> list[tuple[float, _Host, int, int | None]]:
        """Times at which records are due, those of a part of a step, and heartbeats (None)."""
        load = self._load
        found: list[tuple[float, _Host, int, int | None]] = []
        for place, host in enumerate(self._hosts):
            phase_s = load.interval_s * (place * _GOLDEN % 1.0)
            phase_s += load.step_s * host.job / load.jobs  # jobs have nothing to do with each other
            for step, part in itertools.product(range(self._steps), range(load.parts)):
                due_s = step * load.step_s + part * load.interval_s + phase_s
                if len(self._template(host, step, part)):
                    found.append((due_s, host, step, part))
            times = np.arange(0.0, self._steps * load.step_s, load.beat_s)
            found += [(phase_s + s, host, int(s // load.step_s), None) for s in times.tolist()]
        return sorted(found, key=lambda each: (each[0], each[3] is None))

    def _beat(self, host: _Host, step: int) -> None:
        """Send heartbeats where they are due: neither they nor records were sent for an interval,
        or no heartbeats for ten."""
        now_s, beat_s = time.monotonic(), self._load.beat_s
        silence_s = min(max(beat_s, 1.25 * host.pace.interval_s), 4.0 * beat_s)
        is_silent = now_s - max(host.accepted_s, host.beaten_s) >= silence_s
        if host.beats.request is None and (
            is_silent or now_s - host.beaten_s >= _UNCONDITIONAL * beat_s
        ):
            body = self._heartbeats(host, step)
            request = self._request(host, "heartbeats", "application/json", body)
            self._send(host.beats, request, partial(self._beaten, host))

    def _beaten(self, host: _Host, status: str, body: bytes) -> None:
        if status == "202":
            host.beaten_s = time.monotonic()

    def _is_slow(self, host: _Host, step: int) -> bool:
        return step >= self._first_slow and host.job < self._load.slow_jobs

    def _template(self, host: _Host, step: int, part: int) -> EncodedBatch:
        number = step % _TEMPLATES + _TEMPLATES * self._is_slow(host, step)
        return self._templates[number][part][host.number]

    def _record(self, host: _Host, step: int, part: int, due_s: float) -> None:
        """Add records to those that wait, and send them."""
        template = self._template(host, step, part)
        columns = template.columns | {"step": _column(step, len(template))}
        if self._is_slow(host, step):
            self._first_slow_s.setdefault((host.job, host.number), time.monotonic())
        if not host.waiting and time.monotonic() < host.allowed_s:
            self._send_later(host)
        host.waiting.append((due_s, replace(template, columns=columns)))
        self._send_records(host)

    def _send_records(self, host: _Host) -> None:
        if host.records.request is None and host.waiting and time.monotonic() >= host.allowed_s:
            host.messages += 1
            key = f"{host.job}-{host.number}-{host.messages}"
            batches = [batch for _, batch in host.waiting]
            body = EncodedBatch.merge(batches)
            due_s = max(host.waiting[0][0], host.allowed_s)
            host.waiting.clear()
            self._send(
                host.records, self._request(host, "telemetry", "application/msgpack", body, key),
                partial(self._recorded, host, due_s, sum(map(len, batches))),
            )  # fmt: skip

    def _recorded(self, host: _Host, due_s: float, records: int, status: str, body: bytes) -> None:
        now_s, pace = time.monotonic(), host.pace
        self._counts["telemetry"] += 1
        self._latencies_s.append(now_s - due_s)
        if status == "202":
            host.accepted_s = now_s
            self._counts["accepted"] += records
            self._counts["asked_slower"] += b"interval_s" in body
            pace.accepted(json.loads(body))
        else:
            pace.refused(ServiceError(body.decode(), status=int(status)))
        if pace.interval_s > pace.base_s:
            host.allowed_s = now_s + pace.interval_s
            if host.waiting:
                self._send_later(host)
        self._send_records(host)

    def _heartbeats(self, host: _Host, step: int) -> bytes:
        first = host.number * self._load.together
        host.messages += 1
        sensors = {"seconds": 10.0, "busy": 0.91, "cpu_waiting": 0.002, "cpu_mhz": 2400.0}
        position = TrainingPosition(step=step, op=Op.FORWARD, microbatch=0)
        common = {"sequence": host.messages, "step": step, "position": to_json(position)}
        if time.monotonic() - host.sensors_s >= _SENSORS_EVERY * self._load.beat_s:
            host.sensors_s = time.monotonic()
            common["sensors"] = sensors
        beats = [
            {"ranks": [rank], "process": f"{rank:032x}", **common}
            for rank in range(first, first + self._load.together)
        ]
        document = beats if self._load.together > 1 else beats[0]
        return json.dumps(document, separators=(",", ":")).encode()

    def _request(self, host: _Host, path: str, form: str, body: bytes, key: str = "") -> bytes:
        name = self._load.descriptions[host.job].name
        head = (
            f"POST /v1/jobs/{name}/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {form}\r\n"
        )
        head += f"Idempotency-Key: {key}\r\n" if key else ""
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def _send(
        self, connection: _Connection, request: bytes, answered: Callable[[str, bytes], None]
    ) -> None:
        connection.request, connection.answered = request, answered
        if connection.socket is None:
            connection.socket = socket.create_connection(self._address)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        try:
            connection.socket.sendall(request)
        except ConnectionError:
            self._reconnect(connection)

    def _reconnect(self, connection: _Connection) -> None:
        """Follow the end of a connection, which servers close that are idle for some seconds."""
        assert connection.socket is not None
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.socket = None
        connection.received.clear()
        if connection.request is not None:
            self._counts["reconnected"] += 1
            self._send(connection, connection.request, connection.answered)

    def _receive_until(self, until_s: float) -> None:
        """Follow the answers, and send what waits for the end of an interval."""
        while (left_s := until_s - time.monotonic()) > 0:
            self._receive(left_s)

    def _send_later(self, host: _Host) -> None:
        heapq.heappush(self._later, (host.allowed_s, next(self._numbers), host))

    def _receive(self, timeout_s: float) -> None:
        now_s = time.monotonic()
        while self._later and self._later[0][0] <= now_s:
            self._send_records(heapq.heappop(self._later)[2])
        if self._later:
            timeout_s = min(timeout_s, max(0.0, self._later[0][0] - now_s))
        for key, _ in self._selector.select(timeout_s):
            connection: _Connection = key.data
            assert connection.socket is not None
            try:
                content = connection.socket.recv(65_536)
            except ConnectionError:
                content = b""
            if not content:
                self._reconnect(connection)
                continue
            connection.received += content
            head, end, body = bytes(connection.received).partition(b"\r\n\r\n")
            if end and len(body) >= _content_length(head):
                connection.received.clear()
                connection.request = None
                status = head[9:12].decode()
                self._statuses[status] += 1
                connection.answered(status, body)


def _content_length(head: bytes) -> int:
    place = head.lower().index(b"content-length:")
    return int(head[place + 15 :].split(b"\r\n", 1)[0])


def send_load(connection: Connection, load: Load, url: str, seconds: float) -> None:
    """Run a `LoadSender` as a process: says when it is ready, and starts when it is told to."""
    sender = LoadSender(load, url, seconds)
    connection.send(None)
    connection.recv()
    connection.send(sender.run())
