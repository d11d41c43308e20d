"""The report of one demo run: a single HTML file that needs nothing else."""

from __future__ import annotations

from importlib import resources
from itertools import pairwise
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .. import descriptions as words
from ..findings import headline, outcome, period_ms, plan_periods
from ..record import DemoRecord
from .cards import cards, phase_rows
from .diagrams import diagrams
from .markers import markers
from .plots import HEAT_EDGES, health_plot, loss_plot, step_time_plot


def write_report(record: DemoRecord, path: Path) -> None:
    """Writes the report to `path`, whose folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_report(record), encoding="utf-8")


def render_report(record: DemoRecord) -> str:
    """The report as HTML."""
    happened = markers(record)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(
        resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    )
    return template.render(
        record=record,
        words=words,
        outcome=outcome(record),
        headline=headline(record),
        cards=cards(record),
        phases=phase_rows(record),
        markers=happened,
        diagrams=diagrams(record),
        plan_periods=plan_periods(record),
        period_ms=period_ms,
        heat_legend=_heat_legend(),
        plots={
            "times": Markup(step_time_plot(record, happened)),
            "health": Markup(health_plot(record, happened)),
            "loss": Markup(loss_plot(record, happened)),
        },
    )


def _heat_legend() -> list[str]:
    """What each colour of the heat map stands for, from the lightest."""
    first, last = f"below {HEAT_EDGES[0]:.2f}×", f"{HEAT_EDGES[-1]:.2f}× and more"
    between = [f"{low:.2f}–{high:.2f}×" for low, high in pairwise(HEAT_EDGES)]
    return [first, *between, last]
