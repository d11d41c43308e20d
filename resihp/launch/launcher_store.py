"""Documents of the launchers in the store of the job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from resihp.contracts import from_json, to_json

from .attempts import Attempt, AttemptEnd, JobEnd, JobIdentity, NodeOffer
from .restart_policy import Failure

T = TypeVar("T")
_JOB = "job"
_NEWEST = "attempt"
_LAUNCHERS = "launchers"
_COORDINATOR = "coordinator"
_FAILURES = "failures"


class LauncherStore:
    """Typed access to one connection; every request but `job` is answered at once.

    Keeps what it has written and read, for a store that loses its data. Raises
    `torch.distributed.DistError` if the store is gone.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._kept: dict[str, str] = {}
        self._offers: dict[str, None] = {}  # lines, by arrival

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait for the store no longer than this from now on."""
        self._store.set_timeout(timeout)

    def restore(self, coordinator: str) -> None:
        """Write what is kept to a store that has lost its data, where another launcher has not.

        coordinator  the last one that was known; "" for none. Where there is a third one the data
                     is that of a later run, which is left alone
        """
        if coordinator and not self.coordinate(coordinator):
            return
        for line in list(self._offers):
            self._append_offer(line)
        for key, value in list(self._kept.items()):
            self._store.compare_set(key, "", value)

    def identify(self, job: JobIdentity) -> JobIdentity:
        """Write whose store this is, unless that is written; returns what is."""
        return _identity(self._set_first(_JOB, json.dumps(to_json(job))))

    def job(self) -> JobIdentity:
        """Return whose store this is. Waits for its host, within the connection's time-out."""
        return _identity(self._store.get(_JOB).decode())

    def coordinator(self) -> str:
        """Launcher that decides about attempts; "" before there is one."""
        return self._get(_COORDINATOR) or ""

    def coordinate(self, launcher: str, after: str = "") -> bool:
        """Let a launcher decide `after` another one; False if a third one does."""
        return self._store.compare_set(_COORDINATOR, after, launcher).decode() == launcher

    def keep_failures(self, failures: Sequence[Failure]) -> None:
        """Keep the failures of the job for a coordinator to come."""
        self._set(_FAILURES, json.dumps([to_json(failure) for failure in failures]))

    def failures(self) -> list[Failure]:
        """Failures of the job, by attempt."""
        found = json.loads(self._get(_FAILURES) or "[]")
        return [from_json(Failure, failure) for failure in found]

    def announce(self, offer: NodeOffer) -> None:
        """Add a launcher to the job."""
        line = json.dumps(to_json(offer))
        self._offers[line] = None
        self._append_offer(line)

    def announced(self) -> list[NodeOffer]:
        """Offers of all launchers that have come, by arrival."""
        found = (self._get(_LAUNCHERS) or "").splitlines()  # one may be twice
        self._offers = dict.fromkeys(found) | self._offers
        return [from_json(NodeOffer, json.loads(line)) for line in list(self._offers)]

    def publish(self, number: int, what: Attempt | JobEnd) -> bool:
        """Publish attempt `number`, or the end of the job in its place; False if another launcher
        has published one."""
        kind = "attempt" if isinstance(what, Attempt) else "end"
        text = json.dumps({kind: to_json(what)})
        is_first = self._set_first(f"attempt/{number}", text) == text
        self._set(_NEWEST, str(number))
        return is_first

    def newest(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        return int(self._get(_NEWEST) or 0)

    def attempt(self, number: int) -> Attempt | JobEnd | None:
        """Attempt `number`, or the end of the job; None before it is published."""
        document = self._read(f"attempt/{number}")
        if document is None:
            return None
        if "attempt" in document:
            return from_json(Attempt, document["attempt"])
        return from_json(JobEnd, document["end"])

    def failed_status(self) -> int | None:
        """Status with which the job has ended; None if it runs, or has completed."""
        end = self.attempt(self.newest())
        return end.status if isinstance(end, JobEnd) and end.status != 0 else None

    def all_left(self) -> bool:
        """True if no launcher that has come is there any more, as far as they have been marked."""
        ids = [offer.id for offer in self.announced()]
        return all(any(self.is_marked(each, mark) for mark in ("left", "lost")) for each in ids)

    def forget_failed(self) -> bool:
        """Delete all that a replicated store has of a failed job; True if this call did."""
        key = f"attempt/{self.newest()}"
        if self.failed_status() is None:
            return False
        return bool(self._store.forget(key, self._store.get(key)))  # type: ignore[attr-defined]

    def end(self, number: int, end: AttemptEnd) -> None:
        """End an attempt, unless it has been ended for another reason."""
        self._set_first(f"end/{number}", json.dumps(to_json(end)))

    def end_of(self, number: int) -> AttemptEnd | None:
        """Reason to end an attempt; None as long as there is none."""
        document = self._read(f"end/{number}")
        return None if document is None else from_json(AttemptEnd, document)

    def report(self, number: int, offer: NodeOffer) -> None:
        """Report that a launcher's ranks of an attempt have ended."""
        self._set(f"ended/{number}/{offer.id}", json.dumps(to_json(offer)))

    def reported(self, number: int, launcher: str) -> NodeOffer | None:
        """Report of a launcher on an attempt; None before it."""
        document = self._read(f"ended/{number}/{launcher}")
        return None if document is None else from_json(NodeOffer, document)

    def note_read(self, number: int, count: int = 1) -> int:
        """Count one more launcher that has read attempt `number`; returns how many have."""
        return int(self._store.add(f"read/{number}", count))

    def beat(self, launcher: str, count: int = 1) -> int:
        """Count a heartbeat of a launcher; returns how many there have been."""
        return int(self._store.add(f"heartbeat/{launcher}", count))

    def mark(self, launcher: str, what: str) -> None:
        """Mark a launcher as `left` by itself, or as `lost` by the coordinator."""
        self._set(f"{what}/{launcher}", "1")

    def is_marked(self, launcher: str, what: str) -> bool:
        """True if a launcher is marked so."""
        return bool(self._store.check([f"{what}/{launcher}"]))

    def _read(self, key: str) -> dict[str, Any] | None:
        text = self._get(key)
        if text is None:
            return None
        self._kept[key] = text
        document: dict[str, Any] = json.loads(text)
        return document

    def _get(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except dist.DistStoreError:  # lost since the check
            return None

    def _set(self, key: str, value: str) -> None:
        self._kept[key] = value
        self._store.set(key, value)

    def _set_first(self, key: str, value: str) -> str:
        """Set a key that has no value; returns the value that it has."""
        found = self._kept[key] = self._store.compare_set(key, "", value).decode()
        return found

    def _append_offer(self, line: str) -> None:
        self._store.append(_LAUNCHERS, line + "\n")  # type: ignore[attr-defined]


def _identity(text: str) -> JobIdentity:
    return from_json(JobIdentity, json.loads(text), skip_unknown=True)
