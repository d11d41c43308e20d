"""ASGI middleware: authorization, limit of the body size, metrics and request log."""

from __future__ import annotations

import hmac
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import BodyTooLargeError
from ..logs import logger
from ..settings import Settings, is_loopback
from .metrics import HttpMetrics
from .problems import problem, send_problem

log = logger("resihp.http")

# Paths without data of a job; all others need the token if one is set.
_OPEN = ("/", "/dashboard", "/healthz", "/v1/healthz", "/docs", "/openapi.json")
_OPEN_FOLDERS = ("/assets/",)


class RequestMiddleware:
    """Checks the bearer token and bounds the size of a body while it is read.

    Without a token the `Host` header must be a local name, so that a foreign web page cannot reach
    the sidecar through a DNS name of its own (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._token = settings.token.get_secret_value().encode() if settings.token else None
        self._local_only = self._token is None and is_loopback(settings.host)
        self._limit = settings.max_body_bytes

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
            await self._app(scope, self._bounded(receive), send)

    def _may_pass(self, path: str, headers: Headers) -> bool:
        if self._token is None or path in _OPEN or path.startswith(_OPEN_FOLDERS):
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(given.encode(), self._token) and scheme.lower() == "bearer"

    def _bounded(self, receive: Receive) -> Receive:
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise BodyTooLargeError(self._limit)
            return message

        return bounded


def _names_this_machine(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return not host or is_loopback(name)
