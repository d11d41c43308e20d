"""Client of a job's values in Redis, also behind Sentinel and in a Redis Cluster."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.exceptions import (
    AuthorizationError,
    ClusterError,
    NoPermissionError,
    RedisClusterException,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from .store_url import StoreUrl

# Scripts run in one step, on the one server that has the hash: KEYS[1]. ARGV[1] is its lifetime.
_WRITE = """
local function write()
    %s
end
local answer = write()
redis.call('EXPIRE', KEYS[1], ARGV[1])
return answer
"""
_SET = _WRITE % "return redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])"
_ADD = _WRITE % "return redis.call('HINCRBY', KEYS[1], ARGV[2], ARGV[3])"
_APPEND = _WRITE % (
    "local found = redis.call('HGET', KEYS[1], ARGV[2]) or ''\n"
    "return redis.call('HSET', KEYS[1], ARGV[2], found .. ARGV[3])"
)
_COMPARE_SET = _WRITE % (
    "local found = redis.call('HGET', KEYS[1], ARGV[2]) or ''\n"
    "if found ~= ARGV[3] then return found end\n"
    "redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])\n"
    "return ARGV[4]"
)
_DENIED = redis.AuthenticationError, AuthorizationError, NoPermissionError
_NOT_NOW = redis.ReadOnlyError, redis.OutOfMemoryError
_NOT_NOW_WORDS = re.compile(r"\b(READONLY|OOM|BUSY|NOREPLICAS|MISCONF)\b")
"""Errors without a type of their own, and up to Redis 6 those in a script."""
_FORGET = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then
    return redis.call('DEL', KEYS[1])
end
return 0
"""


class RedisRefusedError(Exception):
    """A server denies the launcher access."""


class RedisUnreadyError(Exception):
    """A server takes no such request for now."""


class RedisClient:
    """`StoreClient` whose values are one hash.

    Options of a URL are those of redis-py. With Sentinel those named `sentinel_NAME` are the option
    NAME of connections to Sentinels, which share TLS with those to the master.
    """

    errors: tuple[type[Exception], ...] = (
        *(redis.RedisError, RedisClusterException, RedisRefusedError, RedisUnreadyError),
    )
    passing_errors: tuple[type[Exception], ...] = (
        *(redis.ConnectionError, redis.TimeoutError, RedisUnreadyError),
        *(ClusterError, RedisClusterException),
    )

    def __init__(self, url: StoreUrl, job: str, lifetime_s: int, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._key, self._lifetime_s = f"resihp:run:{job}", lifetime_s

    def read(self, keys: list[str]) -> list[bytes | None]:
        """Return the values of keys; None for those without one."""
        found: list[bytes | None] = self._asked(lambda: self._redis.hmget(self._key, keys))
        return found

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._write(_SET, key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its value."""
        return int(self._write(_ADD, key, amount))

    def append(self, key: str, value: str) -> None:
        """Append to the value of a key."""
        self._write(_APPEND, key, value)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key that has the `expected` value; returns the value that it has."""
        found: bytes = self._write(_COMPARE_SET, key, expected, value)
        return found

    def forget(self, key: str, value: bytes) -> bool:
        """Delete all keys if `key` has this value; returns whether it had."""
        return bool(self._run(_FORGET, key, value))

    def _write(self, script: str, *arguments: str | int) -> Any:
        return self._run(script, self._lifetime_s, *arguments)

    def _run(self, script: str, *arguments: str | bytes | int) -> Any:
        return self._asked(lambda: self._redis.eval(script, 1, self._key, *arguments))

    def _asked(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except self.errors as error:
            if (denial := _denial(error)) is not None:
                raise RedisRefusedError(f"{self._url.shown} denies access: {denial}") from error
            if isinstance(error, _NOT_NOW) or _NOT_NOW_WORDS.search(str(error)):
                self.__dict__.pop("_redis", None)  # another server may be the master now
                raise RedisUnreadyError(str(error)) from error
            raise

    @cached_property
    def _redis(self) -> Any:
        """The client of redis-py: that of a cluster asks its servers at once for their slots."""
        url, once = self._url, Retry(NoBackoff(), 0)
        common: dict[str, Any] = {
            "protocol": 2,
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
        }
        if url.kind not in ("redis+sentinel", "redis+cluster"):
            return redis.Redis.from_url(url.text, retry=once, **common)
        options = common | parse_url(f"redis://{url.user}@?{url.options}")
        if url.is_tls:
            options["ssl"] = True
        if url.kind == "redis+cluster":
            nodes = [ClusterNode(host, port) for host, port in url.servers]
            others = Retry(NoBackoff(), len(nodes))  # requests without a key may go to any node
            return RedisCluster(
                startup_nodes=nodes, require_full_coverage=False, retry=others, **options
            )
        master, _, database = url.path[1:].partition("/")
        if database:
            options["db"] = int(database)
        prefix = "sentinel_"
        own = {name: options.pop(name) for name in list(options) if name.startswith(prefix)}
        own = {name.removeprefix(prefix): value for name, value in own.items()}
        shared = {name: value for name, value in options.items() if name.startswith("ssl")}
        sentinels = Sentinel(
            list(url.servers), sentinel_kwargs={**common, **shared, **own, "retry": once}, **options
        )
        return sentinels.master_for(unquote(master), retry=once)


def _denial(error: BaseException | None) -> BaseException | None:
    """The error by which a server denied access; a cluster's client raises another one for it."""
    while error is not None and not isinstance(error, _DENIED):
        error = error.__cause__ or error.__context__
    return error
