"""Store of the launchers that outlives any node of the job: in Redis or etcd."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

import torch.distributed as dist

from resihp.contracts import JobStoppedError

from .store_url import StoreUrl

Answer = TypeVar("Answer")
_RETRY_S = 0.5
_PATIENCE, _LIFETIME = 3, 10  # in heartbeats' time-outs


class StoreClient(Protocol):
    """Requests for the values of one job, each made once; all writes are done in one step.

    The values vanish some time after the last write.

    errors          of requests
    passing_errors  those of them after which the same request may be answered
    """

    errors: tuple[type[Exception], ...]
    passing_errors: tuple[type[Exception], ...]

    def read(self, keys: list[str]) -> list[bytes | None]:
        """Return the values of keys; None for those without one."""

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its value."""

    def append(self, key: str, value: str) -> None:
        """Append to the value of a key."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key that has the `expected` value, "" for none; returns the value that it has, ""
        for none."""

    def forget(self, key: str, value: bytes) -> bool:
        """Delete all keys if `key` has this value; returns whether it had."""


class ReplicatedStore(dist.Store):
    """The part of torch's `Store` that launchers use.

    patience  requests are repeated for so long, in which a replica may take over; 0: not at all
    on_wait   called before a request is repeated

    Raises `torch.distributed.DistError` if no server answers. A value is not waited for.
    """

    def __init__(
        self, client: StoreClient, patience: timedelta, on_wait: Callable[[], object] = bool
    ) -> None:
        super().__init__()
        self._client, self._on_wait = client, on_wait
        self._patience_s = patience.total_seconds()

    def set_timeout(self, timeout: timedelta) -> None:
        """Repeat requests for this time from now on; 0: not at all."""
        self._patience_s = timeout.total_seconds()

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._asked(lambda: self._client.set(key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key. Raises `DistStoreError` if it has none."""
        (value,) = self._asked(lambda: self._client.read([key]))
        if value is None:
            raise dist.DistStoreError(f"no value of {key}")
        return value

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""
        return None not in self._asked(lambda: self._client.read(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its value."""
        return self._asked(lambda: self._client.add(key, amount))

    def append(self, key: str, value: str) -> None:
        """Append to the value of a key."""
        self._asked(lambda: self._client.append(key, value))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key that has the `expected` value, "" for none; returns the value that it has."""
        return self._asked(lambda: self._client.compare_set(key, expected, value))

    def forget(self, key: str, value: bytes) -> bool:
        """Delete all keys if `key` has this value; returns whether it had."""
        return self._asked(lambda: self._client.forget(key, value))

    def _asked(self, request: Callable[[], Answer]) -> Answer:
        """Return the answer to a request, which is repeated as long as no server answers."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return request()
            except self._client.errors as error:
                is_over = time.monotonic() + _RETRY_S > deadline
                if is_over or not isinstance(error, self._client.passing_errors):
                    raise dist.DistNetworkError(str(error)) from error
            self._on_wait()
            time.sleep(_RETRY_S)


def open_replicated_store(
    text: str, job: str, heartbeat: timedelta, on_wait: Callable[[], object] = bool
) -> ReplicatedStore:
    """Open the store that a URL names. Raises `JobStoppedError` if none answers there.

    job        identity of the job: two jobs of one name at a time would be one
    heartbeat  time-out of a launcher's heartbeat. Requests are repeated for three of them; the
               values vanish ten of them after the last write
    """
    kind = "etcd" if text.startswith("etcd") else "Redis"
    timeout_s = heartbeat.total_seconds()
    lifetime_s = max(1, round(_LIFETIME * timeout_s))
    try:
        client = client_type(kind)(StoreUrl.parse(text), job, lifetime_s, min(1.0, timeout_s / 5))
        store = ReplicatedStore(client, _PATIENCE * heartbeat, on_wait)
        store.check(["attempt"])
    except (dist.DistError, ValueError, TypeError) as error:  # also those of options of the URL
        raise JobStoppedError(f"no {kind} answers as the store of the job: {error}") from error
    return store


def client_type(kind: str) -> Callable[[StoreUrl, str, int, float], StoreClient]:
    """Return the client of etcd or Redis: of a URL's servers, a job, the time for which its values
    live, and the time-out of a request. Raises `JobStoppedError` if it is not installed."""
    if kind == "etcd":
        from .etcd_client import EtcdClient

        return EtcdClient
    try:
        from .redis_client import RedisClient
    except ImportError as error:
        raise JobStoppedError("a store in Redis needs `pip install redis`") from error
    return RedisClient
