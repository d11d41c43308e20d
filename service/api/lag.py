"""Lag of the jobs behind their senders, and the interval that senders are asked to keep."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection
from pathlib import Path

import redis

from ..settings import Settings
from ..store.http_store import HttpStore
from .delay import REPORT_EVERY_S

_REMEMBER_S = 1.0
_ASKED_S = 60.0  # twice the longest interval between two messages of a sender
_SHORTEST_INTERVAL_S, _LONGEST_INTERVAL_S = 0.5, 30.0  # the former by default, unasked
_SLOW_DOWN_DELAY_S = 1.0  # senders wait for an answer for a few seconds only
_SCHEDULER = Path("/proc/thread-self/schedstat")


class JobLags:
    """Lags of jobs and delay of the API in seconds, each measured at most once a second whatever
    the requests, those of all jobs that were asked for in the last minute together.

    The lag of a job is the age of its oldest message that no worker has read, and the delay of the
    API that of the oldest request that may not have been stored, by the worst API process.
    """

    def __init__(self, store: HttpStore, settings: Settings) -> None:
        self._store, self._slow_down_lag_s = store, settings.slow_down_lag_s
        self._busy = BusyTime(settings.slow_down_busy)
        self._measuring = asyncio.Lock()
        self._since_s = float("-inf")
        self._delay_s = 0.0
        self._lags_s = dict[str, float]()
        self._asked_s = dict[str, float]()  # when each was asked for last
        self._error: redis.RedisError | None = None
        self._failed_s = float("-inf")

    async def of(self, *jobs: str) -> list[float]:
        """The lag of each of these jobs, with the delay before its messages are stored."""
        self._asked_s |= dict.fromkeys(jobs, time.monotonic())  # of all that wait, together
        async with self._measuring:
            now_s = time.monotonic()
            if self._error is not None and now_s - self._failed_s <= _REMEMBER_S:
                raise self._error.with_traceback(None)  # for those that waited for the answer too
            if now_s - self._since_s > _REMEMBER_S:
                recent = {job: s for job, s in self._asked_s.items() if now_s - s <= _ASKED_S}
                self._asked_s, self._lags_s = recent, {}
                await self._measure({*jobs, *recent})
                self._since_s = now_s
            elif not self._lags_s.keys() >= set(jobs):
                await self._measure({*jobs, *self._asked_s} - self._lags_s.keys())
            return [self._lags_s[job] + self._delay_s for job in jobs]

    async def _measure(self, jobs: Collection[str]) -> None:
        names = sorted(jobs)
        try:
            delay_s, lags_s = await self._store.lags_s(names)
        except redis.RedisError as error:
            self._error, self._failed_s = error, time.monotonic()
            raise
        self._error = None
        # A report is so old before the next one without any delay.
        self._delay_s = max(0.0, delay_s - 2 * REPORT_EVERY_S)
        self._lags_s |= zip(names, lags_s, strict=True)

    async def delay_s(self) -> float:
        """The delay of the API."""
        await self.of()
        return self._delay_s

    async def sending_interval_s(self, job: str) -> float | None:
        """Seconds that a sender should leave between two messages; None for as few as it likes.

        Without an answer of Redis by what is known: the message that asks is stored already.
        """
        lag_s = 0.0
        with contextlib.suppress(redis.RedisError):
            (lag_s,) = await self.of(job)
        asked_s = (
            sending_interval_s(lag_s, self._slow_down_lag_s),
            sending_interval_s(self._delay_s, _SLOW_DOWN_DELAY_S),
            self._busy.sending_interval_s,
        )
        return max(filter(None, asked_s), default=None)


def sending_interval_s(lag_s: float, slow_down_lag_s: float) -> float | None:
    """Seconds that a sender should leave between two messages; None without lag.

    From the lag `slow_down_lag_s` on it grows with the lag, from 1 s to 30 s.
    """
    if lag_s < slow_down_lag_s:
        return None
    return min(lag_s / slow_down_lag_s, _LONGEST_INTERVAL_S)


class BusyTime:
    """Share of the time in which this thread, that of the event loop, had work to do, with a core
    or waiting for one, and the interval between the messages of each sender that keeps it within
    bounds: each message has a cost apart from that of its records. So senders are asked for fewer
    before any has to wait."""

    def __init__(self, slow_down_busy: float) -> None:
        self._most_busy = slow_down_busy
        self._since_s, self._busy_s = time.monotonic(), _busy_s()
        self._interval_s: float | None = None

    @property
    def sending_interval_s(self) -> float | None:
        """Seconds that each sender should leave between two messages; None for as few as it likes.
        It changes when all have had the time to follow."""
        now_s = time.monotonic()
        if (elapsed_s := now_s - self._since_s) >= max(_REMEMBER_S, self._interval_s or 0.0):
            busy_s = _busy_s()
            share = max(0.0, busy_s - self._busy_s) / elapsed_s
            self._interval_s = next_interval_s(self._interval_s, share, self._most_busy)
            self._since_s, self._busy_s = now_s, busy_s
        return self._interval_s


def _busy_s() -> float:
    """Seconds for which this thread ran or, where the kernel tells, waited for a core."""
    try:
        waited_ns = int(_SCHEDULER.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        waited_ns = 0
    return time.thread_time() + waited_ns / 1e9


def next_interval_s(interval_s: float | None, busy: float, most_busy: float) -> float | None:
    """The interval to ask senders for, by the one asked for so far and the share of the time that
    their messages took. It grows with that above `most_busy`, doubling at most, and shrinks slowly
    below two thirds of it."""
    if busy > most_busy:
        grown_s = (interval_s or _SHORTEST_INTERVAL_S) * min(2.0, 1.3 * busy / most_busy)
        return min(grown_s, _LONGEST_INTERVAL_S)
    if busy < 2 / 3 * most_busy and interval_s is not None:
        shrunk_s = 0.8 * interval_s
        return shrunk_s if shrunk_s > _SHORTEST_INTERVAL_S else None
    return interval_s
