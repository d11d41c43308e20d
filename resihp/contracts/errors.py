"""Every exception that ResiHP raises on purpose, in one tree."""

from __future__ import annotations


class ResiHPError(Exception):
    """Base of all errors that ResiHP raises on purpose."""


class ContractError(ResiHPError, ValueError):
    """A value that breaks a contract; `field` is the dotted path of what is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field
        self.problem = problem


class InfeasibleError(ResiHPError):
    """No plan satisfies every constraint; `constraint` names the one that binds."""

    def __init__(self, constraint: str, detail: str) -> None:
        super().__init__(f"no feasible plan: {detail}")
        self.constraint = constraint
        self.detail = detail


class TraceError(ResiHPError):
    """A trace file that cannot be read, with the reason in one line."""


class ServiceError(ResiHPError):
    """The sidecar answered with a problem document, or did not answer."""

    def __init__(self, problem: str, *, status: int | None = None) -> None:
        super().__init__(problem)
        self.status = status


class StateLostError(ResiHPError):
    """Training state that no surviving rank and no checkpoint holds; names what was lost."""


class CheckpointError(ResiHPError):
    """A checkpoint that cannot be written, found or read."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint whose bytes are not those that were saved; `shards` names what is bad."""

    def __init__(self, where: str, shards: tuple[str, ...], problem: str) -> None:
        shown = ", ".join(shards[:6]) + (f" and {len(shards) - 6} more" if shards[6:] else "")
        super().__init__(f"{where}: {problem}" + (f": {shown}" if shown else ""))
        self.where = where
        self.shards = shards
        self.problem = problem
