"""A lost process's state is still in the memory of another one."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from resihp.checkpoint import Checkpointer, HostMemory, IndependentRank, PeerMemory
from resihp.checkpoint.format.checksum import CRC32, checksum
from resihp.checkpoint.format.index import FileIndex
from resihp.checkpoint.history import Lineage
from resihp.checkpoint.levels import peer_server
from resihp.checkpoint.levels.host_memory import ImageStore
from resihp.checkpoint.levels.peer_memory import PeerReader
from resihp.checkpoint.levels.peer_server import Connection, PeerServer
from resihp.checkpoint.restore import restore
from resihp.checkpoint.staging.host_buffer import HostBuffer
from resihp.contracts import CheckpointError, ContractError
from resihp.testing.local_ranks import LocalRanks
from tests.checkpoint.helpers import assert_stamped, back_from, stamp, stamped

STEPS = 3
SOON = timedelta(seconds=20)


def trains(rank: int, host: str, port: int) -> None:
    """Both ranks train and checkpoint into memory; then rank 1 is killed, rank 0 waits."""
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    own = HostMemory()
    peers = PeerMemory(own, token="secret", timeout=SOON)
    store.set(f"address/{rank}", pickle.dumps(peers.address))
    addresses = {r: pickle.loads(store.get(f"address/{r}")) for r in (0, 1)}
    peers.connect(rank, addresses)
    state = {f"rank{rank}.{key}": tensor for key, tensor in stamped(-1).items()}
    saver = Checkpointer([own, peers], ranks=IndependentRank(rank, (0, 1), run="one"))
    for step in range(STEPS):
        saver.fence()
        stamp(state, step)
        saver.save(step, state)
        assert saver.wait(300)
    assert saver.counters.levels[peers.name].saved == STEPS
    store.set(f"trained/{rank}", b"")
    store.wait(["trained/0", "trained/1"])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["restored"])
    saver.close()


def replaces(rank: int, host: str, port: int) -> None:
    """A new process in place of rank 1 asks the survivor."""
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    peers = PeerMemory(HostMemory(), token="secret", timeout=SOON)
    addresses = {0: pickle.loads(store.get("address/0")), 1: peers.address}
    peers.connect(1, addresses)
    into = {f"rank1.{key}": tensor for key, tensor in stamped(-1).items()}
    everything = {**into, **{f"rank0.{key}": tensor for key, tensor in stamped(-1).items()}}
    restored = restore([peers], everything, IndependentRank(1, (0, 1), run="two"))
    assert restored.step == STEPS - 1
    assert_stamped(everything, STEPS - 1)
    peers.close()
    store.set("restored", b"")


def test_a_killed_process_is_replaced_from_its_peers_memory(tmp_path: Path) -> None:
    with LocalRanks("peer", tmp_path) as ranks:
        ranks.start((0, 1), trains)
        deadline = time.monotonic() + 300
        while 1 not in ranks.exit_codes:
            assert time.monotonic() < deadline, ranks.logs()
            ranks.poll(1.0)
        assert ranks.exit_codes[1] == -signal.SIGKILL, ranks.logs()
        ranks.start((2,), replaces)
        codes = ranks.wait(300)
        assert (codes[0], codes[2]) == (0, 0), ranks.logs()


def test_only_who_knows_the_token_is_let_in() -> None:
    own = HostMemory()
    peers, stranger = (PeerMemory(own, token=token, timeout=SOON) for token in ("ours", "theirs"))
    try:
        with Checkpointer([own]) as saver:
            saver.save(0, stamped(0))
            saver.wait()
            peers.connect(0, {0: peers.address})
            stranger.connect(0, {0: peers.address})
            assert_stamped(back_from(peers)[1], 0)
            assert stranger.steps() == []
            with pytest.raises(CheckpointError):
                stranger.open(0)
    finally:
        peers.close()
        stranger.close()


def test_a_peer_with_another_token_is_said(caplog: pytest.LogCaptureFixture) -> None:
    own = HostMemory()
    peers, other = (PeerMemory(own, token=token, timeout=SOON) for token in ("ours", "thäirs"))
    peers.connect(0, {0: peers.address, 1: other.address})
    with Checkpointer([own, peers], ranks=IndependentRank(0, (0, 1), run="one")) as saver:
        saver.save(0, {"w": torch.zeros(3)})
        assert saver.wait(300)
        assert saver.counters.levels[peers.name].failed == 1
    other.close()
    assert "wrong token" in caplog.text


@pytest.mark.parametrize(
    "sent", [b"", b"\xff" * 100, b"\x02\0\0\0[]", b"\x02\0\0\0{}", b"\x04\0\0\0null"]
)
def test_a_stranger_who_says_anything_is_shut_out(sent: bytes) -> None:
    own = HostMemory()
    peers = PeerMemory(own, token="t", timeout=SOON)
    try:
        peers.connect(0, {0: peers.address})
        with socket.create_connection(peers.address) as stranger:
            stranger.sendall(sent)
            with contextlib.suppress(OSError):  # the server may have hung up already
                stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(60)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(100):
                    pass
        assert peers.steps() == []
    finally:
        peers.close()


def test_this_rank_is_among_those_it_is_told_of() -> None:
    peers = PeerMemory(HostMemory(), token="t")
    with pytest.raises(ContractError, match="rank 5, this one, is not among"):
        peers.connect(5, {0: peers.address})
    peers.close()


def test_an_address_that_names_no_node_is_refused() -> None:
    """On two nodes the same address reaches each rank's own server."""
    peers, third = PeerMemory(HostMemory()), ("10.0.0.3", 29600)
    with pytest.raises(ContractError, match="ranks 0 and 2 both have"):
        peers.connect(0, {0: peers.address, 1: third, 2: peers.address})
    peers.connect(0, {0: peers.address, 1: third})
    peers.close()


