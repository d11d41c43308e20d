"""The ranks of one host send by one of them; its end or its standstill costs the others nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from resihp.client import Client
from resihp.contracts import Heartbeat, Job, Layout, Op, ServiceError, Status, TelemetryBatch
from resihp.contracts.codec import WireFormat, decode, encode
from resihp.hooks import Monitor, _node_link, _node_sender, _node_socket
from resihp.hooks._merger import (
    HeartbeatMerger,
    RankMessage,
    packed_error,
    packed_heartbeat,
    packed_telemetry,
)
from resihp.hooks._node_socket import SILENCE_S, FrameKind, FrameSocket, NodeAddress
from resihp.hooks._pace import MessagePace
from resihp.hooks._stats import FailureLog
from tests.forked import ForkedProcess
from tests.hooks import sharing_rank
from tests.service.forked_sidecar import ForkedSidecar

RANKS = 4
PATIENCE_S = 60.0
"""Silence of a sender that this machine may have held up: if another one took over, what was on its
way would come twice."""


def until(condition: Callable[[], Any], timeout_s: float = 300.0) -> None:
    """Wait for `condition`, for a bounded time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.02)


class HttpSidecar:
    """A sidecar that takes everything, or fails as `refusal` says: a status for a batch."""

    def __init__(self) -> None:
        self.batches: list[TelemetryBatch] = []
        self.keys: list[str] = []
        self.beats: list[list[dict[str, Any]]] = []
        self.refusal = lambda batch: 0
        self.headers: dict[str, str] = {}
        self.answer: dict[str, Any] = {}
        self.stacks: list[int] = []
        sidecar = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                key = self.headers.get("Idempotency-Key")
                status, answer = sidecar.take(self.path, key, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                for name, value in sidecar.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: object) -> None: ...

        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self._server.daemon_threads = True
        self._server.server_bind()  # connections are refused until it serves
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )

    def __enter__(self) -> HttpSidecar:
        self._server.server_activate()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join(30)
        self._server.server_close()

    def take(self, path: str, key: str | None, body: bytes) -> tuple[int, dict[str, Any]]:
        with self._lock:
            if path.endswith("/heartbeats"):
                beats = json.loads(body)
                self.beats.append(beats if isinstance(beats, list) else [beats])
                return 202, {"stacks": self.stacks}
            batch = decode(body)
            if status := self.refusal(batch):
                return status, {}
            assert key is not None
            if key not in self.keys:
                self.batches.append(batch)
                self.keys.append(key)
            return 202, self.answer

    def steps(self, rank: int) -> list[int]:
        """Steps of the records of a rank, as they came."""
        with self._lock:
            return [step for b in self.batches for step in b.step[b.rank == rank].tolist()]

    def ranks(self) -> list[list[int]]:
        """The ranks in each message."""
        with self._lock:
            return [sorted(set(batch.rank.tolist())) for batch in self.batches]

    def beating(self) -> set[int]:
        """The ranks of all heartbeats since the last call."""
        with self._lock:
            beats, self.beats = self.beats, []
        return {rank for message in beats for beat in message for rank in beat["ranks"]}


class Rank:
    """One process of `sharing_rank`."""

    def __init__(self, rank: int, url: str, log: Path, **options: Any) -> None:
        self.rank = rank
        given = {"interval_s": 0.4, "heartbeat_s": 0.4, "sensors": False, **options}
        given.setdefault("silence_s", PATIENCE_S)
        self._asked, theirs = multiprocessing.Pipe()
        with theirs, log.open("w") as errors:
            self.process = ForkedProcess(
                sharing_rank.main, url, given, theirs,
                out=errors.fileno(), err=errors.fileno(), RANK=str(rank), WORLD_SIZE=str(RANKS),
            )  # fmt: skip

    def state(self) -> dict[str, Any]:
        return self._ask("state")

    def end(self) -> dict[str, Any]:
        counts = self._ask("end")
        assert self.process.wait(60) == 0
        return counts

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self._asked.close()

    def _ask(self, word: str) -> dict[str, Any]:
        self._asked.send(word)
        return self._asked.recv()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of this process wait for a sender that is held up."""
    for module in (_node_link, _node_sender, _node_socket):
        monkeypatch.setattr(module, "SILENCE_S", PATIENCE_S)
    monkeypatch.setattr(_node_sender, "_CLOSE_S", PATIENCE_S)


@pytest.fixture
def sidecar() -> Iterator[HttpSidecar]:
    with HttpSidecar() as sidecar:
        yield sidecar


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts the ranks of a host; they are killed at the end."""
    ranks: list[Rank] = []

    def start(url: str, **options: Any) -> list[Rank]:
        ranks.extend(Rank(r, url, tmp_path / f"rank-{r}.log", **options) for r in range(RANKS))
        return list(ranks)

    yield start
    for rank in ranks:
        rank.kill()
        print((tmp_path / f"rank-{rank.rank}.log").read_text())  # noqa: T201 shown on failure


