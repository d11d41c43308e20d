"""Lag of the jobs behind their senders, and the interval that senders are asked to keep."""

from __future__ import annotations

import time

from ..store.http_store import HttpStore

_REMEMBER_S = 1.0
_LONGEST_INTERVAL_S = 30.0


class JobLags:
    """Lags of jobs in seconds, each measured at most once a second whatever the requests."""

    def __init__(self, store: HttpStore) -> None:
        self._store = store
        self._since_s = float("-inf")
        self._lags_s = dict[str, float]()

    async def of(self, *jobs: str) -> list[float]:
        """The lag of each of these jobs: the age of its oldest message that no worker has read."""
        now_s = time.monotonic()
        if now_s - self._since_s > _REMEMBER_S:
            self._since_s, self._lags_s = now_s, {}
        known = self._lags_s
        if missing := [job for job in jobs if job not in known]:
            known |= zip(missing, await self._store.lags_s(missing), strict=True)
        return [known[job] for job in jobs]


def sending_interval_s(lag_s: float, slow_down_lag_s: float) -> float | None:
    """Seconds that a sender should leave between two messages; None without lag.

    From the lag `slow_down_lag_s` on it grows with the lag, from 1 s to 30 s.
    """
    if lag_s < slow_down_lag_s:
        return None
    return min(lag_s / slow_down_lag_s, _LONGEST_INTERVAL_S)
