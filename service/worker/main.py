"""A worker as a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import redis

from ..errors import StartError
from ..settings import Settings
from ..store.embedded import socket_path
from .engines import Engines, load_engines
from .loop import Worker


def work(
    settings: Settings, stop: threading.Event, engines: Callable[[], Engines] = load_engines
) -> None:
    """Work until `stop` is set. Raises `StartError` when there is no Redis to work on."""
    url = settings.redis_url or f"unix://{socket_path(settings.data)}"
    try:
        client = redis.Redis.from_url(url, protocol=2)
    except ValueError as error:
        raise StartError(f"not the address of a Redis: {url}: {error}") from None
    try:
        client.ping()
        client.close()
    except redis.RedisError:
        raise StartError(
            f"no Redis answers at {url}; start `resihp serve` with the same --data or --redis first"
        ) from None
    # The signal handler runs in the main thread, which therefore only waits.
    thread = threading.Thread(target=Worker(url, settings, engines()).run, args=(stop,))
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
