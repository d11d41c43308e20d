"""HTTP connections that are closed if the head of a request does not arrive or has no end."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 10.0
"""Longest time from the start of a connection, or of a request, to its whole head."""
HEAD_BYTES = 64 * 1024
"""Most bytes of a head, or of the trailers of a body, and what one read adds to them."""
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class TimedConnection(HttpToolsProtocol):
    """uvicorn's connection with limits of the time and size of heads, which uvicorn does not have.

    The application limits the time of bodies; uvicorn that of idle connections.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for the first head."""
        super().connection_made(transport)
        self._head_bytes = 0  # since the last head that was whole, or the last byte of a body
        self._timer: asyncio.TimerHandle | None = None
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Wait for a head that has begun, and no longer for one that is whole."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            if not self._is_answering():  # else these are trailers
                self.transport.write(_HEAD_TOO_LARGE)
            self._cut()
        self._watch()

    def on_headers_complete(self) -> None:
        """Begin to count anew."""
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Begin to count anew."""
        self._head_bytes = 0
        super().on_body(body)

    def connection_lost(self, error: Exception | None) -> None:
        """Stop waiting."""
        self._stop()
        super().connection_lost(error)

    def _watch(self) -> None:
        if self._is_answering():
            self._stop()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HEAD_S, self._end_waiting)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # of the newest request with a whole head
        return cycle is not None and not cycle.response_complete

    def _end_waiting(self) -> None:
        self._timer = None
        if not self._is_answering() and not self.transport.is_closing():
            self._cut()

    def _cut(self) -> None:
        self.app_state["metrics"].count_cut("head")
        self.transport.close()
