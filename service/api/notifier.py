"""Wakes requests that wait for changes of a job, through one subscription for all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import redis

from ..errors import TooManyWatchersError
from ..store.schema import NEWS


class Notifier:
    """Events of changed jobs.

    A request takes `next_change(job)` first, then reads the store, then waits, so that no change in
    between is lost. It reads the store again after `RECHECK_S` in any case: the subscription may
    have been interrupted.
    """

    RECHECK_S = 5.0

    def __init__(self, *, max_watchers: int) -> None:
        self.closed = False
        self._max_watchers = max_watchers
        self._watchers = 0
        self._events: dict[str, asyncio.Event] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count one more waiting request. Raises `TooManyWatchersError`."""
        self.require_capacity()
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    def require_capacity(self) -> None:
        """Check that one more request may wait. Raises `TooManyWatchersError`."""
        if self._watchers >= self._max_watchers:
            raise TooManyWatchersError(self._max_watchers)

    def next_change(self, job: str) -> asyncio.Event:
        """An event that is set at the next change of a job."""
        return self._events.setdefault(job, asyncio.Event())

    async def wait(self, event: asyncio.Event, timeout_s: float) -> None:
        """Wait for the event, at most `timeout_s` and `RECHECK_S`."""
        if not self.closed and timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), min(timeout_s, self.RECHECK_S))

    def notify(self, job: str) -> None:
        """Wake all requests that wait for this job."""
        if event := self._events.pop(job, None):
            event.set()

    def close(self) -> None:
        """Wake all requests for the last time: the sidecar stops."""
        self.closed = True
        for job in list(self._events):
            self.notify(job)

    async def listen(self, client: Any) -> None:
        """Notify for every message on the channel; runs until cancelled."""
        while True:
            try:
                async with client.pubsub() as channel:
                    await channel.subscribe(NEWS)
                    while True:
                        message = await channel.get_message(
                            ignore_subscribe_messages=True, timeout=1.0
                        )
                        if message is not None:
                            self.notify(message["data"].decode())
            except (redis.RedisError, OSError):
                await asyncio.sleep(0.2)
