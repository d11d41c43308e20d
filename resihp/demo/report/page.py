"""The report of a demo run: one HTML page that needs no other file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from resihp.formatting import byte_size, duration, inclusive_ranges, plural, rank_list, ratio
from resihp.offline._page import KeyFigure, render

from .. import descriptions
from ..findings import (
    PHASES,
    detections,
    first_loss,
    first_resize,
    headline,
    loss_difference,
    outcome,
    period_ms,
    phase_spans,
    plan_periods,
    recovered_sentence,
    scripted,
    step_times,
)
from ..record import DemoRecord
from .diagrams import diagrams
from .plots import health_plot, loss_plot, markers, step_time_plot


def write_report(record: DemoRecord, path: Path) -> None:
    """Write the report to `path`, whose folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_report(record), encoding="utf-8")


def render_report(record: DemoRecord) -> str:
    """The report as HTML."""
    happened = markers(record)
    return render(
        __package__,
        "report.html",
        record=record,
        words=descriptions,
        outcome=outcome(record),
        headline=headline(record),
        cards=cards(record),
        phases=phase_rows(record),
        markers=happened,
        diagrams=diagrams(record),
        plan_periods=plan_periods(record),
        period_ms=period_ms,
        times=step_time_plot(record, happened),
        health=health_plot(record, happened),
        loss=loss_plot(record, happened),
    )


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """One phase of the run in numbers; `steps` counts both ends."""

    name: str
    steps: str
    median: str
    ratio: str


def cards(record: DemoRecord) -> list[KeyFigure]:
    """The figures on top of the report."""
    makers = (_found, _alarms, _resize, _time, _loss_of_rank, _training_loss)
    return [card for card in (make(record) for make in makers) if card is not None]


def _found(record: DemoRecord) -> KeyFigure | None:
    slow = scripted(record, "slow_rank")
    if slow is None:
        return None
    hit = next((item for item in detections(record) if item.delay_steps is not None), None)
    if hit is None:
        return KeyFigure(
            name="Slow rank", figure="not found", detail=f"rank {slow} was", tone="bad"
        )
    truth = record.script["slow_factor"]
    detail = (
        f"{ratio(hit.seen.verdict.slowdown)} its normal time ({truth:g}x in truth), "
        f"{plural(hit.delay_steps or 0, 'step')} after it began"
    )
    return KeyFigure(name="Slow rank found", figure=f"rank {slow}", detail=detail, tone="good")


def _alarms(record: DemoRecord) -> KeyFigure | None:
    false = [item.seen.verdict.rank for item in detections(record) if item.delay_steps is None]
    healthy = len(record.layout.ranks) - (scripted(record, "slow_rank") is not None)
    detail = f"on {plural(healthy, 'rank')} at full speed" if not false else rank_list(false)
    tone = "bad" if false else "good"
    return KeyFigure(name="False alarms", figure=str(len(false)), detail=detail, tone=tone)


def _resize(record: DemoRecord) -> KeyFigure | None:
    switch = first_resize(record)
    if switch is None:
        return None
    detail = f"pause between two steps; {byte_size(switch.received_bytes)} moved, no restart"
    return KeyFigure(name="Live resize", figure=duration(switch.pause_ms), detail=detail)


def _time(record: DemoRecord) -> KeyFigure | None:
    times = step_times(record)
    slow, resized = times["slow"], times["resized"]
    if slow is None or resized is None:
        return None
    detail = f"healthy {duration(times['healthy'])}"
    if sentence := recovered_sentence(record):
        detail += f"; {sentence}"
    return KeyFigure(
        name="Step time, slow to resized",
        figure=f"{duration(slow)} → {duration(resized)}",
        detail=detail,
        tone="good" if resized < slow else "bad",
    )


def _loss_of_rank(record: DemoRecord) -> KeyFigure | None:
    switch = first_loss(record)
    if switch is None:
        return None
    left, whole = len(switch.plan.layout.ranks), len(record.layout.ranks)
    detail = f"train on after {rank_list(switch.lost)} died; {duration(switch.pause_ms)} pause"
    return KeyFigure(name="Loss of a rank", figure=f"{left} of {whole} ranks", detail=detail)


def _training_loss(record: DemoRecord) -> KeyFigure | None:
    difference = loss_difference(record)
    if difference is None:
        return None
    return KeyFigure(
        name="Largest difference in loss",
        figure=f"{difference.largest:.1e}",
        detail=f"to the undisturbed run, over {plural(difference.steps, 'step')}",
    )


def phase_rows(record: DemoRecord) -> list[PhaseRow]:
    """Median step time of each phase that the run had."""
    times, spans = step_times(record), phase_spans(record)
    healthy = times["healthy"]
    return [
        PhaseRow(
            name=words,
            steps=inclusive_ranges([spans[name]]),
            median=duration(ms),
            ratio=ratio(ms / healthy) if healthy else "–",
        )
        for name, words in PHASES.items()
        if (ms := times[name]) is not None
    ]
