"""Verdicts on devices, links and groups, and diagnosis of a slow job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ._numbers import make_plain, named, number, whole_number, whole_numbers
from .errors import ContractError


class Status(StrEnum):
    """State of a device."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    FAIL_SLOW = "fail_slow"
    FAIL_STOP = "fail_stop"
    INCONCLUSIVE = "inconclusive"


class Cause(StrEnum):
    """Cause of lost time in a job."""

    NONE = "none"
    DEVICE = "device"
    STAGE_IMBALANCE = "stage_imbalance"
    SEQUENCE_IMBALANCE = "sequence_imbalance"
    COMMUNICATION = "communication"
    HOST = "host"


_status, _cause = named(Status), named(Cause)


def _numbers(values: Iterable[object]) -> tuple[float, ...]:
    return tuple(map(number, values))


def _number_of_each(values: Mapping[Cause, object]) -> dict[Cause, float]:
    return {cause: number(value) for cause, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict on one rank.

    slowdown    observed over expected compute time; 1.0 is healthy
    since_step  first step of the present state; None where it was so from the start
    confidence  probability, 0 to 1, that the status is right
    evidence    sentences that a person can read
    interval    confidence interval of the slowdown; None where there is none
    step        last step that was taken into account; None where none was
    """

    rank: int
    status: Status
    slowdown: float = 1.0
    since_step: int | None = None
    confidence: float = 1.0
    evidence: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        make_plain(self, _status, "status")
        make_plain(self, whole_number, "rank", least=0)
        make_plain(self, whole_number, "since_step", "step", optional=True)
        make_plain(self, number, "slowdown", least=0.0, what="a factor")
        make_plain(self, number, "confidence")
        make_plain(self, _numbers, "interval", optional=True)
        if not 0.0 <= self.confidence <= 1.0:
            raise ContractError("confidence", "must be between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class LinkVerdict:
    """Verdict on the transfers between two ranks, or on the collectives of a group.

    peer        the other end of the link; -1 for a group, of which `rank` is the first
    group       ranks whose collectives are meant; empty for a link
    slowdown    transfer time over that of similar links or groups, or over its own past
    since_step  first slow step; None while healthy
    confidence  probability, 0 to 1, that the status is right
    evidence    sentences that a person can read
    since_s     Unix time at which the sidecar heard of this status; None in verdicts of a detector,
                which has no clock
    """

    rank: int
    peer: int
    status: Status
    group: tuple[int, ...] = ()
    slowdown: float = 1.0
    since_step: int | None = None
    confidence: float = 1.0
    evidence: tuple[str, ...] = ()
    since_s: float | None = None

    def __post_init__(self) -> None:
        make_plain(self, _status, "status")
        make_plain(self, whole_number, "rank", least=0)
        make_plain(self, whole_number, "peer")
        make_plain(self, whole_number, "since_step", optional=True)
        make_plain(self, whole_numbers, "group", least=0)
        make_plain(self, number, "slowdown", least=0.0, what="a factor")
        make_plain(self, number, "confidence")
        make_plain(self, number, "since_s", optional=True)

    @property
    def ends(self) -> tuple[int, ...]:
        """The ranks of the link or of the group."""
        return self.group or (self.rank, self.peer)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Diagnosis of a job: the share of the lost time of each cause.

    slowdown     step time over the ideal step time
    root_cause   the cause with the largest share; NONE where too little time is lost to name one
    attribution  share of the lost time for every cause but NONE
    steps        number of steps looked at
    detail       sentences that a person can read
    """

    slowdown: float
    root_cause: Cause
    attribution: Mapping[Cause, float] = field(default_factory=dict)
    steps: int = 0
    detail: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        make_plain(self, _cause, "root_cause")
        make_plain(self, number, "slowdown", least=0.0, what="a factor")
        make_plain(self, whole_number, "steps")
        make_plain(self, _number_of_each, "attribution")
