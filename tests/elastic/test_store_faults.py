"""A store that is silent, or that is reached on new connections only, does not stop training."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist

from resihp.contracts import JobStoppedError
from resihp.elastic.ddp.membership import ReplicaJoiner, ReplicaMembership
from resihp.elastic.ddp.step import ReplicaCoordinates
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.environment import Environment
from resihp.elastic.rendezvous.heartbeats import prepare
from resihp.elastic.rendezvous.joiners import Joiners
from resihp.elastic.rendezvous.liveness import HOST_LOOKS, Beat, HostWatcher, LivenessSummary
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import (
    StorePool,
    Timeouts,
    announce_death,
    await_store,
    connect,
    connect_store,
    host_store,
)

TIMEOUTS = Timeouts(heartbeat=timedelta(seconds=1), poll=timedelta(seconds=0.05))
UNTIL_S = 60.0


class Server:
    """A store in memory.

    answers      no request is answered before it is set
    late         requests that were made before: they fail
    connections  of each rank
    is_gone      no new ones can be opened
    """

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.answers = threading.Event()
        self.answers.set()
        self.late: list[str] = []
        self.connections: dict[int, list[Connection]] = {0: [], 1: []}
        self.is_gone = False

    def connect(self, rank: int) -> dist.Store:
        if self.is_gone:
            raise dist.DistNetworkError("connection refused")
        self.connections[rank].append(Connection(self))
        return cast(dist.Store, self.connections[rank][-1])

    def reset(self, rank: int) -> None:
        """Break the connections of a rank; it may open new ones."""
        for connection in self.connections[rank]:
            connection.is_broken = True


class Connection:
    """A connection to a `Server`; as those of torch, it tells late that a time-out has passed."""

    def __init__(self, server: Server) -> None:
        self._server, self.is_broken = server, False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._server.store, name)

        def request(*arguments: Any) -> Any:
            if self.is_broken:
                raise dist.DistNetworkError("failed to recv, got 0 bytes")
            if not self._server.answers.is_set():
                self._server.late.append(name)
                assert self._server.answers.wait(UNTIL_S)
                raise dist.DistStoreError("wait timeout after 3000ms")
            return method(*arguments)

        return request


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.answers.set()


@pytest.fixture
def start(server: Server) -> Iterator[Callable[..., Rendezvous]]:
    """Start the rendezvous of a rank of two."""
    started: list[Rendezvous] = []

    def start(rank: int = 0, timeouts: Timeouts = TIMEOUTS) -> Rendezvous:
        rendezvous = Rendezvous(lambda: server.connect(rank), rank, (0, 1), timeouts)
        rendezvous.start()
        started.append(rendezvous)
        return rendezvous

    yield start
    server.answers.set()
    for rendezvous in started:
        rendezvous.close()


def wait_until(condition: Callable[[], object]) -> None:
    """Ask again and again, as those that wait do."""
    done = threading.Event()
    for _ in range(int(UNTIL_S / 0.01)):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("it did not come to that")


def test_a_store_that_is_silent_holds_up_no_wait(
    server: Server, start: Callable[..., Rendezvous]
) -> None:
    """What is waited for may be there already, and has a time-out of its own."""
    rendezvous = start()
    server.answers.clear()
    asked: list[object] = []

    def ask() -> None:
        asked.append(rendezvous.broken((1,), 1.5))
        asked.append(rendezvous.lost((1,), 1.5))
        rendezvous.enter(1, (0, 1))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(UNTIL_S / 4)
    assert asked == [None, []]
    assert not thread.is_alive()


def test_a_loss_is_known_once_the_store_answers_again(
    server: Server, start: Callable[..., Rendezvous]
) -> None:
    rendezvous = start()
    server.answers.clear()
    announce_death(server.store, 1)
    assert rendezvous.broken((1,), 1.5) is None
    server.answers.set()
    wait_until(lambda: rendezvous.broken((1,), 1.5))
    assert server.store.check([keys.broken(0)])


def liveness(server: Server) -> LivenessSummary:
    """What the watcher of the job has written last."""
    return LivenessSummary.decode(server.store.get(keys.JOB_LIVENESS))


def wait_for_looks(server: Server) -> None:
    """Wait for longer than ranks that do not beat are waited for."""
    seen = liveness(server).count
    wait_until(lambda: liveness(server).count > seen + HOST_LOOKS)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_connections_break_is_not_lost(
    rank: int, server: Server, start: Callable[..., Rendezvous]
) -> None:
    """Of both ranks the first one watches their host and the job."""
    ranks = start(0), start(1)
    wait_until(lambda: liveness(server).present.keys() == {0, 1})
    server.reset(rank)
    wait_for_looks(server)
    assert not liveness(server).silent
    assert not ranks[rank].stores.is_cut_off
    server.reset(rank)
    ranks[rank].request_recovery("its own reason")
    wait_until(lambda: ranks[0].is_broken and ranks[1].is_broken)
    assert server.store.get(keys.broken(0)) == b"its own reason"


def test_a_store_that_was_late_is_asked_on(
    server: Server, start: Callable[..., Rendezvous]
) -> None:
    ranks = start(0), start(1)
    # Its watching thread opens the second connection of each rank when it comes to that.
    wait_until(
        lambda: liveness(server).writer and set(map(len, server.connections.values())) == {2}
    )
    server.answers.clear()
    wait_until(lambda: len(server.late) == 2)
    server.answers.set()
    wait_for_looks(server)
    assert not liveness(server).silent
    assert not any(one.stores.is_cut_off for one in ranks)
    assert set(map(len, server.connections.values())) == {2}


def test_without_a_store_the_end_of_a_process_of_the_host_is_known(
    server: Server, start: Callable[..., Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo may wait for good for a peer that has died. One whose heartbeats the store may block is
    not lost."""
    patient = replace(TIMEOUTS, connect=timedelta(hours=1), exchange=timedelta(hours=1))
    ranks = start(0, patient), start(1, patient)
    wait_until(lambda: liveness(server).present.keys() == {0, 1})
    server.is_gone = True
    for rank in (0, 1):
        server.reset(rank)
    wait_until(lambda: all(one.stores.is_cut_off for one in ranks))
    ranks[1].close()
    looks, look, ended = [0], HostWatcher.look, list[int]()

    def counted(watcher: HostWatcher, beats: dict[int, Beat]) -> LivenessSummary | None:
        looks[0] += 1
        dead = {rank: replace(beats[rank], has_ended=True) for rank in ended}
        return look(watcher, beats | dead)

    monkeypatch.setattr(HostWatcher, "look", counted)
    wait_until(lambda: looks[0] > 2 * HOST_LOOKS)
    assert ranks[0].broken((0, 1), 1.5) is None
    ended.append(1)
    wait_until(lambda: ranks[0].lost((0, 1), 1.5) == [1])
    with pytest.raises(JobStoppedError, match=r"ranks \[1\] do not answer.*the store is gone"):
        ranks[0].broken((0, 1), 1.5)