def sender_of(ranks: list[Rank]) -> Rank:
    """The rank whose process is the node's sender."""
    found: list[Rank] = []

    def is_one() -> bool:
        found[:] = [rank for rank in ranks if rank.state()["sends"]]
        return len(found) == 1

    until(is_one)
    return found[0]


def until_together(sidecar: HttpSidecar, ranks: int, messages: int = 3) -> None:
    """Wait until some more messages are of this many ranks."""
    begun = len(sidecar.batches)
    until(lambda: sum(len(each) == ranks for each in sidecar.ranks()[begun:]) >= messages)


def test_the_ranks_of_a_host_share_messages_and_all_records_arrive_once(sidecar, start):
    ranks = start(sidecar.url)
    until_together(sidecar, RANKS, 1)
    begun = len(sidecar.batches)
    until_together(sidecar, RANKS, 5)
    together = [len(each) for each in sidecar.ranks()[begun:]]
    assert sum(together) > 2 * len(together)
    for rank in ranks:
        counts = rank.end()
        assert sorted(sidecar.steps(rank.rank)) == list(range(counts["step"]))
        assert (counts["sent"], counts["dropped"], counts["failures"]) == (counts["step"], 0, 0)


def test_heartbeats_of_a_host_share_messages_and_a_stack_is_asked_of_its_rank(sidecar, start):
    ranks = start(sidecar.url, interval_s=60, heartbeat_s=0.2)
    until(lambda: any(len(message) == RANKS for message in sidecar.beats))
    sidecar.stacks = [2]
    with_stack = lambda: {  # noqa: E731
        rank for m in list(sidecar.beats) for b in m if b.get("stack") for rank in b["ranks"]
    }
    until(with_stack)
    begun = len(sidecar.beats)
    until(lambda: len(sidecar.beats) > begun + 5)
    assert with_stack() == {2}
    assert all(rank.end()["failures"] == 0 for rank in ranks)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_another_rank_takes_over_from_a_sender_that_dies_or_stands_still(sidecar, start, by):
    ranks = start(sidecar.url, silence_s=SILENCE_S if by == signal.SIGSTOP else PATIENCE_S)
    until_together(sidecar, RANKS)
    lost = sender_of(ranks)
    lost.process.send_signal(by)
    left = [rank for rank in ranks if rank is not lost]
    until_together(sidecar, RANKS - 1)
    sidecar.beating()
    until(lambda: len(sidecar.beats) > 3)
    assert lost.rank not in sidecar.beating()
    sender_of(left)
    if by == signal.SIGSTOP:
        lost.process.send_signal(signal.SIGCONT)
        until_together(sidecar, RANKS)  # it joins the rank that took over
        sender_of(ranks)
    for rank in left if by == signal.SIGKILL else ranks:
        counts = rank.end()
        assert sorted(set(sidecar.steps(rank.rank))) == list(range(counts["step"]))
        assert counts["dropped"] == 0
        twice = [step for step, n in Counter(sidecar.steps(rank.rank)).items() if n > 1]
        assert len(twice) < counts["step"] / 2  # at most what was on its way at that moment


def test_what_a_stale_merger_holds_goes_back_to_its_rank(sidecar):
    answers: list[bytes] = []
    merger = HeartbeatMerger(Client(sidecar.url), "j", 0.1, FailureLog(), lambda: True)
    merger.thread.start()
    content = packed_heartbeat(Heartbeat(ranks=(1,)))
    merger.add(RankMessage("rank 1", content, answers.append))
    until(lambda: answers)
    merger.close()
    merger.thread.join(60)
    assert answers == [packed_error(ServiceError("the node's sender was stopped"))]
    assert not sidecar.beats


def test_the_detector_names_a_dead_sender_and_no_other_rank(start, tmp_path):
    job = Job(name="j", layout=Layout.grid(dp=RANKS, pp=1, tp=1, layers=2), microbatches=RANKS)
    with ForkedSidecar(tmp_path / "data") as sidecar:
        client = Client(sidecar.url)
        client.register(job)
        ranks = start(sidecar.url, pause_s=0.1)

        def stopped() -> list[int]:
            verdicts = client.verdicts("j")
            return [each.rank for each in verdicts if each.status is Status.FAIL_STOP]

        until(lambda: all(rank.state()["sent"] > 60 for rank in ranks))
        lost = sender_of(ranks)
        lost.kill()
        until(stopped)
        assert stopped() == [lost.rank]
        for rank in ranks:
            if rank is not lost:
                assert rank.end()["dropped"] == 0
        assert stopped() == [lost.rank]


