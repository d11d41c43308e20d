"""The app factory. The app opens its resources at start and closes them at its end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import redis
from fastapi import FastAPI
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from resihp._process_limits import allow_open_files

from .api import events, ingest, jobs, pages, plans
from .api.context import AppContext
from .api.delay import Address, DelayReporter, WaitingRequests
from .api.heartbeats import HeartbeatBatches
from .api.lag import JobLags
from .api.metrics import HttpMetrics
from .api.middleware import RequestMiddleware
from .api.notifier import Notifier
from .api.openapi import OpenApiDocument
from .api.problems import add_problem_handlers
from .errors import StartError
from .logs import logger
from .settings import Settings
from .store.connection import check_redis, end_leases, warn_of_eviction, without_password
from .store.embedded_redis import EmbeddedRedis
from .store.http_store import HttpStore
from .worker.adapters import AdapterFactory, load_adapters
from .worker.loop import Worker, unique_name

log = logger("resihp.app")

# A request holds a connection for one command: more would not make it faster.
_CONNECTIONS, _WATCHING_CONNECTIONS = 64, 16
_CONNECTION_WAIT_S = 30.0
_REDIS_ANSWER_S = 3.0  # for longer a request does not wait
_NEWEST_JOBS = 10  # stay, however old
_EXPIRE_EVERY_S = 3_600.0
_CANCEL_EVERY_S = 0.2
_OPEN_FILES = 32_768  # beside those of the watchers: connections of senders, Redis, the log


def create_app(
    settings: Settings,
    adapters: AdapterFactory = load_adapters,
    *,
    name: str | None = None,
    address: Address | None = None,
) -> FastAPI:
    """The sidecar as an ASGI app, in one process.

    It starts what the settings ask for beside the API: an embedded Redis, and a worker in a thread,
    for which `adapters` loads detector and scheduler. `resihp serve` starts both as processes.

    name     that of this process among those of the API; one that is started in place of another
             has its name. None: one of its own
    address  host and port at which the app will be served, where it measures the delay of requests.
             None: without those that no app has got yet
    """
    metrics, waiting = HttpMetrics(), WaitingRequests()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                context = await _open(stack, settings, adapters, metrics)
                app.state.context = context
                reporter = DelayReporter(context.watched, name or unique_name(), waiting, address)
                stack.push_async_callback(reporter.close)
                _run_task(stack, reporter.run())
            except StartError as error:
                app.state.start_error = error
                raise
            yield {"metrics": metrics}  # for `TimedConnection`

    app = FastAPI(
        title="ResiHP sidecar",
        description="Keeps hybrid-parallel training fast and alive on imperfect machines.",
        servers=[{"url": "."}],  # that of the document: a proxy may serve it under a prefix
        docs_url=None,  # the framework's own page loads assets from a CDN
        redoc_url=None,
        lifespan=lifespan,
        routes=list(ingest.router.routes),  # not included: their matching costs less
    )
    # The packaged Swagger UI does not support 3.1.
    app.openapi_version = "3.0.3"
    app.openapi = OpenApiDocument(app, needs_token=settings.token is not None)  # type: ignore[method-assign]
    app.state.start_error = None
    app.add_middleware(RequestMiddleware, settings=settings, metrics=metrics, waiting=waiting)
    add_problem_handlers(app)
    for routes in (jobs, plans, events, pages):
        app.include_router(routes.router)
    pages.mount_assets(app)
    return app


async def _open(
    stack: contextlib.AsyncExitStack,
    settings: Settings,
    adapters: AdapterFactory,
    metrics: HttpMetrics,
) -> AppContext:
    wanted = settings.max_watchers + _OPEN_FILES
    if (allowed := allow_open_files(wanted)) < wanted:
        log.warning("few open files for connections (ulimit -n)", files=allowed, wanted=wanted)
    url = _open_redis(stack, settings)
    await asyncio.to_thread(check_redis, url, answer_s=_REDIS_ANSWER_S)
    if settings.redis_url is None:
        await asyncio.to_thread(end_leases, url)
    else:
        await asyncio.to_thread(warn_of_eviction, url)
    client = _connect(stack, url, _CONNECTIONS)
    # On connections of their own, so that watchers that wake together hold up no other request.
    watching = _connect(stack, url, _WATCHING_CONNECTIONS)
    notifier = Notifier(max_watchers=settings.max_watchers)
    _run_task(stack, notifier.wake())
    _run_task(stack, notifier.listen(watching))
    stack.callback(notifier.close)
    if settings.worker:
        await _start_worker(stack, url, settings, adapters)
    log.info("ready", redis=without_password(url))
    store, watched = HttpStore(client, settings), HttpStore(watching, settings)
    _run_task(stack, _expire_jobs(store, settings.keep_jobs_days))
    lags = JobLags(store, settings)
    return AppContext(settings, store, watched, notifier, metrics, HeartbeatBatches(store), lags)


async def _expire_jobs(store: HttpStore, days: float) -> None:
    """Delete jobs that have ended long ago; runs until cancelled."""
    while True:
        try:
            expired = await store.expire(silent_s=days * 86_400, keep=_NEWEST_JOBS)
        except redis.RedisError as error:
            log.warning("ended jobs not deleted", error=str(error))
        else:
            if expired:
                log.info("ended jobs deleted", jobs=expired)
        await asyncio.sleep(_EXPIRE_EVERY_S)


def _connect(stack: contextlib.AsyncExitStack, url: str, connections: int) -> Redis:
    """A client with so many connections at most; who finds none free waits."""
    # Two quick retries bridge a restart of Redis; a time-out is not retried.
    retry = Retry(ConstantBackoff(0.2), 2, supported_errors=(redis.ConnectionError,))
    pool = BlockingConnectionPool.from_url(
        url, protocol=2, socket_timeout=_REDIS_ANSWER_S, retry=retry,
        max_connections=connections, timeout=_CONNECTION_WAIT_S,
    )  # fmt: skip
    client = Redis.from_pool(pool)
    stack.push_async_callback(client.aclose)
    return client


def _open_redis(stack: contextlib.AsyncExitStack, settings: Settings) -> str:
    if settings.redis_url is not None:
        return settings.redis_url
    server = EmbeddedRedis(settings.data)
    server.start()
    stack.callback(server.stop)
    _run_task(stack, _keep_alive(server))
    return server.url


async def _keep_alive(server: EmbeddedRedis) -> None:
    while True:
        await asyncio.sleep(0.1)
        server.revive()


def _run_task(stack: contextlib.AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until the app ends, then cancel it."""
    task = asyncio.create_task(work)

    async def cancel() -> None:
        while not task.done():  # redis-py may turn a cancellation into an error of the connection
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_EVERY_S)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    stack.push_async_callback(cancel)


async def _start_worker(
    stack: contextlib.AsyncExitStack,
    url: str,
    settings: Settings,
    adapters: AdapterFactory,
) -> None:
    stop = threading.Event()
    worker = Worker(url, settings, await asyncio.to_thread(adapters, settings), unique_name())
    thread = threading.Thread(target=worker.run, args=(stop,), name="worker")
    thread.start()

    async def end() -> None:
        stop.set()
        await asyncio.to_thread(thread.join, 15)

    stack.push_async_callback(end)