def test_a_replica_joins_after_a_fault_of_the_store(
    server: Server, start: Callable[..., Rendezvous]
) -> None:
    """Neither a request that fails nor a connection that breaks is the end of joining."""
    rendezvous, coordinates = start(0), ReplicaCoordinates(0, 2)
    joiner, plan = ReplicaJoiner(rendezvous, coordinates), ReplicaMembership(coordinates, 2).plan
    number = Joiners(server.store).announce(1)
    found: list[tuple[int, ...]] = []

    def reset() -> None:
        """Break its connections, once the watching thread is over what was before."""
        seen = liveness(server).count
        wait_until(lambda: liveness(server).count > seen + 1)
        server.reset(0)

    server.answers.clear()
    asking = threading.Thread(target=lambda: found.append(joiner.waiting([0])), daemon=True)
    asking.start()
    wait_until(lambda: len(server.late) == 2)  # one is of the watching thread
    server.answers.set()
    asking.join(UNTIL_S)
    reset()
    found.append(joiner.waiting([0]))
    assert found == [(1,), (1,)]
    reset()
    joiner.invite([1], plan)
    assert server.store.check([keys.invitation(1, number)])


def test_an_unused_connection_that_has_broken_is_not_lent(server: Server) -> None:
    stores = StorePool(lambda: server.connect(0))
    prepare(stores.store)
    stores.give_back(stores.borrow())
    server.reset(0)
    assert stores.borrow().add("key", 1) == 1


def test_a_store_that_refuses_connections_is_gone_at_once() -> None:
    """Nobody waits for it until the time-out, which is far beyond that of this test."""
    server = host_store("127.0.0.1", 0, timedelta(seconds=30))
    port, opened = server.port, list[dist.Store]()
    timeouts = replace(TIMEOUTS, connect=timedelta(hours=1), exchange=timedelta(hours=1))

    def open_store() -> dist.Store:
        opened.append(connect("127.0.0.1", port, "job", timeouts))
        return opened[-1]

    stores = StorePool(open_store)
    prepare(stores.store)
    del server
    assert not stores.is_there()
    assert stores.is_cut_off
    assert len(opened) == 1
    assert stores.ask(lambda: stores.store.add("key", 1), 7) == 7


@pytest.fixture
def reserved() -> Iterator[socket.socket]:
    """A socket at a port of its own at which nobody listens yet."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield one


WAITING = "waiting for the store at"


def test_a_joiner_is_told_in_one_line_that_no_job_runs(
    reserved: socket.socket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    host, port = reserved.getsockname()
    given = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    monkeypatch.setattr("resihp.elastic.rendezvous.exit_status.install", lambda rank: None)
    timeouts = replace(TIMEOUTS, connect=timedelta(seconds=1))
    joiner = Environment.read({**given, "RESIHP_JOIN": "1"})
    with caplog.at_level(logging.INFO), pytest.raises(JobStoppedError, match="no store answers at"):
        joiner.rendezvous((), timeouts)
    assert [record.getMessage() for record in caplog.records] == [f"{WAITING} {host}:{port}"]
    assert capfd.readouterr().err == ""


def test_a_store_that_starts_late_is_waited_for(
    reserved: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = reserved.getsockname()
    limit = timedelta(seconds=UNTIL_S)
    with caplog.at_level(logging.INFO):
        waiting = threading.Thread(target=await_store, args=(host, port, limit), daemon=True)
        waiting.start()
        wait_until(lambda: WAITING in caplog.text)
        reserved.listen()
        store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=reserved.detach()
        )
        waiting.join(UNTIL_S)
    assert not waiting.is_alive()
    connect_store(host, port, limit).set("key", "value")
    assert store.get("key") == b"value"
    assert caplog.text.count(WAITING) == 1
