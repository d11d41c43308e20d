"""Registration of the job at the sidecar by its ranks."""

from __future__ import annotations

import os
from time import monotonic
from typing import Protocol

from resihp.contracts import Job

from ._stats import FailureLog

_PATIENCE_S = 30.0
"""A job that is still not registered after this time is worth a warning."""


class Registry(Protocol):
    """Registry of jobs; `resihp.Client` is one. Raises `ServiceError`."""

    def register(self, job: Job) -> None:
        """Register a job, or replace its description."""
        ...


class DeferredJob(Protocol):
    """A job that can be described only after it has run for a while."""

    @property
    def name(self) -> str:
        """Name of the job."""
        ...

    def describe(self, *, now: bool) -> Job | None:
        """Return the job on the rank that registers it; None while it is not known yet, but with
        `now` the best guess. None on all other ranks."""
        ...

    def is_described(self) -> bool:
        """Return whether the other ranks may send: the job is known, or overdue."""
        ...


class Registration:
    """One rank's part in the registration of its job; none where only the name is given.

    Nothing is sent before a deferred job is known, and one rank alone registers it.

    The first rank of the layout registers before its first message, so that a job that was
    restarted in another layout begins anew. The others leave it to that rank, so that thousands of
    ranks do not all register, and do it themselves when two messages in a row find the job unknown:
    then that rank is late, or the sidecar has lost the job.
    """

    def __init__(self, job: str | Job | DeferredJob, rank: int, failures: FailureLog) -> None:
        self.name = job if isinstance(job, str) else job.name
        self._job = job if isinstance(job, Job) else None
        self._deferred = None if isinstance(job, str | Job) else job
        self._rank, self._failures = rank, failures
        self._warn_of_a_rank_outside()
        self.reset()

    def reset(self) -> None:
        """Return to the initial state, as in a forked child."""
        self._is_due, self._unknown_since_s = self._is_first(), float("inf")

    def is_ready(self, *, now: bool) -> bool:
        """Return whether messages may be sent; with `now` they must be."""
        if self._job is None and self._deferred is not None:
            self._job = self._deferred.describe(now=now)
            self._is_due = self._is_first()
        if now or self._deferred is None or self._job is not None:
            return True
        return self._deferred.is_described()

    def register_if_due(self, registry: Registry) -> None:
        """Register if it is this rank's turn; called before each message."""
        if self._is_due and self._job is not None:
            registry.register(self._job)
            self._is_due = False

    def known(self) -> None:
        """Note that the sidecar knows the job."""
        self._unknown_since_s = float("inf")

    def unknown(self) -> None:
        """Note that the sidecar does not know the job (yet): its messages are to be repeated."""
        now_s = monotonic()
        self._is_due = self._is_first() or self._unknown_since_s < float("inf")
        self._unknown_since_s = min(self._unknown_since_s, now_s)
        if now_s - self._unknown_since_s >= _PATIENCE_S:
            self._warn()

    def closed(self) -> None:
        """Note that nothing more is sent."""
        if self._unknown_since_s < float("inf"):
            self._warn()

    def _warn(self) -> None:
        given = self._job or self._deferred
        hint = "" if given else "; register it with Client.register, or use Monitor(job=Job(…))"
        self._failures.warn_once(
            "unregistered", f"the sidecar has no job named {self.name!r}: telemetry waits{hint}"
        )

    def _warn_of_a_rank_outside(self) -> None:
        """Warn where the job has no place for this rank, unless it is to get one: as a joiner."""
        if self._job is None or os.environ.get("RESIHP_JOIN") == "1":
            return
        ranks = self._job.layout.ranks
        if self._rank not in ranks:
            self._failures.warn_once(
                "rank",
                f"rank {self._rank} has no place in the layout of job {self.name!r}, whose ranks "
                f"are {min(ranks)} to {max(ranks)}: there is no verdict on it unless a plan gives "
                "it one",
            )

    def _is_first(self) -> bool:
        return self._job is not None and self._rank == min(self._job.layout.ranks)
