"""Messages between a rank and the memory of its peers: a JSON header, then bytes."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from resihp.contracts import CheckpointError

Address = tuple[str, int]

_HEADER = struct.Struct("<I")
_LONGEST_HEADER = 1 << 28


class Line:
    """A connection; every wait on it is bounded by `timeout_s`. Raises `OSError`."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    @classmethod
    def to(cls, address: Address, token: str, timeout_s: float) -> Line:
        """Connect and say who we are. Raises `CheckpointError` where that is not accepted."""
        line = cls(socket.create_connection(address, timeout_s), timeout_s)
        try:
            line.send(token=token)
            line.receive()
        except BaseException:
            line.close()
            raise
        return line

    def send(self, **header: Any) -> None:
        """One header."""
        text = json.dumps(header).encode()
        self._socket.sendall(_HEADER.pack(len(text)) + text)

    def send_bytes(self, view: memoryview) -> None:
        """Bytes of a length that the other side knows."""
        self._socket.sendall(view)

    def receive(self, longest: int = _LONGEST_HEADER) -> dict[str, Any]:
        """One header, of so many bytes at most.

        Raises `CheckpointError` where the other side reports a problem.
        """
        prefix = bytearray(_HEADER.size)
        self.receive_into(memoryview(prefix))
        (length,) = _HEADER.unpack(prefix)
        if length > longest:
            raise OSError("what arrived is no header")
        text = bytearray(length)
        self.receive_into(memoryview(text))
        header: dict[str, Any] = json.loads(text)
        if not isinstance(header, dict):
            raise OSError("what arrived is no header")
        if "problem" in header:
            raise CheckpointError(header["problem"])
        return header

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`."""
        done = 0
        while done < len(view):
            moved = self._socket.recv_into(view[done:])
            if not moved:
                raise ConnectionError("the other side has closed the connection")
            done += moved

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
