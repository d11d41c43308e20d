"""A job that a worker owns: when its state is to be saved, and what of it has been shown."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from detector.persistence import ARRAY
from resihp.contracts import Status

from ..store.documents import Commit, PendingChanges
from ..store.worker_store import Lease
from .session import JobSession

_TICK_S = 0.25  # between two checks of a job that do not depend on its messages
_LONGEST_TICK_S = 1.0  # a longer pause of the worker does not count against the ranks
# Limit of the growth of the append-only file; a state that is not saved can be replayed.
_SAVE_BYTES_PER_S = 4e6
SHOW_EVERY_S = 1.0
"""Time between two updates of what is shown of a job, and events that can wait."""
_CALM_SHARE, _CALM_S = 0.5, 30.0
"""Of a job whose verdicts and layout have not changed for a time a diagnosis may have this share of
its age, up to so many seconds."""
_CHANGES = frozenset({"verdict", "link", "plan_applied"})
_URGENT = frozenset({"plan", "planning", "plan_applied"})
_URGENT_VERDICTS = frozenset({Status.FAIL_SLOW.value, Status.FAIL_STOP.value})


@dataclass
class OwnedJob:
    """A job whose lease this worker holds; times are those of the monotonic clock.

    read_s       when its new messages were asked for last
    saved        names of the parts of its saved state
    saved_bytes  size of those that the last commit wrote
    changed_s    when verdicts or the layout changed last
    """

    lease: Lease
    session: JobSession
    saved: frozenset[str] = frozenset()
    read_s: float = float("-inf")
    committed_s: float = field(default_factory=time.monotonic)
    save_cost_s: float = 0.0
    saved_bytes: int = 0
    published_s: float = float("-inf")
    published: dict[str, Any] = field(default_factory=dict)
    ticked_s: float = field(default_factory=time.monotonic)
    diagnosed_s: float = field(default_factory=time.monotonic)
    diagnosed_step: int = -1
    changed_s: float = field(default_factory=time.monotonic)

    def diagnosis_is_due(self, every_s: float, *, commit_every_s: float) -> bool:
        """True if the last diagnosis is old and there are newer steps. The state is saved with it,
        whenever that was done last: else one that changes all the time would have none."""
        now_s = time.monotonic()
        calm_s = min(_CALM_SHARE * (now_s - self.changed_s), _CALM_S)
        least_s = max(every_s, calm_s, self._least_s(commit_every_s))
        has_steps = self.session.last_step > self.diagnosed_step
        return has_steps and now_s - self.diagnosed_s > least_s

    def is_urgent(self) -> bool:
        """True if there are changes that jobs act on."""
        changes = self.session.changes
        return bool(changes.plans) or any(_is_urgent(*event) for event in changes.events)

    def commit_is_due(self, every_s: float) -> bool:
        """True if there are changes and the saved state is old; with events it is so sooner."""
        if self.session.changes.events:
            return self._is_old(min(every_s, SHOW_EVERY_S))
        return bool(self.session.changes.applied) and self._is_old(every_s)

    def _is_old(self, every_s: float) -> bool:
        return time.monotonic() - self.committed_s >= self._least_s(every_s)

    def _least_s(self, every_s: float) -> float:
        return max(every_s, self.saved_bytes / _SAVE_BYTES_PER_S)

    def tick(self, *, drained: bool, delay_s: float) -> None:
        """Advance the session's clock if all its messages are applied: what ranks sent until
        `delay_s` ago."""
        now_s = time.monotonic()
        elapsed_s = now_s - self.ticked_s
        if elapsed_s < _TICK_S:
            return
        self.ticked_s = now_s
        if drained:
            self.session.tick(min(elapsed_s, _LONGEST_TICK_S), delay_s)

    def changed_status(self) -> dict[str, Any]:
        """The status documents that differ from those returned before."""
        status = self.session.status()
        known = self.published
        changed = {k: v for k, v in status.items() if k not in known or known[k] != v}
        self.published = status
        return changed

    def diagnose(self) -> dict[str, Any] | None:
        """The diagnosis as of the last message; None before there is enough data."""
        diagnosis = self.session.diagnosis()
        self.diagnosed_s, self.diagnosed_step = time.monotonic(), self.session.last_step
        return diagnosis

    def commit(self) -> Commit:
        """The pending changes with the state after them; the session starts a new collection.

        Arrays of the state that are saved already are not written again.
        """
        changes, self.session.changes = self.session.changes, PendingChanges()
        if any(kind in _CHANGES for kind, _ in changes.events):
            self.changed_s = time.monotonic()
        state = self.session.save()
        known = {name for name in self.saved if name.startswith(ARRAY)}
        written = {name: part for name, part in state.items() if name not in known}
        self.saved, self.saved_bytes = frozenset(state), sum(map(len, written.values()))
        newest = self.session.planning.newest.version
        status = self.changed_status()
        return Commit(changes, written, status, newest=newest, dropped=known - state.keys())


def _is_urgent(kind: str, document: dict[str, Any]) -> bool:
    """True for events that jobs act on. Of many ranks some are under suspicion in every step."""
    if kind == "verdict":
        return document["verdict"]["status"] in _URGENT_VERDICTS
    return kind in _URGENT
