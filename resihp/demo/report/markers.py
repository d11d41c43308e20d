"""Numbered marks of the plots, and the list that explains them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from resihp.contracts import Status

from ..descriptions import switch_line, verdict_line
from ..findings import scripted
from ..record import DemoRecord


@dataclass(frozen=True, kw_only=True)
class Marker:
    """An event at a step.

    kind     fault, verdict, plan or lost
    x        position of its line, in steps
    label_x  position of its number, apart from those of its neighbours
    """

    number: int
    step: int
    kind: str
    text: str
    x: float
    label_x: float


def markers(record: DemoRecord) -> tuple[Marker, ...]:
    """The events of a run in temporal order."""
    happened = sorted([*_script(record), *_verdicts(record), *_switches(record)])
    numbered = [
        Marker(number=number, step=step, kind=kind, text=text, x=step - 0.5, label_x=step - 0.5)
        for number, (step, _, kind, text) in enumerate(happened, 1)
    ]
    last = max([*(seen.step for seen in record.steps), 40])
    return tuple(_apart(numbered, last / 40))


def _script(record: DemoRecord) -> list[tuple[int, int, str, str]]:
    happened = []
    slow, slow_at = scripted(record, "slow_rank"), scripted(record, "slow_at")
    if slow is not None and slow_at is not None:
        text = f"rank {slow} runs at 1/{record.script['slow_factor']:g} of its speed from here on"
        happened.append((slow_at, 0, "fault", text))
    dead, dead_at = scripted(record, "dead_rank"), scripted(record, "dead_at")
    if dead is not None and dead_at is not None:
        happened.append((dead_at, 0, "lost", f"rank {dead} is killed with SIGKILL"))
    return happened


def _verdicts(record: DemoRecord) -> list[tuple[int, int, str, str]]:
    # A loss is reported during its step, when only the step before is complete.
    return [
        (max(seen.at_step, seen.verdict.since_step or 0), 1, "verdict", verdict_line(seen.verdict))
        for seen in record.verdicts
        if seen.verdict.status in (Status.FAIL_SLOW, Status.FAIL_STOP)
    ]


def _switches(record: DemoRecord) -> list[tuple[int, int, str, str]]:
    return [(switch.step, 2, "plan", switch_line(switch)) for switch in record.switches]


def _apart(numbered: list[Marker], gap: float) -> list[Marker]:
    """Spread numbers that would overlap around the middle of their group."""
    groups: list[list[Marker]] = []
    for marker in numbered:
        if groups and marker.x - _edge(groups[-1], gap) < gap:
            groups[-1].append(marker)
        else:
            groups.append([marker])
    return [
        replace(marker, label_x=_middle(group) + (index - (len(group) - 1) / 2) * gap)
        for group in groups
        for index, marker in enumerate(group)
    ]


def _middle(group: list[Marker]) -> float:
    return sum(marker.x for marker in group) / len(group)


def _edge(group: list[Marker], gap: float) -> float:
    return _middle(group) + (len(group) - 1) / 2 * gap
