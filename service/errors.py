"""What the sidecar refuses, and why."""

from __future__ import annotations

from resihp.contracts import ResiHPError


class StartError(ResiHPError):
    """The sidecar cannot start; the message says what to do."""


class UnknownJobError(ResiHPError):
    """No job of that name is registered."""

    def __init__(self, job: str) -> None:
        super().__init__(f"no job is registered as {job!r}; PUT /v1/jobs/{job} first")


class UnknownPlanError(ResiHPError):
    """The job has no plan of that version."""

    def __init__(self, job: str, version: int) -> None:
        super().__init__(f"job {job!r} has no plan of version {version}")


class PlanMismatchError(ResiHPError):
    """What a rank says is of a plan that has this version, too."""

    def __init__(self, job: str, version: int) -> None:
        super().__init__(
            f"plan {version} of job {job!r} is another one here; PUT the one that the job works by"
        )


class BodyTooLargeError(ResiHPError):
    """A request body above the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes; send smaller batches")


class MediaTypeError(ResiHPError):
    """A body in a format that the route does not take."""

    def __init__(self, given: str, known: tuple[str, ...]) -> None:
        super().__init__(f"content type {given or 'missing'!r}; known are {', '.join(known)}")


class ContentEncodingError(ResiHPError):
    """A body that is compressed."""

    def __init__(self, given: str) -> None:
        super().__init__(f"content encoding {given!r}; send the body as it is")


class TooManyJobsError(ResiHPError):
    """The number of jobs has reached its limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} jobs are registered already; DELETE one that has ended")


class TooManyWatchersError(ResiHPError):
    """The number of long polls and event streams has reached its limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} requests are waiting for events already")


class BacklogFullError(ResiHPError):
    """Messages arrive faster than workers apply them."""

    def __init__(self, job: str) -> None:
        super().__init__(
            f"the backlog of job {job!r} is full; retry later, or start more `resihp worker`s"
        )


class LeaseLostError(ResiHPError):
    """Another worker owns the job now, or the job was reset; in-memory state must be dropped."""
