"""Time between messages, and before repetitions, by the sidecar's answers."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from resihp.contracts import ServiceError

UNKNOWN_JOB = 404
_RETRY_STATUSES = (408, 425, 429)
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 5.0
_LONGEST_INTERVAL_S = 30.0
_HEARTBEATS_PER_S, _MESSAGES_PER_S = 1_000, 400
"""Most of a whole job, whose ranks send less often if they are many."""
_USUAL_INTERVAL_S, _USUAL_MESSAGES_PER_S = (0.5, 1.0), 8
"""A message costs the sidecar more than its records: the senders of a job leave up to a second
between theirs where all together would send more of them."""


def heartbeat_interval_s(interval_s: float, ranks: int) -> float:
    """Seconds between two heartbeats of a rank: `interval_s`, and more in jobs of many ranks.

    >>> heartbeat_interval_s(1.0, 64), heartbeat_interval_s(1.0, 10_000)
    (1.0, 10.0)
    """
    return max(interval_s, ranks / _HEARTBEATS_PER_S) if interval_s > 0 else interval_s


def message_interval_s(interval_s: float | None, ranks: int, ranks_per_sender: int) -> float:
    """Seconds between two messages of records of one sender: `interval_s`, by default 0.5 to 1 s by
    the number of senders, and more in jobs of many of them, up to 30 s.

    >>> [message_interval_s(None, ranks, 8) for ranks in (32, 64, 1_024, 16_384)]
    [0.5, 1.0, 1.0, 5.12]
    >>> message_interval_s(0.1, 64, 8)
    0.1
    """
    senders = ranks / ranks_per_sender
    if interval_s is None:
        shortest_s, longest_s = _USUAL_INTERVAL_S
        interval_s = min(max(senders / _USUAL_MESSAGES_PER_S, shortest_s), longest_s)
    return max(interval_s, min(senders / _MESSAGES_PER_S, _LONGEST_INTERVAL_S))


def is_temporary(error: ServiceError) -> bool:
    """Return whether a message may be accepted later: the sidecar is away or overloaded."""
    status = error.status
    return status is None or status >= 500 or status in _RETRY_STATUSES


class MessagePace:
    """Interval between the messages of one sender: `base_s`, longer while the sidecar asks for it.

    An answer with `interval_s`, or a refusal with `Retry-After`, lengthens the interval to that
    time, 30 s at most; each answer without it halves the interval again, down to `base_s`.
    Repetitions follow after 0.1 s doubling up to 5 s, less a random part of at most half, and not
    before `Retry-After` has passed.
    """

    def __init__(self, base_s: float, seed: int) -> None:
        self.base_s = self.interval_s = base_s
        self._random = random.Random(seed)
        self._delay_s = _FIRST_DELAY_S

    def accepted(self, answer: object) -> None:
        """Follow the answer to a message that was accepted."""
        self._delay_s = _FIRST_DELAY_S
        asked_s = answer.get("interval_s") if isinstance(answer, Mapping) else None
        if isinstance(asked_s, int | float) and -math.inf < asked_s < math.inf:
            self.interval_s = self._bounded(asked_s)
        else:
            self.interval_s = self._bounded(self.interval_s / 2)

    def refused(self, error: ServiceError) -> float:
        """Follow a temporary refusal; return the seconds to wait before the repetition."""
        delay_s = self._delay_s * self._random.uniform(0.5, 1.0)
        self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)
        if error.retry_after_s is None:
            return delay_s
        self.interval_s = self._bounded(max(self.interval_s, error.retry_after_s))
        asked_s = min(error.retry_after_s, _LONGEST_INTERVAL_S)
        return max(delay_s, asked_s * self._random.uniform(1.0, 1.25))

    def _bounded(self, interval_s: float) -> float:
        return max(self.base_s, min(interval_s, _LONGEST_INTERVAL_S))