def test_a_peer_that_is_gone_costs_its_level_alone() -> None:
    own = HostMemory()
    peers, other = PeerMemory(own, token="t", timeout=SOON), PeerMemory(own, token="t")
    peers.connect(0, {0: peers.address, 1: other.address})
    other.close()
    state = {"w": torch.zeros(3)}
    with Checkpointer([own, peers], ranks=IndependentRank(0, (0, 1), run="one")) as saver:
        for step in range(3):
            saver.fence()
            saver.save(step, state)
            assert saver.wait(300)
        assert saver.counters.levels[peers.name].failed == 3
        assert saver.counters.levels[own.name].saved == 3


@contextlib.contextmanager
def connected_pair(host: str) -> Iterator[tuple[HostMemory, PeerMemory, PeerMemory]]:
    """Memory of rank 0, and the levels of ranks 0 and 1 that know each other."""
    own, other = HostMemory(), HostMemory()
    peers, theirs = (
        PeerMemory(each, listen=(host, 0), token="ours", timeout=SOON) for each in (own, other)
    )
    try:
        for rank, level in enumerate((peers, theirs)):
            level.connect(rank, {0: peers.address, 1: theirs.address})
        yield own, peers, theirs
    finally:
        peers.close()
        theirs.close()


@pytest.mark.parametrize("host", ["::1", "localhost", ""])
def test_copies_travel_over_every_kind_of_address(host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("no IPv6 here")
    with connected_pair(host) as (own, peers, _):
        with Checkpointer([own, peers], ranks=IndependentRank(0, (0,), run="one")) as saver:
            saver.save(0, stamped(0))
            assert saver.wait(300)
        own.store.clear()
        assert_stamped(back_from(peers)[1], 0)


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


def test_a_damaged_copy_gives_way_to_another(caplog: pytest.LogCaptureFixture) -> None:
    ranks = IndependentRank(0, (0,), run="one")
    with (
        connected_pair("127.0.0.1") as (own, peers, theirs),
        Checkpointer([own, peers], ranks=ranks) as saver,
    ):
        saver.save(0, stamped(0))
        assert saver.wait(300)
        assert saver.counters.levels[peers.name].saved == 1
        image = own.store.get(0, 0)
        image.tensors[0][image.index.tensors[1].data] ^= 1
        restored, into = back_from(theirs)
        assert_stamped(into, 0)
        assert not restored.skipped


@pytest.fixture
def server() -> Iterator[PeerServer]:
    opened = PeerServer(ImageStore(1), ImageStore(1), ("127.0.0.1", 0), "t", 60.0)
    yield opened
    opened.close()


def is_served(server: PeerServer) -> bool:
    """True once a client is let in; False if none is within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            Connection.to(server.address, "t", 60).close()
            return True
        time.sleep(0.05)
    return False


def test_a_server_without_free_files_serves_again_later(
    server: PeerServer, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    client, held = socket.socket(), []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, limits[1]))
        held = fill_up()
        client.connect(server.address)
        deadline = time.monotonic() + 60
        while "Too many open files" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)  # more attempts fail
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        client.close()
    assert is_served(server)
    deadline = time.monotonic() + 60
    while len(caplog.records) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)  # a client is served before the server says so
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "once for the outage, and once for its end"
    assert "works again" in said[1]


def fill_up() -> list[int]:
    """Open files until the limit is reached."""
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    return held


def test_a_client_for_whom_no_thread_can_start_is_disconnected(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with socket.create_connection(server.address, 60) as client:
        assert client.recv(1) == b"", "disconnected"
    monkeypatch.setattr(threading.Thread, "start", start)
    assert is_served(server)


@pytest.mark.parametrize(
    "sent",
    [
        b"[" * 100_000,
        b"{}",
        b'{"do": "put", "tensor_bytes": Infinity}',
        b'{"do": "put", "tensor_bytes": %d}' % 2**62,
        b'{"do": "put", "tensor_bytes": %d}' % 2**70,
        b'{"do": "get", "rank": 0, "step": 0, "start": 0, "count": %d}' % 2**33,
        b'{"do": "get", "rank": 0, "step": 0, "start": 0, "count": %d}' % 2**70,
        b'{"do": "get", "rank": [1], "step": 0, "start": 0, "count": 4}',
    ],
)
def test_whatever_a_client_asks_its_connection_is_closed(server: PeerServer, sent: bytes) -> None:
    with socket.create_connection(server.address, 60) as client:
        for message in (b'{"token": "t"}', sent):
            client.sendall(len(message).to_bytes(4, "little") + message)
        received = b"".join(iter(lambda: client.recv(100), b""))
        assert received.endswith(b"}"), "let in"
        assert b"problem" not in received
    assert is_served(server)


def test_a_stranger_who_sends_deep_brackets_is_shut_out(server: PeerServer) -> None:
    with socket.create_connection(server.address, 60) as client:
        client.sendall((4096).to_bytes(4, "little") + b"[" * 4096)
        assert client.recv(1) == b""
    assert is_served(server)


def test_a_server_allows_itself_more_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= 1024:
        pytest.skip("the system allows no more")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        PeerServer(ImageStore(1), ImageStore(1), ("127.0.0.1", 0), "t", 60.0).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1024
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_closed_server_ends_its_thread() -> None:
    before = set(threading.enumerate())
    server = PeerServer(ImageStore(1), ImageStore(1), ("127.0.0.1", 0), "t", 60.0)
    (accepting,) = set(threading.enumerate()) - before
    server.close()
    accepting.join(60)
    assert not accepting.is_alive()


def send_image(connection: Connection, rank: int, step: int, nbytes: int) -> None:
    content = bytes([step]) * nbytes
    sums = (checksum([memoryview(content)]),)
    index = FileIndex(
        step, rank, Lineage("run", 1, 0), (0, 1), (), nbytes, file_bytes=nbytes, checksums=sums
    )
    connection.send(do="put", tensor_bytes=nbytes)
    connection.send_bytes(memoryview(content))
    connection.send(index=index.to_json())
    connection.receive()


@pytest.mark.parametrize("keep", [1, 2])
def test_buffers_are_reused_by_senders_of_unequal_images(
    keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Recorded(HostBuffer):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            made.append(nbytes)

    monkeypatch.setattr(peer_server, "HostBuffer", Recorded)
    store = ImageStore(keep)
    server = PeerServer(store, ImageStore(1), ("127.0.0.1", 0), "t", 60.0)
    try:
        with contextlib.closing(Connection.to(server.address, "t", 60)) as connection:
            for step in range(8):
                for rank, nbytes in enumerate((1000, 2000)):
                    send_image(connection, rank, step, nbytes)
            assert sorted(made) == [1000] * (keep + 1) + [2000] * (keep + 1)
            made.clear()
            for step in range(8, 12):
                for rank in (0, 1):
                    send_image(connection, rank, step, 1500)
            assert made == [1500] * (2 * keep + 1)
            assert {size for size, free in server._free.items() if free} == {1500}
    finally:
        server.close()


@contextlib.contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, int]]:
    """Address of a server that answers each header of one client with the next of these."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError), listening.accept()[0] as client:
                for answer in answers:
                    client.recv(4096)
                    client.sendall(len(answer).to_bytes(4, "little") + answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()
        thread.join(60)


def with_crc(rest: object) -> str:
    text = f'{{"tensors": [], "rest": {json.dumps(rest)}, "crc": '
    return f"{text}{zlib.crc32(text.encode())}}}"


REST = {
    "step": 1, "rank": 7, "lineage": {"run": "r", "born": 1, "first": 0}, "ranks": [7],
    "tensor_bytes": 0, "things": [], "file_bytes": 0, "checksums": [], "beside": [], "sums": CRC32,
}  # fmt: skip


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff\xfe\0x",
        b"[" * 100_000,
        b'{"indexes": 3}',
        b'{"indexes": [3, null, {}]}',
        json.dumps({"indexes": [with_crc([1])]}).encode(),
        json.dumps({"indexes": [with_crc({**REST, "step": "1"})]}).encode(),
        json.dumps({"indexes": [with_crc({**REST, "ranks": [[7]]})]}).encode(),
        json.dumps({"indexes": [with_crc({**REST, "file_bytes": 1 << 60})]}).encode(),
        json.dumps(
            {"indexes": [with_crc({**REST, "lineage": {"run": "r", "born": "x", "first": 0}})]}
        ).encode(),
    ],
)
def test_what_one_server_says_wrongly_hides_no_image_of_others(answer: bytes) -> None:
    with (
        connected_pair("127.0.0.1") as (own, peers, theirs),
        answering(b'{"accepted": true}', answer) as address,
    ):
        with Checkpointer([own, peers]) as saver:
            saver.save(1, stamped(1))
            assert saver.wait(300)
        peers.connect(0, {0: peers.address, 1: theirs.address, 2: address})
        assert peers.steps() == [1]


def test_a_copy_that_is_sent_wrongly_gives_way_to_another() -> None:
    with (
        connected_pair("127.0.0.1") as (own, peers, theirs),
        answering(b'{"accepted": true}', b"\xff\xfe\0x") as address,
    ):
        with Checkpointer([own, peers]) as saver:
            saver.save(1, stamped(1))
            assert saver.wait(300)
        (index,) = own.store.indexes()
        holders = {0: [(index, address), (index, theirs.address)]}
        reader = PeerReader(holders, lambda at: Connection.to(at, peers.token, 60))
        part = memoryview(bytearray(index.chunks[0][1]))
        reader.read(0, 0, part)
        reader.close()
        assert index.is_intact(0, part)
