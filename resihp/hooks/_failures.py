"""The boundary between the hooks and the training loop: trouble of the hooks stays here."""

from __future__ import annotations

import logging

log = logging.getLogger("resihp.hooks")


class Failures:
    """Counts what went wrong in the hooks, and logs the first of each kind only."""

    def __init__(self) -> None:
        self.count = 0
        self._logged: set[str] = set()

    def add(self, what: str, error: Exception) -> None:
        """`what` names the place, e.g. "a record"."""
        self.count += 1
        self.say_once(what, f"{what} failed: {error!r}; training goes on")

    def say_once(self, kind: str, message: str) -> None:
        """Log a warning unless one of its kind was logged before."""
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("%s (logged once)", message)
