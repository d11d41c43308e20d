"""Checks and tidying of Redis at the start of a process."""

from __future__ import annotations

import redis

from ..errors import NoRedisError, StartError
from .schema import APIS, JOBS, WORKERS, JobKeys


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


def end_leases(url: str) -> None:
    """Delete leases and reports of earlier processes, for whoever has just started this Redis.

    They would end by themselves; where the clock went back, as after a power loss, hours later. A
    worker that goes on acquires its jobs again.
    """
    with redis.Redis.from_url(url, protocol=2) as client:
        jobs = client.smembers(JOBS)
        client.delete(WORKERS, APIS, *(JobKeys(job.decode()).lease for job in jobs))
