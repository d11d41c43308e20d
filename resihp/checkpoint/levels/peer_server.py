"""Keeps checkpoints of other ranks in this process's memory and hands out what it holds."""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections import defaultdict
from threading import Lock, Thread

from resihp.contracts import CheckpointError

from ..format.index import CHUNK_BYTES, Index, read_index
from ..staging.host_buffer import HostBuffer
from .memory import Image, ImageStore
from .wire import Address, Line

_LONGEST_GREETING = 1 << 12
"""Bytes that are taken from whoever has not shown the token."""


class PeerServer:
    """One thread accepts, one more serves each connection.

    Requests are `put` (an image follows, chunk by chunk), `list` (all indexes) and `get` (a range
    of an image). Buffers for images are reused; for a sender there is one more than are kept.
    """

    def __init__(
        self, store: ImageStore, own: ImageStore, listen: Address, token: str, idle_s: float
    ) -> None:
        self._store, self._own, self.token, self._idle_s = store, own, token, idle_s
        self._free: dict[int, list[HostBuffer]] = defaultdict(list)
        self._lines: set[Line] = set()
        self._lock = Lock()
        self._socket = socket.create_server(listen)
        self.address: Address = self._socket.getsockname()[:2]
        Thread(target=self._accept, name="resihp-checkpoint-peers", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for line in self._lines:
                line.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            line = Line(connection, self._idle_s)
            with self._lock:
                self._lines.add(line)
            Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: Line) -> None:
        """Until the other side hangs up, falls silent or breaks the protocol."""
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, CheckpointError):
            told = str(line.receive(_LONGEST_GREETING).get("token"))
            if not hmac.compare_digest(told.encode(), self.token.encode()):
                line.send(problem="this rank knows another token")
            else:
                line.send(welcome=True)
                while True:
                    self._answer(line)
        with self._lock:
            self._lines.discard(line)
        line.close()

    def _answer(self, line: Line) -> None:
        request = line.receive()
        match request["do"]:
            case "put":
                self._take(line, int(request["tensor_bytes"]))
            case "list":
                indexes = self._store.indexes() + self._own.indexes()
                line.send(indexes=[index.to_json() for index in indexes])
            case "get":
                self._give(line, request)

    def _take(self, line: Line, nbytes: int) -> None:
        buffer = self._buffer(nbytes)
        try:
            view = buffer.view
            for start in range(0, nbytes, CHUNK_BYTES):
                line.receive_into(view[start : start + CHUNK_BYTES])
            index = read_index(line.receive()["index"], "from a peer")
            section = bytearray(index.file_bytes - index.tensor_bytes)
            line.receive_into(memoryview(section))
            _verify(index, view, memoryview(section))
        except BaseException:
            self._give_back(buffer)
            raise
        image = Image(index, view, bytes(section), lambda: self._give_back(buffer))
        self._store.add(image)
        line.send(done=True)

    def _give(self, line: Line, request: dict[str, int]) -> None:
        rank, step = request["rank"], request["step"]
        part = bytearray(request["count"])
        try:
            held = (step, rank) in {(i.step, i.rank) for i in self._own.indexes()}
            (self._own if held else self._store).get(rank, step).read(
                request["start"], memoryview(part)
            )
        except CheckpointError as problem:
            line.send(problem=str(problem))
            return
        line.send(count=len(part))
        line.send_bytes(memoryview(part))

    def _buffer(self, nbytes: int) -> HostBuffer:
        with self._lock:
            free = self._free[nbytes]
            self._free = defaultdict(list, {nbytes: free})  # other sizes: of a former layout
            if free:
                return free.pop()
        return HostBuffer(nbytes)

    def _give_back(self, buffer: HostBuffer) -> None:
        with self._lock:
            self._free[len(buffer.view)].append(buffer)


def _verify(index: Index, tensors: memoryview, section: memoryview) -> None:
    """Raises `ValueError` where an image is not what its sender had."""
    split = index.tensor_bytes
    for number, (start, stop) in enumerate(index.chunks):
        part = tensors[start:stop] if start < split else section[start - split : stop - split]
        if not index.is_intact(number, part):
            raise ValueError("an image arrived damaged")
