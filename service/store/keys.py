"""Names of the Redis keys. Everything of one job stands under its own prefix."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "resihp"
JOBS = f"{PREFIX}:jobs"
GENERATIONS = f"{PREFIX}:generations"
FENCES = f"{PREFIX}:fences"
WORKERS = f"{PREFIX}:workers"
NEWS = f"{PREFIX}:news"
PREDICTORS = f"{PREFIX}:predictors"
GROUP = "detector"


@dataclass(frozen=True)
class JobKeys:
    """Keys of one job.

    meta       hash: job, generation, plan (version of the newest), registered_at
    messages   stream of telemetry, heartbeats, acks and failures, in order of arrival
    lease      token of the worker that owns the job
    state      hash: detector, session, applied (id of the newest message in it)
    status     hash: verdicts, diagnosis, planning, last_step (JSON, what the API answers)
    plans      hash: version -> plan
    digests    hash: version -> digest of the plan, from version 1 on
    events     capped stream of verdicts, plans, acks, failures
    steps      capped stream of step summaries
    counts     hash of counters
    """

    job: str

    def _of(self, part: str) -> str:
        return f"{PREFIX}:job:{self.job}:{part}"

    @property
    def meta(self) -> str:
        return self._of("meta")

    @property
    def messages(self) -> str:
        return self._of("messages")

    @property
    def lease(self) -> str:
        return self._of("lease")

    @property
    def state(self) -> str:
        return self._of("state")

    @property
    def status(self) -> str:
        return self._of("status")

    @property
    def plans(self) -> str:
        return self._of("plans")

    @property
    def digests(self) -> str:
        return self._of("digests")

    @property
    def events(self) -> str:
        return self._of("events")

    @property
    def steps(self) -> str:
        return self._of("steps")

    @property
    def counts(self) -> str:
        return self._of("counts")

    def seen(self, retry_key: str) -> str:
        """Marks a message as received, so that a retry of it is not applied twice."""
        return self._of(f"seen:{retry_key}")

    def owned(self) -> list[str]:
        """Every key that goes when the job is reset or deleted."""
        return [
            self.meta, self.messages, self.lease, self.state, self.status,
            self.plans, self.digests, self.events, self.steps, self.counts,
        ]  # fmt: skip
