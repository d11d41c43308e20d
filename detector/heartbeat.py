"""Who is alive: an adaptive time-out on heartbeats.

Phi-accrual (Hayashibara et al., "The phi accrual failure detector", SRDS 2004): how unlikely the
present silence is, given how regular the beats have been, with two additions. A silence that most
ranks share is the network or the service, not death, and is not held against anyone. And no rank
dies sooner than `floor_s`, however regular it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from .base.arrays import State


class Heartbeats:
    """Arrival times of heartbeats. Times are seconds of any one monotonic clock.

    phi        suspicion from which a rank counts as dead; 10 is one error in 1e10 intervals
    floor_s    shortest silence that may be death
    fade       weight of a new interval in the running mean and deviation
    """

    def __init__(self, *, phi: float = 10.0, floor_s: float = 5.0, fade: float = 0.1) -> None:
        self.phi, self.floor_s, self.fade = phi, floor_s, fade
        self._last: dict[int, float] = {}
        self._mean: dict[int, float] = {}
        self._deviation: dict[int, float] = {}

    def beat(self, ranks: Iterable[int], now: float) -> None:
        """Ranks were alive at `now`; an earlier time than the last one is ignored."""
        for rank in ranks:
            last = self._last.get(rank)
            if last is None:
                self._last[rank] = now
            elif now > last:
                self._learn(rank, now - last)
                self._last[rank] = now

    def _learn(self, rank: int, interval: float) -> None:
        mean = self._mean.get(rank, interval)
        self._mean[rank] = mean + self.fade * (interval - mean)
        deviation = self._deviation.get(rank, interval / 2)
        self._deviation[rank] = deviation + self.fade * (abs(interval - mean) - deviation)

    def suspicion(self, rank: int, now: float) -> float:
        """Phi of a rank: minus log10 of the chance of so long a silence from a live one."""
        if rank not in self._last or rank not in self._mean:
            return 0.0
        silence = now - self._last[rank]
        mean = self._mean[rank]
        deviation = max(1.25 * self._deviation[rank], 0.25 * mean, 1e-3)
        late = (silence - mean) / deviation
        if late <= 0:
            return 0.0
        # Student with 4 degrees of freedom: networks have heavier tails than the normal curve.
        return 2.5 * math.log10(1.0 + late * late / 4.0) + 0.3

    def dead(self, now: float) -> list[int]:
        """Ranks whose silence is death, not a slow network."""
        silent = [rank for rank, last in self._last.items() if now - last > self.floor_s]
        if len(self._last) > 2 and 2 * len(silent) > len(self._last):
            return []
        return sorted(rank for rank in silent if self.suspicion(rank, now) >= self.phi)

    def forget(self, ranks: Iterable[int]) -> None:
        """Stops waiting for ranks that are gone."""
        for rank in ranks:
            for table in (self._last, self._mean, self._deviation):
                table.pop(rank, None)

    def state(self) -> State:
        """What `load` needs."""
        return {
            "ranks": list(self._last),
            "last": list(self._last.values()),
            "mean": [self._mean.get(rank) for rank in self._last],
            "deviation": [self._deviation.get(rank) for rank in self._last],
        }

    def load(self, state: State) -> None:
        """Takes up what `state` returned."""
        ranks = state["ranks"]
        self._last = dict(zip(ranks, state["last"], strict=True))
        for table, name in ((self._mean, "mean"), (self._deviation, "deviation")):
            table.clear()
            pairs = zip(ranks, state[name], strict=True)
            table.update({rank: value for rank, value in pairs if value is not None})
