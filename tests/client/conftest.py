"""A real HTTP server that answers by script and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    port: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Scripted:
    """Answers `(status, body)` in turn; the last one over and over."""

    url: str = ""
    answers: list[tuple[int, Any]] = field(default_factory=lambda: [(202, {})])
    asked: list[Asked] = field(default_factory=list)
    delay: threading.Event | None = None

    def answer(self, status: int, body: Any = None) -> None:
        self.answers = [(status, body)]


@pytest.fixture
def service():
    state = Scripted()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            port = self.client_address[1]
            state.asked.append(Asked(self.command, self.path, dict(self.headers), body, port))
            if state.delay is not None:
                state.delay.wait(5)
            status, document = state.answers[0]
            if len(state.answers) > 1:
                state.answers.pop(0)
            data = document if isinstance(document, bytes) else json.dumps(document).encode()
            data = b"" if status == 204 else data
            self.send_response(status)
            if status != 204:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(BrokenPipeError):  # a client that did not wait for the answer
                self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = _any  # noqa: N815 the server's names

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    if state.delay is not None:
        state.delay.set()
    server.shutdown()
    thread.join(5)
    server.server_close()
