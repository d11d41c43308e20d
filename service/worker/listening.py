"""Clock of a job's heartbeats, which counts only time in which the service listened.

What ranks sent until `delay_s` ago is applied; later requests may wait in sockets, in the API or in
Redis. So silences are measured up to that time, and a heartbeat counts from the time at which it is
applied, which is not before it was sent. Of a rank that sends again at most I after it sent, or was
answered, no silence longer than I is seen, however the delay changes. While the delay exceeds the
patience of the senders, their requests fail instead of waiting, and time does not count at all.
Nor does the clock catch up when a delay ends, for requests may have failed as well.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE_S = 5.0
"""Delay from which on requests are lost: hooks wait no longer for an answer."""
_HOLD_S = 10.0


@dataclass
class ListeningClock:
    """Times in seconds; plain values, which are saved and restored.

    latest_s      time at which messages are applied now
    delay_s       largest delay of the last 10 s, so that one that only varies costs little time
    next_delay_s  largest delay since that one
    held_s        time since that one
    """

    latest_s: float = 0.0
    delay_s: float = 0.0
    next_delay_s: float = 0.0
    held_s: float = 0.0

    @property
    def heard_s(self) -> float:
        """Time up to which all that was sent is applied."""
        return self.latest_s - self.delay_s

    def advance(self, elapsed_s: float, delay_s: float) -> None:
        """Let time pass, at the end of which the delay is `delay_s`; infinite: nothing listens.

        >>> clock = ListeningClock()
        >>> for delay_s in (0.0, 1.0, 2.0, 2.0, 1.0):
        ...     clock.advance(1.0, delay_s)
        >>> clock.heard_s, clock.latest_s
        (3.0, 5.0)
        """
        before_s = self.delay_s
        self._measure(elapsed_s, min(delay_s, PATIENCE_S))
        if self.delay_s < PATIENCE_S:
            self.latest_s += elapsed_s
        self.latest_s -= max(0.0, before_s - self.delay_s)

    def _measure(self, elapsed_s: float, delay_s: float) -> None:
        self.held_s += elapsed_s
        self.next_delay_s = max(self.next_delay_s, delay_s)
        if delay_s >= self.delay_s or self.held_s > _HOLD_S:
            self.delay_s, self.next_delay_s, self.held_s = self.next_delay_s, 0.0, 0.0
