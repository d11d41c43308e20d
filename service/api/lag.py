"""Lag of the jobs behind their senders, and the interval that senders are asked to keep."""

from __future__ import annotations

import asyncio
import time

from ..store.http_store import HttpStore
from .delay import REPORT_EVERY_S

_REMEMBER_S = 1.0
_LONGEST_INTERVAL_S = 30.0
_SLOW_DOWN_DELAY_S = 1.0  # senders wait for an answer for a few seconds only
_MOST_BUSY, _LEAST_BUSY = 0.6, 0.4  # share of a core of an API process
_SHORTEST_INTERVAL_S = 0.5  # between messages by default; no shorter one is asked for


class JobLags:
    """Lags of jobs and delay of the API in seconds, each measured at most once a second whatever
    the requests, those of all jobs that were asked for in the last second together.

    The lag of a job is the age of its oldest message that no worker has read, and the delay of the
    API that of the oldest request that may not have been stored, by the worst API process.
    """

    def __init__(self, store: HttpStore, slow_down_lag_s: float) -> None:
        self._store, self._slow_down_lag_s = store, slow_down_lag_s
        self._measuring = asyncio.Lock()
        self._load = ProcessLoad()
        self._since_s = float("-inf")
        self._delay_s = 0.0
        self._lags_s = dict[str, float]()
        self._asked = set[str]()  # since they were measured

    async def of(self, *jobs: str) -> list[float]:
        """The lag of each of these jobs, with the delay before its messages are stored."""
        async with self._measuring:
            self._asked.update(jobs)
            now_s = time.monotonic()
            if now_s - self._since_s > _REMEMBER_S:
                self._lags_s = {}
                await self._measure(sorted(self._asked))
                self._since_s, self._asked = now_s, set(jobs)
            elif missing := set(jobs) - self._lags_s.keys():
                await self._measure(sorted(missing))
            return [self._lags_s[job] + self._delay_s for job in jobs]

    async def _measure(self, jobs: list[str]) -> None:
        delay_s, lags_s = await self._store.lags_s(jobs)
        # A report is so old before the next one without any delay.
        self._delay_s = max(0.0, delay_s - 2 * REPORT_EVERY_S)
        self._lags_s |= zip(jobs, lags_s, strict=True)

    async def delay_s(self) -> float:
        """The delay of the API."""
        await self.of()
        return self._delay_s

    async def sending_interval_s(self, job: str) -> float | None:
        """Seconds that a sender should leave between two messages; None for as few as it likes."""
        (lag_s,) = await self.of(job)
        asked_s = (
            sending_interval_s(lag_s, self._slow_down_lag_s),
            sending_interval_s(self._delay_s, _SLOW_DOWN_DELAY_S),
            self._load.sending_interval_s,
        )
        return max(filter(None, asked_s), default=None)


class ProcessLoad:
    """Share of a core that this process takes, and the interval between messages that keeps it in
    bounds. Messages wait for nothing yet where they are asked to be fewer for its sake; each has a
    cost apart from that of its records."""

    def __init__(self) -> None:
        self._since_s, self._spent_s = time.monotonic(), time.process_time()
        self._interval_s: float | None = None

    @property
    def sending_interval_s(self) -> float | None:
        """Seconds that each sender should leave between two messages; None while it has time."""
        now_s, spent_s = time.monotonic(), time.process_time()
        if (elapsed_s := now_s - self._since_s) >= _REMEMBER_S:
            share = (spent_s - self._spent_s) / elapsed_s
            self._interval_s = next_interval_s(self._interval_s, share)
            self._since_s, self._spent_s = now_s, spent_s
        return self._interval_s


def next_interval_s(interval_s: float | None, share: float) -> float | None:
    """The interval to ask senders for, by the one asked for so far and the share of a core that
    their messages took. It grows with the share, doubling at most; shrinks slowly, as not all
    follow at once; and stays while the share is within bounds."""
    if share > _MOST_BUSY:
        grown_s = (interval_s or _SHORTEST_INTERVAL_S) * min(2.0, 2.0 * share)
        return min(grown_s, _LONGEST_INTERVAL_S)
    if share < _LEAST_BUSY and interval_s is not None:
        shrunk_s = 0.9 * interval_s
        return shrunk_s if shrunk_s > _SHORTEST_INTERVAL_S else None
    return interval_s


def sending_interval_s(lag_s: float, slow_down_lag_s: float) -> float | None:
    """Seconds that a sender should leave between two messages; None without lag.

    From the lag `slow_down_lag_s` on it grows with the lag, from 1 s to 30 s.
    """
    if lag_s < slow_down_lag_s:
        return None
    return min(lag_s / slow_down_lag_s, _LONGEST_INTERVAL_S)
