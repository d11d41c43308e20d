"""Latency from a fault to the plan that accounts for it: onset, verdict, plan, applied. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

_MOST_STEPS = 4_096
_MOST_REACTIONS = 20
_MOST_RANKS = 64
_MOST_ACCOUNTED = 4_096


@dataclass(frozen=True)
class Moment:
    """Time of an event.

    step    newest step reported by then; of an onset, the first one that shows the fault
    unix_s  None where it is not known, because the step is too long ago
    """

    step: int | None
    unix_s: float | None


@dataclass(frozen=True)
class OpenFault:
    """Device that is slow or stopped, before there is a plan; `kind` tells slow from stopped."""

    kind: str
    onset: Moment
    verdict: Moment


@dataclass(frozen=True)
class Reaction:
    """Fault of `ranks`, and what followed.

    version  of the plan; None before it is published
    onset    first step that shows the fault
    verdict  of the detector, or report of a failure
    plan     published
    applied  by all ranks
    """

    ranks: tuple[int, ...]
    onset: Moment
    verdict: Moment
    version: int | None = None
    plan: Moment | None = None
    applied: Moment | None = None

    def durations(self) -> dict[str, float | None]:
        """Seconds of each part: `detect`, `plan`, `apply`, and `total` from the onset on."""
        return {
            "detect": _between(self.onset, self.verdict),
            "plan": _between(self.verdict, self.plan),
            "apply": _between(self.plan, self.applied),
            "total": _between(self.onset, self.applied),
        }

    def document(self) -> dict[str, Any]:
        """Form of the API."""
        moments = {"onset": self.onset, "verdict": self.verdict, "plan": self.plan,
                   "applied": self.applied}  # fmt: skip
        told = {
            name: None if at is None else {"step": at.step, "unix_s": _rounded(at.unix_s)}
            for name, at in moments.items()
        }
        seconds = {name: _rounded(value) for name, value in self.durations().items()}
        return {"version": self.version, "ranks": list(self.ranks), **told, "seconds": seconds}


@dataclass
class ReactionLog:
    """Reactions of one job: plain values, saved and restored as one document.

    steps      arrival of the newest steps, in Unix seconds
    faults     without a plan yet, by rank
    accounted  kind of the last fault of each rank for which there is a plan
    open       of the newest plan, which not all ranks have applied yet; None: there is none
    done       the newest ones that are complete, oldest first
    """

    steps: dict[int, float] = field(default_factory=dict)
    faults: dict[int, OpenFault] = field(default_factory=dict)
    accounted: dict[int, str] = field(default_factory=dict)
    open: Reaction | None = None
    done: tuple[Reaction, ...] = ()

    def step(self, step: int, now_s: float) -> None:
        """Note that a step is whole; later ones are of before the job went back to it."""
        while self.steps and next(reversed(self.steps)) >= step:
            self.steps.popitem()
        self.steps[step] = now_s
        while len(self.steps) > _MOST_STEPS:
            del self.steps[next(iter(self.steps))]

    def fault(self, rank: int, kind: str, since_step: int | None, step: int, now_s: float) -> None:
        """Note a device that is slow or stopped since `since_step`, named at `step`.

        Verdicts on it are repeated: a fault for which there is a plan is not noted again.
        """
        is_known = rank in self.faults or self.accounted.get(rank) == kind
        if not is_known and len(self.faults) < _MOST_RANKS:
            onset_s = None if since_step is None else self._onset_s(since_step, now_s)
            self.faults[rank] = OpenFault(kind, Moment(since_step, onset_s), Moment(step, now_s))

    def recovered(self, rank: int) -> None:
        """Note that a device is healthy again."""
        self.faults.pop(rank, None)
        self.accounted.pop(rank, None)

    def planned(self, version: int, step: int, now_s: float) -> None:
        """Note a plan; it accounts for all faults so far, those of a plan not applied included."""
        before = self.open
        if not self.faults and before is None:
            return
        known: list[OpenFault | Reaction] = [*self.faults.values(), *filter(None, [before])]
        ranks = sorted({*self.faults, *(before.ranks if before is not None else ())})
        onset = min((one.onset for one in known), key=_order)
        verdict = min((one.verdict for one in known), key=_order)
        plan = Moment(step, now_s)
        self.open = Reaction(tuple(ranks[:_MOST_RANKS]), onset, verdict, version, plan)
        self.accounted.update((rank, fault.kind) for rank, fault in self.faults.items())
        for rank in list(self.accounted)[:-_MOST_ACCOUNTED]:
            del self.accounted[rank]
        self.faults = {}

    def applied(self, version: int, step: int, now_s: float) -> Reaction | None:
        """Note that all ranks have applied a plan; returns the reaction that ends with it."""
        if self.open is None or self.open.version != version:
            return None
        reaction = replace(self.open, applied=Moment(step, now_s))
        self.open, self.done = None, (*self.done, reaction)[-_MOST_REACTIONS:]
        return reaction

    def documents(self) -> list[dict[str, Any]]:
        """Reactions as the API shows them, the open one last."""
        return [one.document() for one in (*self.done, *filter(None, [self.open]))]

    def _onset_s(self, since_step: int, now_s: float) -> float | None:
        """Time of the first step that shows a fault; now, if that is not whole yet."""
        if not self.steps or since_step > next(reversed(self.steps)):
            return now_s
        return self.steps.get(since_step)


def latest_seconds(reactions: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each part of the newest complete reaction among `documents`."""
    complete = [one["seconds"] for one in reactions if one["applied"] is not None]
    if not complete:
        return {}
    return {part: value for part, value in complete[-1].items() if value is not None}


def _between(begin: Moment | None, end: Moment | None) -> float | None:
    if begin is None or end is None or begin.unix_s is None or end.unix_s is None:
        return None
    return max(0.0, end.unix_s - begin.unix_s)


def _order(moment: Moment) -> tuple[bool, float, bool, float]:
    """Key by which the earliest moment is the least."""
    step, unix_s = moment.step, moment.unix_s
    return step is None, step or 0, unix_s is None, unix_s or 0.0


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
