"""Errors of the sidecar, below `ResiHPError`; `service.api.problems` maps them to HTTP statuses."""

from __future__ import annotations

from resihp.contracts import ResiHPError


class StartError(ResiHPError):
    """The sidecar cannot start; the message gives the remedy."""


class NoRedisError(StartError):
    """No Redis answers."""


class UnknownJobError(ResiHPError):
    """No job of that name is registered."""

    def __init__(self, job: str) -> None:
        super().__init__(f"no job is registered as {job!r}; PUT /v1/jobs/{job} first")


class BrokenJobError(ResiHPError):
    """Keys of a job hold something else than they should."""

    def __init__(self, job: str, reason: str) -> None:
        super().__init__(
            f"Redis has data of job {job!r} that cannot be used ({reason}); "
            f"DELETE /v1/jobs/{job} and register it anew"
        )


class UnknownPlanError(ResiHPError):
    """The job has no plan of that version."""

    def __init__(self, job: str, version: int) -> None:
        super().__init__(f"job {job!r} has no plan of version {version}")


class PlanMismatchError(ResiHPError):
    """An acknowledgement of another plan with the same version."""

    def __init__(self, job: str, version: int) -> None:
        super().__init__(
            f"plan {version} of job {job!r} differs from the acknowledged one; PUT the plan in use"
        )


class FirstPlanError(ResiHPError):
    """Another plan under the version 0."""

    def __init__(self, job: str) -> None:
        super().__init__(
            f"plan 0 of job {job!r} is the layout that it was registered with; PUT a plan of the "
            "job's own under a higher version"
        )


class BodyTooLargeError(ResiHPError):
    """A request body exceeds the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes; send smaller batches")


class SlowRequestError(ResiHPError):
    """The body of a request stops arriving."""

    def __init__(self, silent_s: float) -> None:
        super().__init__(f"no byte of the request body came for {silent_s:g} s, or it came slowly")


class MediaTypeError(ResiHPError):
    """The content type is not one of the route's."""

    def __init__(self, given: str, known: tuple[str, ...]) -> None:
        super().__init__(f"content type {given or 'missing'!r}; accepted are {', '.join(known)}")


class ContentEncodingError(ResiHPError):
    """The body is compressed."""

    def __init__(self, given: str) -> None:
        super().__init__(f"content encoding {given!r}; send the body without compression")


class TooManyJobsError(ResiHPError):
    """The number of jobs has reached its limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} jobs are registered already; DELETE one that has ended")


class TooManyWatchersError(ResiHPError):
    """The number of long polls and event streams has reached its limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} requests are waiting for events already")


class BacklogFullError(ResiHPError):
    """Messages arrive faster than the workers apply them."""

    def __init__(self, job: str) -> None:
        super().__init__(
            f"the backlog of job {job!r} is full; retry later, or start more `resihp worker`s"
        )


class LeaseLostError(ResiHPError):
    """Another worker owns the job, or it was reset; the state in memory is void."""
