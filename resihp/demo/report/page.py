"""The report of a demo run: one HTML page that needs no other file."""

from __future__ import annotations

from pathlib import Path

from resihp.offline._page import render

from .. import descriptions
from ..findings import headline, outcome, period_ms, plan_periods
from ..record import DemoRecord
from .cards import cards, phase_rows
from .diagrams import diagrams
from .markers import markers
from .plots import health_plot, loss_plot, step_time_plot


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