def test_records_wait_for_a_sidecar_that_starts_later(start):
    sidecar = HttpSidecar()
    ranks = start(sidecar.url)
    sender_of(ranks)
    until(lambda: all(rank.state()["step"] > 50 for rank in ranks))
    with sidecar:
        until_together(sidecar, RANKS)
        for rank in ranks:
            counts = rank.end()
            assert sorted(sidecar.steps(rank.rank)) == list(range(counts["step"]))


def test_an_overloaded_sidecar_slows_all_ranks_down_and_nothing_is_lost(sidecar, start):
    sidecar.headers = {"Retry-After": "1"}
    sidecar.refusal = lambda batch: 429
    ranks = start(sidecar.url, interval_s=0.1)
    until(lambda: all(rank.state()["step"] > 50 for rank in ranks))
    sidecar.answer = {"interval_s": 3.0}
    sidecar.refusal = lambda batch: 0
    until_together(sidecar, RANKS, 2)
    *_, last = [batch for batch in sidecar.batches if set(batch.rank.tolist()) == set(range(RANKS))]
    assert len(last) > RANKS * 0.5 / 0.01 / 4  # far more than 0.1 s of a record each 10 ms
    for rank in ranks:
        counts = rank.end()
        assert sorted(sidecar.steps(rank.rank)) == list(range(counts["step"]))
        assert counts["dropped"] == 0


def test_a_rank_that_ends_does_not_wait_for_the_interval(sidecar):
    """What is held until the others have records is sent at once."""
    sidecar.answer = {"interval_s": 30}
    with make(sidecar, 0, share_sender=True) as first, make(sidecar, 1, share_sender=True) as other:
        record(first, 0)
        until(lambda: first.stats.sent == 1)
        record(other, 0)
        until(lambda: other._sender.in_flight == 1)
        other.close(20)
        assert (other.stats.sent, other.stats.dropped) == (1, 0)


def test_the_last_records_of_a_rank_that_dies_are_sent_at_once(sidecar):
    sidecar.answer = {"interval_s": 30}
    with make(sidecar, 0, share_sender=True) as first:
        record(first, 0)
        until(lambda: first.stats.sent == 1)
        dying = NodeAddress("j", sidecar.url).connect(0)
        batch = TelemetryBatch(rank=[1], step=[5], microbatch=[0], op=[0], compute_ms=[1.0])
        dying.send(FrameKind.TELEMETRY, packed_telemetry("key", encode(batch)))
        dying.close()
        until(lambda: sidecar.steps(1) == [5], timeout_s=25.0)  # less than the interval


def test_a_refusal_costs_only_the_rank_whose_records_are_refused(sidecar, start):
    sidecar.refusal = lambda batch: 422 if 1 in batch.rank else 0
    ranks = start(sidecar.url)
    until(lambda: ranks[1].state()["refused"] > 2)
    sender_of(ranks)
    for rank in ranks:
        counts = rank.end()
        if rank.rank == 1:
            assert (counts["dropped"], counts["sent"]) == (counts["step"], 0)
        else:
            assert sorted(sidecar.steps(rank.rank)) == list(range(counts["step"]))


def record(monitor: Monitor, step: int) -> None:
    monitor.record(op=Op.FORWARD, compute_ms=1.0, step=step)


def make(sidecar: HttpSidecar, rank: int = 0, **options: Any) -> Monitor:
    return Monitor(job="j", url=sidecar.url, rank=rank, interval_s=0.05, sensors=False, **options)


def node_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("resihp-node")]


def test_sharing_follows_the_environment_and_the_option(sidecar, monkeypatch):
    until(lambda: not node_threads())  # those of other tests may take a while to end
    for variables, option, shares in [
        ({}, None, False),
        ({"WORLD_SIZE": "1"}, None, False),
        ({"WORLD_SIZE": "2"}, None, True),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, None, False),
        ({"WORLD_SIZE": "2"}, False, False),
        ({}, True, True),
    ]:
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with make(sidecar, share_sender=option) as monitor:
            record(monitor, 0)
            until(lambda monitor=monitor: monitor.stats.sent == 1)
            assert bool(node_threads()) is shares
        until(lambda: not node_threads())


def test_where_sockets_are_impossible_each_rank_sends_by_itself(sidecar, monkeypatch, caplog):
    def forbidden(self, slot):
        raise PermissionError("no sockets here")

    monkeypatch.setattr(NodeAddress, "listen", forbidden)
    with make(sidecar, share_sender=True) as monitor:
        for step in range(3):
            record(monitor, step)
            until(lambda step=step: monitor.stats.sent == step + 1)
        assert monitor.stats.failures == 1
        assert len(caplog.records) == 1
    assert sidecar.steps(0) == [0, 1, 2]


