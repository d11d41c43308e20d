"""What a process does with Redis at its start."""

from __future__ import annotations

import redis

from ..errors import NoRedisError, StartError


def check_redis(url: str, *, answer_s: float = 3.0) -> None:
    """Connect to Redis and close the connection. Raises `StartError`; `NoRedisError` where a later
    try may succeed."""
    try:
        with redis.Redis.from_url(url, protocol=2, socket_timeout=answer_s) as client:
            client.ping()
    except ValueError as error:
        raise StartError(f"not a Redis URL: {url}: {error}") from None
    except redis.RedisError as error:
        raise NoRedisError(f"cannot reach Redis at {url}: {error}") from None
