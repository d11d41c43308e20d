"""Heartbeats of the launchers of several nodes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from resihp._shutdown import start_thread
from resihp.elastic.rendezvous.liveness import SilenceCounter

from .launcher_store import LauncherStore

_log = logging.getLogger("resihp.launch")
_BEATS = 5  # heartbeats, and looks at those of others, within the time-out


class LauncherHeartbeats:
    """Sends this launcher's heartbeats, and reads those of the others, in a thread.

    A count of its own heartbeats that has not grown tells it that the store has lost its data.

    coordinates   this launcher decides: it reads the heartbeats of all others, which read its own
    silent        launchers that have sent none for the time-out, or have left
    silent_coordinator
                  the one that decides, while it is silent; None: it is there
    is_given_up   the coordinator has taken this launcher for lost
    is_replaced   this launcher coordinates and was silent meanwhile: another one decides
    on_loss       called with the last coordinator known after the store has lost its data
    """

    def __init__(
        self,
        open_store: Callable[[], dist.Store],
        launcher: str,
        timeout: timedelta,
        on_loss: Callable[[str], object],
    ) -> None:
        self.coordinates = False
        self.silent: frozenset[str] = frozenset()
        self.silent_coordinator: str | None = None
        self.is_given_up = self.is_replaced = False
        self._launcher, self._on_loss = launcher, on_loss
        self._interval_s, self._known_coordinator = timeout.total_seconds() / _BEATS, ""
        self._store = LauncherStore(open_store())
        self._counter, self._closed = SilenceCounter[str](), threading.Event()
        self._beats = self._store.beat(launcher)
        thread = threading.Thread(target=self._run, name="resihp-heartbeat", daemon=True)
        start_thread(thread, self._closed.set)

    def close(self) -> None:
        """Stop."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self._restore_if_lost()
                self.is_given_up = self._store.is_marked(self._launcher, "lost")
                coordinator = self._store.coordinator()
                self._known_coordinator = coordinator or self._known_coordinator
                self.is_replaced = self.coordinates and coordinator not in ("", self._launcher)
                if self.coordinates and not self.is_replaced:
                    ids = {offer.id for offer in self._store.announced()} - {self._launcher}
                    gone = {each for each in ids - self.silent if self._has_gone(each)}
                    for each in gone:
                        self._store.mark(each, "lost")
                    self.silent |= gone
                else:
                    is_gone = bool(coordinator) and self._has_gone(coordinator)
                    self.silent_coordinator = coordinator if is_gone else None
            except dist.DistError as error:
                _log.debug("no heartbeat: %s", error)

    def _restore_if_lost(self) -> None:
        before, beats = self._beats, self._store.beat(self._launcher)
        if beats <= before:
            _log.warning("the store has lost its data: this launcher writes again what it knows")
            self._on_loss(self._known_coordinator)
        self._beats = beats

    def _has_gone(self, launcher: str) -> bool:
        beats = self._store.beat(launcher, 0)
        looks = self._counter.look(launcher, beats)
        return self._store.is_marked(launcher, "left") or looks >= _BEATS
