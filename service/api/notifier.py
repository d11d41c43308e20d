"""Wakes requests that wait for changes of a job, through one subscription for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterator
from typing import Any, TypeVar

import redis

from ..errors import TooManyWatchersError
from ..store.schema import NEWS, PLANS

_T = TypeVar("_T")
_WOKEN_TOGETHER = 4  # watchers: what they do takes a few milliseconds
_SHORT_TURN_S, _LONGEST_TURN_S = 0.002, 0.02
_KEPT_READS = 8


class JobChange:
    """The next change of a job, and what is read of the store until then."""

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: set[asyncio.Future[None]] = set()
        self._reads: dict[Hashable, asyncio.Task[Any]] = {}

    async def read(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """The result of `work`, done once for all who ask under this key before the change.

        For watchers that the previous change woke. A request that has not waited yet reads the
        store itself: it may know of a change that this process has not been told of.
        """
        task: asyncio.Task[_T] | None = self._reads.get(key)
        if task is None:
            task = self._reads[key] = asyncio.create_task(work())
            task.add_done_callback(lambda done: self._forget_failed(key, done))
            if len(self._reads) > _KEPT_READS:
                del self._reads[next(iter(self._reads))]
        return await asyncio.shield(task)

    def _forget_failed(self, key: Hashable, done: asyncio.Task[Any]) -> None:
        if (done.cancelled() or done.exception()) and self._reads.get(key) is done:
            del self._reads[key]


class Notifier:
    """Changes of jobs, by channel: `NEWS` for any change, `PLANS` for a new plan.

    A watcher takes `next_change` first, then reads the store, then waits, so that no change in
    between is lost. All are woken every `RECHECK_S` in any case: the subscription may have been
    interrupted without an error.

    count  watchers at present
    """

    RECHECK_S = 10.0

    def __init__(self, *, max_watchers: int) -> None:
        self.closed = False
        self._max_watchers = max_watchers
        self.count = 0
        self._changes: dict[tuple[str, str], JobChange] = {}
        self._woken: deque[asyncio.Future[None]] = deque()
        self._is_anyone_woken = asyncio.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count one more waiting request. Raises `TooManyWatchersError`."""
        self.require_capacity()
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1

    def require_capacity(self) -> None:
        """Check that one more request may wait. Raises `TooManyWatchersError`."""
        if self.count >= self._max_watchers:
            raise TooManyWatchersError(self._max_watchers)

    def next_change(self, channel: str, job: str) -> JobChange:
        """The next change of a job on a channel."""
        return self._changes.setdefault((channel, job), JobChange())

    async def wait(self, change: JobChange, timeout_s: float | None = None) -> None:
        """Wait for the change, at most `timeout_s`."""
        if self.closed or change.is_set:
            return
        turn = asyncio.get_running_loop().create_future()
        change.waiting.add(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except TimeoutError:
            pass
        finally:
            change.waiting.discard(turn)

    def notify(self, channel: str, job: str) -> None:
        """Announce a change; who waits for it is woken in turn by `wake`."""
        change = self._changes.pop((channel, job), None)
        if change is not None:
            change.is_set = True
            self._woken.extend(change.waiting)
            self._is_anyone_woken.set()

    def close(self) -> None:
        """Wake all requests at once for the last time: the sidecar stops."""
        self.closed = True
        self._notify_all()
        while self._woken:
            self._wake_next()

    def _notify_all(self) -> None:
        for channel, job in list(self._changes):
            self.notify(channel, job)

    def _wake_next(self) -> None:
        turn = self._woken.popleft()
        if not turn.done():
            turn.set_result(None)

    async def wake(self) -> None:
        """Wake watchers in turn; runs until cancelled.

        Thousands that wake at once would hold up every other request. So a few are woken at a time,
        and the next few when the event loop has caught up with these and with other requests.
        """
        while True:
            await self._is_anyone_woken.wait()
            for _ in range(min(_WOKEN_TOGETHER, len(self._woken))):
                self._wake_next()
            if not self._woken:
                self._is_anyone_woken.clear()
            await _idle()

    async def listen(self, client: Any) -> None:
        """Notify of every message on the channels; runs until cancelled."""
        while True:
            try:
                async with client.pubsub() as subscription:
                    await subscription.subscribe(NEWS, PLANS)
                    await self._follow(subscription)
            except (redis.RedisError, OSError):
                await asyncio.sleep(0.2)

    async def _follow(self, subscription: Any) -> None:
        rechecked_s = float("-inf")  # changes may have been missed before
        while True:
            if time.monotonic() - rechecked_s > self.RECHECK_S:
                self._notify_all()
                rechecked_s = time.monotonic()
            message = await subscription.get_message(ignore_subscribe_messages=True, timeout=1.0)
            if message is not None:
                self.notify(message["channel"].decode(), message["data"].decode())


async def _idle() -> None:
    """Return once the event loop has little to do, after `_LONGEST_TURN_S` in any case."""
    begun_s = turn_s = time.monotonic()
    while turn_s - begun_s < _LONGEST_TURN_S:
        await asyncio.sleep(_SHORT_TURN_S)
        last_s, turn_s = turn_s, time.monotonic()
        if turn_s - last_s < 2 * _SHORT_TURN_S:
            return
