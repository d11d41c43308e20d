"""The phases of a demo run (healthy, slow, resized, after the loss) and their step times.

Pure functions of a `DemoRecord`, shared by the checks, the terminal summary and the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from .record import DemoRecord, LayoutChangeRecord, StepRecord

WARM_UP_STEPS = 3
PHASES = ("healthy", "slow", "resized", "after_loss")


@dataclass(frozen=True, kw_only=True)
class LossDifference:
    """Largest distance between the loss of the run and of its undisturbed reference."""

    largest: float
    at_step: int
    steps: int


def first_resize(record: DemoRecord) -> LayoutChangeRecord | None:
    """The first plan applied while every rank was alive."""
    return next((switch for switch in record.switches if not switch.lost), None)


def first_loss(record: DemoRecord) -> LayoutChangeRecord | None:
    """The first plan applied because ranks had died."""
    return next((switch for switch in record.switches if switch.lost), None)


def phase_spans(record: DemoRecord) -> dict[str, tuple[int, int]]:
    """Half-open range of steps of each phase that the run had.

    The first `WARM_UP_STEPS` steps, the step in which a fault sets in and the step before which a
    plan is applied belong to no phase: they are partly of both.
    """
    end = 1 + max((seen.step for seen in record.steps), default=-1)
    slow_at, dead_at = scripted(record, "slow_at"), scripted(record, "dead_at")
    resize, loss = first_resize(record), first_loss(record)
    death = min(
        (at for at in (dead_at, loss.step if loss else None) if at is not None), default=end
    )
    spans: dict[str, tuple[int, int]] = {}
    faults = [at for at in (slow_at, resize.step if resize else None) if at is not None]
    spans["healthy"] = (WARM_UP_STEPS, min([*faults, death]))
    if slow_at is not None:
        spans["slow"] = (slow_at + 1, min(resize.step if resize else end, death))
    if resize is not None:
        spans["resized"] = (resize.step + 1, death)
    if loss is not None:
        spans["after_loss"] = (loss.step + 1, end)
    return {name: span for name, span in spans.items() if span[0] < span[1]}


def step_times(record: DemoRecord) -> dict[str, float | None]:
    """Median step time in ms, at the pace of the first step, of each of `PHASES`.

    None where no step was completed in it.
    """
    spans = phase_spans(record)
    return {
        name: _median_ms(record.steps, spans[name]) if name in spans else None for name in PHASES
    }


def pace_changes(record: DemoRecord) -> list[tuple[int, float]]:
    """Steps with another pace than the step before, and the pace over that of the first step."""
    return [
        (seen.step, seen.pace)
        for before, seen in pairwise(record.steps)
        if seen.pace != before.pace
    ]


def loss_difference(record: DemoRecord) -> LossDifference | None:
    """The largest difference of the loss from the reference; None without a common step."""
    pairs = [
        (abs(seen.loss - record.reference[seen.step]), seen.step)
        for seen in record.steps
        if 0 <= seen.step < len(record.reference)
    ]
    if not pairs:
        return None
    largest, at_step = max(pairs)
    return LossDifference(largest=largest, at_step=at_step, steps=len(pairs))


def scripted(record: DemoRecord, name: str) -> int | None:
    """`slow_rank`, `slow_at`, `dead_rank` or `dead_at`; None where that fault was left out."""
    rank = record.script.get(f"{name.split('_', maxsplit=1)[0]}_rank", -1)
    value = int(record.script.get(name, -1))
    return value if value >= 0 and rank >= 0 else None


def _median_ms(steps: Sequence[StepRecord], span: tuple[int, int]) -> float | None:
    times = [seen.paced_ms for seen in steps if span[0] <= seen.step < span[1]]
    return median(times) if times else None
