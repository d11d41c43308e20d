"""A worker in a process of its own."""

from __future__ import annotations

import threading
import time

import redis

from ..errors import StartError
from ..logs import logger
from ..settings import Settings
from ..store.embedded_redis import socket_path
from .adapters import AdapterFactory, load_adapters
from .loop import Worker

_PATIENCE_S = 30.0  # a sidecar started at the same time may not have started its Redis yet
_POLL_S = 0.2

log = logger("resihp.worker")


def work(
    settings: Settings,
    stop: threading.Event,
    adapters: AdapterFactory = load_adapters,
    *,
    patience_s: float = _PATIENCE_S,
) -> None:
    """Work until `stop` is set. Raises `StartError` if no Redis answers within `patience_s`."""
    url = settings.redis_url or f"unix://{socket_path(settings.data)}"
    try:
        client = redis.Redis.from_url(url, protocol=2)
    except ValueError as error:
        raise StartError(f"not a Redis URL: {url}: {error}") from None
    with client:
        if not _answers(client, url, stop, patience_s):
            return
    # Signal handlers run in the main thread, which therefore only waits.
    thread = threading.Thread(target=Worker(url, settings, adapters(settings)).run, args=(stop,))
    thread.start()
    while thread.is_alive():
        thread.join(0.2)


def _answers(client: redis.Redis, url: str, stop: threading.Event, patience_s: float) -> bool:
    """Wait until Redis answers; False if `stop` is set first. Raises `StartError`."""
    deadline_s = time.monotonic() + patience_s
    is_logged = False
    while not stop.is_set():
        try:
            client.ping()
        except redis.RedisError:
            if time.monotonic() >= deadline_s:
                raise StartError(
                    f"no Redis answers at {url}; "
                    "start `resihp serve` with the same --data or --redis"
                ) from None
            if not is_logged:
                log.info("waiting for Redis", url=url)
            is_logged = True
            stop.wait(_POLL_S)
        else:
            return True
    return False
