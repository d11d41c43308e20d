"""HTTP connections that are closed if the head of a request does not arrive."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S = 10.0
"""Longest time from the start of a connection, or of a request, to its whole head."""


class TimedConnection(AutoHTTPProtocol):  # type: ignore[valid-type,misc]
    """uvicorn's connection with a time limit on heads, which uvicorn does not have.

    The application limits the time of bodies; uvicorn that of idle connections.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start to wait for the first head."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Wait for a head that has begun, and no longer for one that is whole."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        """Stop waiting."""
        self._stop()
        super().connection_lost(error)

    def _watch(self) -> None:
        if self._is_answering():
            self._stop()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HEAD_S, self._cut)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # of the newest request with a whole head
        return cycle is not None and not cycle.response_complete

    def _cut(self) -> None:
        self._timer = None
        if not self._is_answering() and not self.transport.is_closing():
            self.app_state["metrics"].count_cut("head")
            self.transport.close()
