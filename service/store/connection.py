"""Checks and tidying of Redis at the start of a process."""

from __future__ import annotations

import re

import redis
from redis.exceptions import NoPermissionError

from ..errors import NoRedisError, StartError
from ..logs import logger
from .schema import APIS, JOBS, WORKERS, keys_of

log = logger("resihp.redis")

_QUERY_PASSWORD = re.compile(r"([?&]password=)[^&]*")
_PASSWORD = re.compile(r"((?:://|^(?!.*://))[^:@]*:).*@")


def without_password(url: str) -> str:
    """The URL of a Redis as logs and errors may show it, whatever the password holds.

    >>> without_password("redis://me:secret@db:6379/0")
    'redis://me:***@db:6379/0'
    >>> without_password("redis://:pa/s@s@db")
    'redis://:***@db'
    >>> without_password("unix:///run/redis.sock?db=1&password=secret")
    'unix:///run/redis.sock?db=1&password=***'
    """
    return _PASSWORD.sub(r"\1***@", _QUERY_PASSWORD.sub(r"\1***", url))


def check_redis(url: str, *, answer_s: float = 3.0) -> None:
    """Connect to Redis and close the connection. Raises `StartError`; `NoRedisError` where a later
    try may succeed."""
    shown = without_password(url)
    try:
        with redis.Redis.from_url(url, protocol=2, socket_timeout=answer_s) as client:
            client.ping()
    except ValueError as error:
        # The error may show a part of a password.
        reason = error if shown == url else "in a password '/' is %2F, '@' %40, '?' %3F and '#' %23"
        raise StartError(f"not a Redis URL: {shown}: {reason}") from None
    except (redis.AuthenticationError, NoPermissionError) as error:
        raise StartError(f"Redis at {shown} denies access: {error}") from None
    except redis.RedisError as error:
        raise NoRedisError(f"cannot reach Redis at {shown}: {error}") from None


def warn_of_eviction(url: str) -> None:
    """Log it where a Redis without memory deletes keys that are to stay, instead of refusing."""
    with redis.Redis.from_url(url, protocol=2) as client:
        try:
            policy = str(client.info("memory")["maxmemory_policy"])
        except (redis.RedisError, KeyError):  # denied, or left out by a service that stands for one
            return
    if policy != "noeviction" and not policy.startswith("volatile-"):
        log.warning(
            "Redis deletes data of jobs when it is out of memory; set its maxmemory-policy to "
            "noeviction",
            policy=policy,
        )


def end_leases(url: str) -> None:
    """Delete leases and reports of earlier processes, for whoever has just started this Redis.

    They would end by themselves; where the clock went back, as after a power loss, hours later. A
    worker that goes on acquires its jobs again.
    """
    with redis.Redis.from_url(url, protocol=2) as client:
        jobs = client.smembers(JOBS)
        client.delete(WORKERS, APIS, *(keys_of(job.decode()).lease for job in jobs))
