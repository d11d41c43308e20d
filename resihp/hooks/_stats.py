"""Counts of a monitor: records by outcome, and failures of the hooks themselves."""

from __future__ import annotations

import logging
from dataclasses import dataclass

log = logging.getLogger("resihp.hooks")


@dataclass(frozen=True)
class Stats:
    """Counts of one monitor in one process.

    queued    records that wait to be sent or are being sent
    sent      records accepted by the sidecar, in `batches` messages
    dropped   records lost: full buffer, refused by the sidecar, or failure of a hook
    retries   repetitions by this rank of messages that the sidecar could not accept
    refused   messages refused by the sidecar (status 4xx)
    failures  failures of the hooks
    """

    queued: int
    sent: int
    batches: int
    dropped: int
    retries: int
    refused: int
    failures: int


class FailureLog:
    """Failures of the hooks, which never reach the training loop: counted, logged once a kind."""

    def __init__(self) -> None:
        self.count = 0
        self._logged: set[str] = set()

    def add(self, what: str, error: Exception) -> None:
        """Count a failure of `what`, e.g. "a record"."""
        self.count += 1
        self.warn_once(what, f"{what} failed: {error!r}; training continues")

    def warn_once(self, kind: str, message: str) -> None:
        """Log a warning unless one of this kind was logged before."""
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("%s (logged once)", message)
