"""Peer memory protocol: framed messages over TCP, and the server that stores and serves images.

A message is a JSON header with a length prefix of 4 bytes, followed by raw bytes where the header
announces them. Requests: `put` (an image follows, chunk by chunk), `list` (all indexes) and `get`
(a byte range of an image).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
from collections import Counter, defaultdict
from threading import Event, Lock, Thread
from typing import Any

from resihp._process_limits import allow_open_files
from resihp.contracts import CheckpointError

from ..counters import ProblemLog
from ..format.index import CHUNK_BYTES, FileIndex, read_index
from ..staging.host_buffer import HostBuffer
from .host_memory import ImageStore, MemoryImage

Address = tuple[str, int]

_HEADER = struct.Struct("<I")
_LONGEST_HEADER = 1 << 28
_LONGEST_GREETING = 1 << 12
"""Bytes accepted from a client that has not authenticated yet."""
_OPEN_FILES = 16384
"""Limit of open files, each connection being one: many ranks may read at the same time."""
_PLACE = "server of peers' memory"
_PAUSE_S = 0.1
"""Pause after a connection that could not be accepted, for want of files, threads or memory."""


class Connection:
    """A TCP connection; every wait is bounded by `timeout_s`. All methods raise `OSError`."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    @classmethod
    def to(cls, address: Address, token: str, timeout_s: float) -> Connection:
        """Connect and authenticate. Raises `CheckpointError` if the server refuses the token."""
        connection = cls(socket.create_connection(address, timeout_s), timeout_s)
        try:
            connection.send(token=token)
            connection.receive()
        except BaseException:
            connection.close()
            raise
        return connection

    def send(self, **header: Any) -> None:
        """Send one header."""
        text = json.dumps(header).encode()
        self._socket.sendall(_HEADER.pack(len(text)) + text)

    def send_bytes(self, view: memoryview) -> None:
        """Send raw bytes; the receiver knows their number."""
        self._socket.sendall(view)

    def receive(self, longest: int = _LONGEST_HEADER) -> dict[str, Any]:
        """Receive one header of at most `longest` bytes.

        Raises `CheckpointError` if the header reports a problem of the other side.
        """
        prefix = bytearray(_HEADER.size)
        self.receive_into(memoryview(prefix))
        (length,) = _HEADER.unpack(prefix)
        if length > longest:
            raise OSError("received bytes are not a header")
        text = bytearray(length)
        self.receive_into(memoryview(text))
        header: dict[str, Any] | None = None
        with contextlib.suppress(ValueError, RecursionError):
            header = json.loads(text)
        if not isinstance(header, dict):
            raise OSError("received bytes are not a header")
        if "problem" in header:
            raise CheckpointError(header["problem"])
        return header

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`."""
        done = 0
        while done < len(view):
            moved = self._socket.recv_into(view[done:])
            if not moved:
                raise ConnectionError("connection closed by the other side")
            done += moved

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class PeerServer:
    """Stores images of other ranks in this process's memory and serves them.

    One thread accepts connections, one more serves each connection. A client that comes while the
    process is out of files or threads waits or is disconnected; the server goes on. Image buffers
    are reused by images of the same size; for each sender there is one more than its stored images.

    store   images of other ranks
    own     images of this rank, served as well
    listen  address to listen on
    token   secret that clients must send first
    idle_s  longest silence of a client, in seconds
    """

    def __init__(
        self, store: ImageStore, own: ImageStore, listen: Address, token: str, idle_s: float
    ) -> None:
        self._store, self._own, self.token, self._idle_s = store, own, token, idle_s
        self._free: dict[int, list[HostBuffer]] = defaultdict(list)
        self._used = Counter[int]()
        self._connections: set[Connection] = set()
        self._lock, self._is_closed, self._problems = Lock(), Event(), ProblemLog()
        allow_open_files(_OPEN_FILES)
        self._socket = _listen(listen)
        self.address: Address = self._socket.getsockname()[:2]
        Thread(target=self._accept, name="resihp-checkpoint-peers", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for connection in self._connections:
                connection.close()

    def _accept(self) -> None:
        """Accept connections until the server is closed, whatever fails meanwhile."""
        while not self._is_closed.is_set():
            try:
                self._start_serving(self._socket.accept()[0])
            except (OSError, RuntimeError, MemoryError) as problem:
                if not self._is_closed.is_set():
                    self._problems.report(_PLACE, problem)
                self._is_closed.wait(_PAUSE_S)
            else:
                self._problems.resolve(_PLACE)

    def _start_serving(self, accepted: socket.socket) -> None:
        """Serve a client in a thread; disconnect it if that cannot be started."""
        with contextlib.ExitStack() as undo:
            undo.callback(accepted.close)
            connection = Connection(accepted, self._idle_s)
            with self._lock:
                self._connections.add(connection)
            undo.callback(self._end, connection)
            Thread(target=self._serve, args=(connection,), daemon=True).start()
            undo.pop_all()

    def _end(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _serve(self, connection: Connection) -> None:
        """Answer requests until the client disconnects, times out or breaks the protocol."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._end, connection)
            stack.enter_context(contextlib.suppress(Exception))  # a client may send anything
            token = str(connection.receive(_LONGEST_GREETING).get("token"))
            if not hmac.compare_digest(token.encode(), self.token.encode()):
                connection.send(problem="wrong token")
            else:
                connection.send(accepted=True)
                while True:
                    self._answer(connection)

    def _answer(self, connection: Connection) -> None:
        request = connection.receive()
        match request["do"]:
            case "put":
                self._receive_image(connection, int(request["tensor_bytes"]))
            case "list":
                indexes = self._store.indexes() + self._own.indexes()
                connection.send(indexes=[index.to_json() for index in indexes])
            case "get":
                self._send_range(connection, request)

    def _receive_image(self, connection: Connection, nbytes: int) -> None:
        buffer = self._take_buffer(nbytes)
        try:
            view = buffer.view
            for start in range(0, nbytes, CHUNK_BYTES):
                connection.receive_into(view[start : start + CHUNK_BYTES])
            index = read_index(connection.receive()["index"], "from a peer")
            section = bytearray(index.file_bytes - index.tensor_bytes)
            connection.receive_into(memoryview(section))
            _verify(index, view, memoryview(section))
        except BaseException:
            self._return_buffer(buffer)
            raise
        image = MemoryImage(index, [view], bytes(section), lambda: self._return_buffer(buffer))
        self._store.add(image)
        connection.send(done=True)

    def _send_range(self, connection: Connection, request: dict[str, int]) -> None:
        rank, step, count = request["rank"], request["step"], request["count"]
        if count > CHUNK_BYTES:
            raise ValueError(f"{count} bytes are more than a chunk")
        part = bytearray(count)
        try:
            is_own = (step, rank) in {(i.step, i.rank) for i in self._own.indexes()}
            image = (self._own if is_own else self._store).get(rank, step)
            image.read(request["start"], memoryview(part))
        except CheckpointError as problem:
            connection.send(problem=str(problem))
            return
        connection.send(count=len(part))
        connection.send_bytes(memoryview(part))

    def _take_buffer(self, nbytes: int) -> HostBuffer:
        with self._lock:
            free = self._free[nbytes]
            buffer = free.pop() if free else None
        buffer = buffer or HostBuffer(nbytes)
        with self._lock:
            self._used[nbytes] += 1
        return buffer

    def _return_buffer(self, buffer: HostBuffer) -> None:
        """Keep a buffer for the next image of its size, if a sender of such images needs one more.

        What is kept of the sizes of former layouts goes as their images do.
        """
        nbytes = len(buffer.view)
        with self._lock:
            self._used[nbytes] -= 1
            free = self._free[nbytes]
            free.append(buffer)
            senders = -(-self._used[nbytes] // self._store.keep)
            del free[senders:]


def _listen(address: Address) -> socket.socket:
    """Listen on an IPv4 or IPv6 address; of a name with both, on IPv4. Raises `OSError`."""
    host, port = address
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, resolved = min(found, key=lambda one: one[0] != socket.AF_INET)
    return socket.create_server(resolved, family=family)


def _verify(index: FileIndex, tensors: memoryview, section: memoryview) -> None:
    """Check a received image against its checksums. Raises `ValueError` on a difference."""
    split = index.tensor_bytes
    for number, (start, stop) in enumerate(index.chunks):
        part = tensors[start:stop] if start < split else section[start - split : stop - split]
        if not index.is_intact(number, part):
            raise ValueError("received image is damaged")
