"""The exceptions that users of ResiHP may catch, in one tree below `ResiHPError`.

The HTTP problems of the sidecar (`service.errors`) derive from `ResiHPError` too; a client sees
each of them as a `ServiceError` with its status.
"""

from __future__ import annotations


class ResiHPError(Exception):
    """Base of all errors that ResiHP raises on purpose."""


_MOST_WORDS = 500  # of a name or value that the sender chose


class ContractError(ResiHPError, ValueError):
    """A value that breaks a contract; `field` is the dotted path of the invalid value."""

    def __init__(self, field: str, problem: str) -> None:
        field, problem = field[:_MOST_WORDS], problem[:_MOST_WORDS]
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field
        self.problem = problem


class InfeasibleError(ResiHPError):
    """No plan satisfies all constraints; `constraint` names the binding one."""

    def __init__(self, constraint: str, detail: str) -> None:
        super().__init__(f"no feasible plan: {detail}")
        self.constraint = constraint
        self.detail = detail


class TraceError(ResiHPError):
    """A trace file that cannot be read; the message gives the reason in one line."""


class ServiceError(ResiHPError):
    """The sidecar answered with an error, or not at all.

    status         HTTP status; None where no valid answer came
    retry_after_s  time after which the sidecar wants a repetition; None where it does not say
    """

    def __init__(
        self, problem: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(problem)
        self.status = status
        self.retry_after_s = retry_after_s


class JobStoppedError(ResiHPError):
    """The job cannot go on; the message gives the reason."""


class FencedOutError(ResiHPError):
    """The other ranks went on without this rank, which must not act for the job any more."""


class PreemptedError(ResiHPError):
    """A rank that ends before its node is taken away: there is no time for a hand-over."""


class JoinRefusedError(ResiHPError):
    """A process that cannot join the job: its model, arguments or settings are others."""


class PeerLostError(ResiHPError, RuntimeError):
    """A peer was lost or the process groups were aborted; a new layout is needed."""


class MiscountError(ResiHPError):
    """A microbatch is not exactly once in the gradient sum: a defect; the step must be dropped."""


class StateLostError(ResiHPError):
    """Training state that no surviving rank and no checkpoint holds; the message lists it."""


class CheckpointError(ResiHPError):
    """A checkpoint that cannot be written, found or read."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint whose bytes differ from the saved ones; `shards` names the damaged shards."""

    def __init__(self, where: str, shards: tuple[str, ...], problem: str) -> None:
        shown = ", ".join(shards[:6]) + (f" and {len(shards) - 6} more" if shards[6:] else "")
        super().__init__(f"{where}: {problem}" + (f": {shown}" if shown else ""))
        self.where = where
        self.shards = shards
        self.problem = problem
