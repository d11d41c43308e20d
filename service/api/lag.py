"""Lag of the jobs behind their senders, and the interval that senders are asked to keep."""

from __future__ import annotations

import time

from ..store.http_store import HttpStore
from .delay import REPORT_EVERY_S

_REMEMBER_S = 1.0
_LONGEST_INTERVAL_S = 30.0
_SLOW_DOWN_DELAY_S = 1.0  # senders wait for an answer for a few seconds only


class JobLags:
    """Lags of jobs and delay of the API in seconds, each measured at most once a second whatever
    the requests.

    The lag of a job is the age of its oldest message that no worker has read, and the delay of the
    API that of the oldest request that may not have been stored, by the worst API process.
    """

    def __init__(self, store: HttpStore, slow_down_lag_s: float) -> None:
        self._store, self._slow_down_lag_s = store, slow_down_lag_s
        self._since_s = float("-inf")
        self._delay_s = 0.0
        self._lags_s = dict[str, float]()

    async def of(self, *jobs: str) -> list[float]:
        """The lag of each of these jobs, with the delay before its messages are stored."""
        now_s = time.monotonic()
        if now_s - self._since_s > _REMEMBER_S:
            self._since_s, self._lags_s = now_s, {}
        known = self._lags_s
        missing = [job for job in jobs if job not in known]
        if missing or not known:
            delay_s, lags_s = await self._store.lags_s(missing)
            # A report is so old before the next one without any delay.
            self._delay_s = max(0.0, delay_s - 2 * REPORT_EVERY_S)
            known |= zip(missing, lags_s, strict=True)
        return [known[job] + self._delay_s for job in jobs]

    async def delay_s(self) -> float:
        """The delay of the API."""
        await self.of()
        return self._delay_s

    async def sending_interval_s(self, job: str) -> float | None:
        """Seconds that a sender should leave between two messages; None without lag."""
        (lag_s,) = await self.of(job)
        asked_s = (
            sending_interval_s(lag_s, self._slow_down_lag_s),
            sending_interval_s(self._delay_s, _SLOW_DOWN_DELAY_S),
        )
        return max(filter(None, asked_s), default=None)


def sending_interval_s(lag_s: float, slow_down_lag_s: float) -> float | None:
    """Seconds that a sender should leave between two messages; None without lag.

    From the lag `slow_down_lag_s` on it grows with the lag, from 1 s to 30 s.
    """
    if lag_s < slow_down_lag_s:
        return None
    return min(lag_s / slow_down_lag_s, _LONGEST_INTERVAL_S)
