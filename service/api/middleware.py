"""ASGI middleware: authorization, limits of bodies in size and time, metrics and request log."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Iterator
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import BodyTooLargeError, SlowRequestError
from ..logs import logger
from ..settings import Settings, is_loopback
from .bodies import LARGE_BYTES
from .delay import WaitingRequests
from .metrics import HttpMetrics
from .problems import problem, send_problem

log = logger("resihp.http")

# Paths without data of a job; all others need the token if one is set.
OPEN = (
    "/", "/dashboard", "/docs", "/openapi.json", "/healthz", "/v1/healthz", "/livez", "/v1/livez",
)  # fmt: skip
_OPEN_FOLDERS = ("/assets/",)
_WRITING = frozenset({"POST", "PUT"})
LARGE_AT_A_TIME = 4
"""Bodies of the largest size for which there is room at a time, or more smaller ones; the last
place is for one that goes on where there is none for others."""
SILENT_S, WHOLE_S = 10.0, 60.0
"""Longest time without a byte of an incomplete body, and for all of it."""


class RequestMiddleware:
    """Checks the bearer token, and bounds the size of a body and its time while it is read.

    Large bodies have room for a few of the largest size while they are read and answered, which
    bounds their memory. Each takes as much of it as has arrived: slow ones hold up no other. Where
    there is none left, bodies are not read from.

    Without a token the `Host` header must be a local name, so that a foreign web page cannot reach
    the sidecar through a DNS name of its own (DNS rebinding).
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, metrics: HttpMetrics, waiting: WaitingRequests
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._waiting = waiting
        self._token = settings.token.get_secret_value().encode() if settings.token else None
        self._local_only = self._token is None and is_loopback(settings.host)
        self._limit = settings.max_body_bytes
        self._room = _Room((LARGE_AT_A_TIME - 1) * self._limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = time.monotonic()
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._checked(scope, receive, counted)
        finally:
            if status == HTTPStatus.SERVICE_UNAVAILABLE and scope["method"] in _WRITING:
                self._waiting.fail()
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.monotonic() - begun_s
            self._metrics.observe(scope["method"], route, status, seconds)
            log.debug(
                "request", method=scope["method"], path=scope["path"], status=status,
                ms=round(seconds * 1e3, 2),
            )  # fmt: skip

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if not self._may_pass(scope["path"], headers):
            challenge = {"WWW-Authenticate": "Bearer"}
            detail = "this sidecar requires 'Authorization: Bearer TOKEN'"
            await send_problem(send, problem(401, "unauthorized", detail, challenge))
        elif self._local_only and not _names_this_machine(headers.get("host", "")):
            detail = "without a token only local names (127.0.0.1, localhost) are served"
            await send_problem(send, problem(421, "misdirected-request", detail))
        elif int(headers.get("content-length") or 0) > self._limit:
            error = BodyTooLargeError(self._limit)
            await send_problem(send, problem(413, "body-too-large", str(error)))
        else:
            async with contextlib.AsyncExitStack() as stack:
                writes = scope["method"] in _WRITING  # others may go on for hours
                receive = self._bounded(receive, stack if writes else None)
                try:
                    await self._app(scope, receive, send)
                finally:
                    self._waiting.remove(stack)

    def _may_pass(self, path: str, headers: Headers) -> bool:
        if self._token is None or path in OPEN or path.startswith(_OPEN_FOLDERS):
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(given.encode(), self._token) and scheme.lower() == "bearer"

    def _bounded(self, receive: Receive, stack: contextlib.AsyncExitStack | None) -> Receive:
        """`receive` within the limits; a large body occupies room until `stack` is left, and is too
        large without one.

        The request waits for the service while there is no room, and once its body is whole.
        """
        limit = min(self._limit, LARGE_BYTES) if stack is None else self._limit
        size, is_whole, ends_s = 0, False, time.monotonic() + WHOLE_S
        share: _Share | None = None  # of a large body

        async def bounded() -> Message:
            nonlocal size, is_whole, ends_s, share
            if is_whole:  # what comes next is the end of the connection, at any time
                return await receive()
            try:
                async with asyncio.timeout(min(SILENT_S, ends_s - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                self._metrics.count_cut("body")
                raise SlowRequestError(SILENT_S) from None
            is_whole = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > limit:
                raise BodyTooLargeError(limit)
            if stack is not None and size > LARGE_BYTES:
                share = share or stack.enter_context(self._room.share())
                self._waiting.add(stack)
                waits_s = time.monotonic()
                await share.grow(size)
                ends_s += time.monotonic() - waits_s
                self._waiting.remove(stack)
            if stack is not None and is_whole:
                self._waiting.add(stack)
            return message

        return bounded


class _Room:
    """Memory that requests share, first come, first served, and a place beyond it for one of them:
    else those that have a part of what they need might wait for each other."""

    def __init__(self, size: int) -> None:
        self.free, self.is_place_free = size, True
        self._turn, self.changed = asyncio.Lock(), asyncio.Event()

    @contextlib.contextmanager
    def share(self) -> Iterator[_Share]:
        """A share of the memory, of no bytes at first; free again at the end."""
        share = _Share(self)
        try:
            yield share
        finally:
            share.end()

    async def wait(self, size: int) -> None:
        """Wait until so many bytes are free, or the place is."""
        async with self._turn:
            while size > self.free and not self.is_place_free:
                self.changed.clear()
                await self.changed.wait()


class _Share:
    """Memory that one request occupies."""

    def __init__(self, room: _Room) -> None:
        self._room, self._size, self._has_place = room, 0, False

    async def grow(self, size: int) -> None:
        """Occupy `size` bytes in all. The place is left as soon as it is not needed."""
        room, more = self._room, size - self._size
        if more and not self._has_place:
            await room.wait(more)
        if more <= room.free:
            room.free -= more
            self._size = size
            self._leave_place()
        else:
            room.is_place_free, self._has_place = False, True

    def end(self) -> None:
        """Occupy nothing any more."""
        self._room.free += self._size
        self._leave_place()

    def _leave_place(self) -> None:
        self._room.is_place_free |= self._has_place
        self._has_place = False
        self._room.changed.set()


def _names_this_machine(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return not host or is_loopback(name)
