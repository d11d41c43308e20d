"""Making a job known to the sidecar."""

from __future__ import annotations

from typing import Protocol

from resihp.contracts import Job


class Registry(Protocol):
    """Where jobs are made known; `resihp.Client` is one. Raises `ServiceError`."""

    def register(self, job: Job) -> None:
        """Make a job known, or replace what is known of it."""
        ...


class Registration:
    """What one rank does so that the sidecar knows its job; nothing where only a name is given.

    The first rank of the layout registers before its first message, so that a job that was started
    again in another layout begins afresh. The others leave it to that rank, so that thousands of
    them do not all do it, and register when they hear a second time running that the job is not
    known: then that rank is late, or the sidecar has lost what it knew.
    """

    def __init__(self, job: str | Job, rank: int) -> None:
        self.name = job.name if isinstance(job, Job) else job
        self._job = job if isinstance(job, Job) else None
        self._is_first = self._job is not None and rank == min(self._job.layout.ranks)
        self.reset()

    def reset(self) -> None:
        """Be as new: the state of a forked child."""
        self._is_due, self._was_unknown = self._is_first, False

    @property
    def is_possible(self) -> bool:
        """Whether more than the job's name is given."""
        return self._job is not None

    def make_known(self, registry: Registry) -> None:
        """Register where that is due; called before each message."""
        if self._is_due and self._job is not None:
            registry.register(self._job)
            self._is_due = False

    def known(self) -> None:
        """A message was taken."""
        self._was_unknown = False

    def unknown(self) -> bool:
        """The sidecar does not know the job; whether this rank registers it now."""
        self._is_due, self._was_unknown = self._is_first or self._was_unknown, True
        return self._is_due
