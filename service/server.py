"""The web server: serves the app in this process until a signal."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from .app import create_app
from .connections import TimedConnection
from .errors import StartError
from .logs import logger
from .settings import Settings
from .worker.adapters import AdapterFactory, load_adapters

log = logger("resihp.server")


def serve(settings: Settings, adapters: AdapterFactory = load_adapters) -> None:
    """Serve until SIGINT or SIGTERM. Raises `StartError` with a message of one line."""
    app = create_app(settings, adapters)
    config = uvicorn.Config(
        app, http=TimedConnection, log_config=None, access_log=False, lifespan="on",
        timeout_graceful_shutdown=5,
    )  # fmt: skip
    listener = _bind(settings)
    # uvicorn raises the signal that ended it again after its shutdown.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    try:
        _Server(config, app, settings, _url(listener, settings)).run(sockets=[listener])
    except SystemExit as end:
        if app.state.start_error is not None:
            raise app.state.start_error from None
        if end.code:
            raise StartError("the web server did not start") from None
    finally:
        listener.close()
        if settings.ready_file is not None:
            settings.ready_file.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """Writes the ready file at start, and wakes waiting requests before the shutdown."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, settings: Settings, url: str) -> None:
        super().__init__(config)
        self._app = app
        self._settings = settings
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("serving", url=self._url, docs=f"{self._url}/docs")
        if self._settings.ready_file is not None:
            write_ready_file(self._settings.ready_file, self._url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.context.notifier.close()
        await super().shutdown(sockets)


def write_ready_file(path: Path, url: str) -> None:
    """Write url and pid atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    partial.replace(path)


def _bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host.strip("[]"), settings.port))
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        raise StartError(f"cannot bind {where}: {error.strerror}; choose another --port") from None
    return listener


def _url(listener: socket.socket, settings: Settings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"
