"""Store of the launchers in Redis, which outlives any node of the job."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import redis
import torch.distributed as dist
from redis.backoff import NoBackoff
from redis.retry import Retry

from resihp.contracts import JobStoppedError

Answer = TypeVar("Answer")
_RETRY_S = 0.5
_PATIENCE, _LIFETIME = 3, 10  # in heartbeats' time-outs
_RETRIED = redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError

_APPEND = """
local value = (redis.call('HGET', KEYS[1], ARGV[1]) or '') .. ARGV[2]
redis.call('HSET', KEYS[1], ARGV[1], value)
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""
_COMPARE_SET = """
local found = redis.call('HGET', KEYS[1], ARGV[1])
if (found or '') == ARGV[2] then
    found = ARGV[3]
    redis.call('HSET', KEYS[1], ARGV[1], found)
    redis.call('EXPIRE', KEYS[1], ARGV[4])
end
return found or ''
"""


_FORGET = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then
    return redis.call('DEL', KEYS[1])
end
return 0
"""


class RedisStore(dist.Store):
    """The part of torch's `Store` that launchers use, in one hash of Redis.

    url        redis://, rediss:// or unix://, as redis-py reads it
    job        identity of the job: two jobs of one name at a time would be one
    heartbeat  time-out of a launcher's heartbeat. Requests are repeated for three of them, in which
               a replica may take over; the hash is deleted ten of them after the last request
    on_wait    called before a request is repeated

    Raises `torch.distributed.DistError` if Redis does not answer. A value is not waited for.
    """

    def __init__(
        self, url: str, job: str, heartbeat: timedelta, on_wait: Callable[[], object] = bool
    ) -> None:
        super().__init__()
        timeout_s = heartbeat.total_seconds()
        answer_s = min(1.0, timeout_s / 5)
        self._patience_s, self._on_wait = _PATIENCE * timeout_s, on_wait
        self._redis: Any = redis.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=answer_s,
            socket_connect_timeout=answer_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._key = f"resihp:run:{job}"
        self._lifetime_s = max(1, round(_LIFETIME * timeout_s))

    def set_timeout(self, timeout: timedelta) -> None:
        """Repeat requests for this time from now on; 0: not at all."""
        self._patience_s = timeout.total_seconds()

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._write(lambda pipe: pipe.hset(self._key, key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key. Raises `DistStoreError` if it has none."""
        value: bytes | None = self._asked(lambda: self._redis.hget(self._key, key))
        if value is None:
            raise dist.DistStoreError(f"no value of {key}")
        return value

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""
        return None not in self._asked(lambda: self._redis.hmget(self._key, keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its value."""
        return int(self._write(lambda pipe: pipe.hincrby(self._key, key, amount)))

    def append(self, key: str, value: str) -> None:
        """Append to the value of a key."""
        self._asked(lambda: self._redis.eval(_APPEND, 1, self._key, key, value, self._lifetime_s))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key that has the `expected` value, "" for none; returns the value that it has."""
        arguments = self._key, key, expected, value, self._lifetime_s
        found: bytes = self._asked(lambda: self._redis.eval(_COMPARE_SET, 1, *arguments))
        return found

    def forget(self, key: str, value: bytes) -> bool:
        """Delete all keys if `key` has this value; returns whether it had."""
        return bool(self._asked(lambda: self._redis.eval(_FORGET, 1, self._key, key, value)))

    def _write(self, command: Callable[[Any], Any]) -> Any:
        def request() -> Any:
            pipe = self._redis.pipeline(transaction=True)  # forgets its commands with an error
            command(pipe)
            pipe.expire(self._key, self._lifetime_s)
            return pipe.execute()[0]

        return self._asked(request)

    def _asked(self, request: Callable[[], Answer]) -> Answer:
        """Return the answer to a request, which is repeated as long as Redis does not answer."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return request()
            except redis.RedisError as error:
                is_over = time.monotonic() + _RETRY_S > deadline
                if is_over or not isinstance(error, _RETRIED):
                    raise dist.DistNetworkError(str(error)) from error
            self._on_wait()
            time.sleep(_RETRY_S)


def open_redis(
    url: str, job: str, heartbeat: timedelta, on_wait: Callable[[], object] = bool
) -> RedisStore:
    """Open a store. Raises `JobStoppedError` if Redis does not answer, or the URL is no such."""
    try:
        store = RedisStore(url, job, heartbeat, on_wait)
        store.check(["attempt"])
    except (dist.DistError, ValueError) as error:
        raise JobStoppedError(f"no Redis answers as the store of the job: {error}") from error
    return store
