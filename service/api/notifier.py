"""Wakes the requests that wait for news of a job: one subscription for all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import redis

from ..errors import TooManyWatchersError
from ..store.schema import NEWS


class Notifier:
    """Waiters take `next(job)` first, look at the store, and then wait, so that no news is lost
    in between. A waiter looks again after `RECHECK_S` anyway: Redis may have been away."""

    RECHECK_S = 5.0

    def __init__(self, *, max_watchers: int) -> None:
        self.closed = False
        self._max_watchers = max_watchers
        self._watchers = 0
        self._events: dict[str, asyncio.Event] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Counts one more waiting request. Raises `TooManyWatchersError`."""
        self.require_room()
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    def require_room(self) -> None:
        """Raises `TooManyWatchersError` if one more may not wait."""
        if self._watchers >= self._max_watchers:
            raise TooManyWatchersError(self._max_watchers)

    def next(self, job: str) -> asyncio.Event:
        """Set at the next news of a job."""
        return self._events.setdefault(job, asyncio.Event())

    async def wait(self, event: asyncio.Event, timeout_s: float) -> None:
        """Until the news, or until it is time to look again."""
        if not self.closed and timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), min(timeout_s, self.RECHECK_S))

    def ring(self, job: str) -> None:
        """Wake everybody who waits for this job."""
        if event := self._events.pop(job, None):
            event.set()

    def close(self) -> None:
        """Wake everybody for good: the sidecar stops."""
        self.closed = True
        for job in list(self._events):
            self.ring(job)

    async def listen(self, client: Any) -> None:
        """Ring for every message on the channel; runs until cancelled."""
        while True:
            try:
                async with client.pubsub() as channel:
                    await channel.subscribe(NEWS)
                    while True:
                        message = await channel.get_message(
                            ignore_subscribe_messages=True, timeout=1.0
                        )
                        if message is not None:
                            self.ring(message["data"].decode())
            except (redis.RedisError, OSError):
                await asyncio.sleep(0.2)
