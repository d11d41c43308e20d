"""The sidecar as a supervised group of processes: API, worker and embedded Redis."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from .app import create_app
from .connections import TimedConnection
from .errors import StartError
from .logs import logger
from .settings import Settings
from .store.connection import check_redis, end_leases
from .store.embedded_redis import EmbeddedRedis
from .supervisor import ChildProcess, end
from .worker.adapters import AdapterFactory, load_adapters
from .worker.loop import unique_name, work

log = logger("resihp.server")

# Together less than 10 s: open requests, then the API, the worker and Redis.
_REQUESTS_S, _API_S, _WORKER_S, _REDIS_S = 2, 3.5, 4.0, 2.0
_POLL_S = 0.1
_KEEP_ALIVE_S = 75  # idle connections; large jobs send a message in many seconds


def serve(settings: Settings, adapters: AdapterFactory = load_adapters) -> None:
    """Serve until SIGINT or SIGTERM, or the end of `settings.parent`. Raises `StartError` with a
    message of one line.

    This process starts the others and starts them again when they die or hang: Redis if none is
    given, a worker, and `settings.processes` API processes on one listening socket. At the end it
    stops them in reverse order. `adapters` is called in the worker's process.
    """
    _check_start(settings)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    is_over = partial(_is_over, stop, settings.parent)
    with contextlib.ExitStack() as stack:
        redis, redis_url = None, settings.redis_url
        if redis_url is None:
            redis = EmbeddedRedis(settings.data)
            redis.start(is_over)
            stack.callback(redis.stop, timeout_s=_REDIS_S)
            redis_url = redis.url
        own = settings.model_copy(update={"redis_url": redis_url, "worker": False})
        check_redis(redis_url)
        if redis is not None:
            end_leases(redis_url)
        listener = stack.enter_context(_bind(settings))
        # One name for all lives of a process: the next one need not wait until the leases end, and
        # is not delayed by the requests of the last one.
        name = unique_name()
        work_on = partial(_work, own, adapters, name)
        workers = [ChildProcess("worker", work_on)] if settings.worker else []
        apis = [
            ChildProcess(f"api-{number}", partial(_serve_api, own, listener, f"{name}-{number}"))
            for number in range(settings.processes)
        ]
        stack.callback(end, workers, timeout_s=_WORKER_S)
        stack.callback(end, apis, timeout_s=_API_S)
        children = [*workers, *apis]
        for child in children:
            child.start()
        if not _wait_until_ready(children, is_over):
            return
        url = _url(listener, settings)
        log.info("serving", url=url, docs=f"{url}/docs", processes=len(children))
        if settings.ready_file is not None:
            write_ready_file(settings.ready_file, url)
            stack.callback(settings.ready_file.unlink, missing_ok=True)
        while not is_over():
            for child in children:
                child.revive()
            if redis is not None:
                redis.revive()
            time.sleep(_POLL_S)  # not `stop.wait`, whose lock the signal handler would need


def _check_start(settings: Settings) -> None:
    """Raise `StartError` for what would end the sidecar right after its start."""
    file, parent = settings.ready_file, settings.parent
    if file is not None and not os.access(file.absolute().parent, os.W_OK):
        raise StartError(f"cannot write {file}; choose another --ready-file")
    if parent is not None and os.getppid() != parent:
        raise StartError(f"process {parent} is not the parent of this one; leave out --parent")


def _is_over(stop: threading.Event, parent: int | None) -> bool:
    return stop.is_set() or (parent is not None and os.getppid() != parent)


def _wait_until_ready(children: list[ChildProcess], is_over: Callable[[], bool]) -> bool:
    """Wait for all processes; False if it is over first. Raises `StartError`."""
    missing = list(children)
    while missing and not is_over():
        missing = [child for child in missing if not child.is_ready()]
        time.sleep(0.01)
    return not missing


def _work(
    settings: Settings, adapters: AdapterFactory, name: str, alive: Callable[[], None]
) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    work(settings, stop, adapters, name=name, alive=alive)


def _serve_api(
    settings: Settings, listener: socket.socket, name: str, alive: Callable[[], None]
) -> None:
    app = create_app(settings, name=name, address=listener.getsockname()[:2])
    config = uvicorn.Config(
        app, http=TimedConnection, log_config=None, access_log=False, proxy_headers=False,
        lifespan="on", timeout_graceful_shutdown=_REQUESTS_S, timeout_keep_alive=_KEEP_ALIVE_S,
    )  # fmt: skip
    try:
        _ApiServer(config, app, alive).run(sockets=[listener])
    except SystemExit:
        if app.state.start_error is not None:
            raise app.state.start_error from None
        raise


class _ApiServer(uvicorn.Server):
    """Gives signs of life from its start on, and wakes waiting requests before the shutdown."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, alive: Callable[[], None]) -> None:
        super().__init__(config)
        self._app = app
        self._alive = alive

    async def on_tick(self, counter: int) -> bool:
        self._alive()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.context.notifier.close()
        await super().shutdown(sockets)


def write_ready_file(path: Path, url: str) -> None:
    """Write url and pid atomically. Raises `StartError`."""
    partial_path = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial_path.write_text(json.dumps({"url": url, "pid": os.getpid()}))
        partial_path.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial_path.unlink()
        raise StartError(f"cannot write {path}: {error.strerror}") from None


def _bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY: else each answer waits for the client's
    # delayed acknowledgement of its head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host.strip("[]"), settings.port))
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        other = "--host" if isinstance(error, socket.gaierror) else "--port"
        raise StartError(f"cannot bind {where}: {error.strerror}; choose another {other}") from None
    return listener


def _url(listener: socket.socket, settings: Settings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"