def test_a_forked_child_finds_the_sender_anew(sidecar):
    """The child does not speak on its parent's connection, nor holds the parent's address."""
    with make(sidecar, share_sender=True) as monitor:
        record(monitor, 0)
        until(lambda: monitor.stats.sent == 1)
        held = os.listdir("/proc/self/fd") if sys.platform == "linux" else []
        child = os.fork()
        if child == 0:
            fewer = not held or len(os.listdir("/proc/self/fd")) < len(held)
            record(monitor, 7)
            until(lambda: monitor.stats.sent == 1)
            os._exit(0 if fewer and not node_threads() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        record(monitor, 1)
        until(lambda: monitor.stats.sent == 2)
        assert monitor.stats.failures == 0
    assert sorted(sidecar.steps(0)) == [0, 1, 7]


def test_what_is_no_frame_ends_that_connection_only(sidecar):
    with make(sidecar, share_sender=True) as monitor:
        record(monitor, 0)
        until(lambda: monitor.stats.sent == 1)
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\x03\xff\xff\xff\xff"):
            stranger = NodeAddress("j", sidecar.url).connect(0)
            stranger._raw.sendall(nonsense)
            with pytest.raises(ConnectionError):
                stranger.receive()
            stranger.close()
        stranger = NodeAddress("j", sidecar.url).connect(0)
        stranger.send(FrameKind.TELEMETRY, b"no message")
        until(lambda: any(b"invalid" in frame.content for frame in stranger.receive()))
        stranger.close()
        record(monitor, 1)
        until(lambda: monitor.stats.sent == 2)


def test_another_user_is_turned_away(monkeypatch):
    address = NodeAddress("j", "http://127.0.0.1:1")
    listener = address.listen(0)
    monkeypatch.setattr("resihp.hooks._node_socket.os.getuid", lambda: 12_345_678)
    with pytest.raises(PermissionError):
        address.connect(0)
    with pytest.raises(PermissionError):
        listener.accept()
    listener.close()


@pytest.mark.parametrize("uses_files", [False, True])
def test_an_address_is_free_again_once_its_process_has_ended(tmp_path, uses_files):
    address = NodeAddress("j", "http://127.0.0.1:1", tmp_path / "s" if uses_files else None)
    for _ in range(2):  # the file of the first time is still there in the second
        assert address.connect(0) is None
        listener = address.listen(0)
        assert listener is not None
        assert address.listen(0) is None
        other = address.listen(1)
        assert other is not None
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(address._at(0))
            accepted = listener.accept()
            accepted.send(FrameKind.WELCOME)
            client = FrameSocket(raw, 5.0)
            assert [frame.kind for frame in client.receive()] == [FrameKind.WELCOME]
        accepted.close()
        listener.close()
        other.close()


def test_the_pace_follows_what_the_sidecar_asks_for():
    pace = MessagePace(0.5, seed=0)
    pace.accepted({"accepted": 1, "interval_s": 4})
    assert pace.interval_s == 4.0
    intervals = []
    for _ in range(5):
        pace.accepted({"accepted": 1})
        intervals.append(pace.interval_s)
    assert intervals == [2.0, 1.0, 0.5, 0.5, 0.5]
    for wrong in ("soon", -1.0, float("nan"), None, True):
        pace.accepted({"interval_s": wrong})
        assert 0.5 <= pace.interval_s <= 1.0
    for long in (1e9, 10**400):
        pace.accepted({"interval_s": long})
        assert pace.interval_s == 30.0


def test_repetitions_wait_longer_each_time_and_at_least_as_long_as_is_asked_for():
    pace = MessagePace(0.5, seed=0)
    delays = [pace.refused(ServiceError("away")) for _ in range(9)]
    assert all(0.5 * most <= delay <= most for delay, most in zip(delays, LONGEST, strict=True))
    assert pace.interval_s == 0.5
    assert 7 <= pace.refused(ServiceError("full", status=429, retry_after_s=7)) <= 9
    assert pace.interval_s == 7
    assert pace.refused(ServiceError("full", status=429, retry_after_s=1e9)) <= 40
    pace.accepted({})
    assert pace.refused(ServiceError("away")) <= 0.1


LONGEST = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_the_client_says_when_to_repeat(sidecar):
    sidecar.headers = {"Retry-After": "7"}
    sidecar.refusal = lambda batch: 503
    with pytest.raises(ServiceError) as raised:
        Client(sidecar.url).send_telemetry("j", encode(TelemetryBatch.empty()), WireFormat.MSGPACK)
    assert (raised.value.status, raised.value.retry_after_s) == (503, 7.0)
