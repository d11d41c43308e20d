"""An analysis as one HTML page that needs no other file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from resihp.contracts import Status

from . import plots
from ._analysis import Analysis
from .summary import CAUSE_WORDS, facts, headline, health
from .timeline import Timeline

_TEMPLATE = "report.html"


def write_html(analysis: Analysis, path: str | Path) -> None:
    """Writes the report."""
    Path(path).write_text(html(analysis), encoding="utf-8")


def html(analysis: Analysis) -> str:
    """The report: diagnosis, heat maps, onset, timelines and devices."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("resihp.offline", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(_context(analysis))


def _context(analysis: Analysis) -> dict[str, Any]:
    timeline = Timeline(analysis)
    step = slowest_step(analysis, timeline)
    replica = last_replica(timeline, step)
    shares = sorted(analysis.diagnosis.attribution.items(), key=lambda item: -item[1])
    return {
        "job": analysis.trace.job.name,
        "facts": facts(analysis),
        "headline": headline(analysis),
        "sentences": analysis.diagnosis.detail,
        "shares": [(cause.value, CAUSE_WORDS[cause], share) for cause, share in shares],
        "numbers": _numbers(analysis),
        "workers": analysis.whatif and plots.svg(plots.workers(analysis)),
        "onset": plots.svg(plots.onset(analysis, timeline)),
        "step": step,
        "replica": replica,
        "gantt": None if replica is None else plots.svg(plots.gantt(timeline, step, replica)),
        "steps": (figure := plots.steps(analysis)) and plots.svg(figure),
        "kinds": _kinds(analysis),
        "health": health(analysis),
        "unwell": _unwell(analysis),
        "changes": [(change.step, change.verdict) for change in analysis.changes][:200],
        "devices": len(analysis.verdicts),
    }


def slowest_step(analysis: Analysis, timeline: Timeline) -> int:
    """The step that took longest; the middle one where the format does not tell."""
    if analysis.whatif is None:
        return timeline.steps[len(timeline.steps) // 2]
    return timeline.steps[int(np.argmax(analysis.whatif.no_delay_s))]


def last_replica(timeline: Timeline, step: int) -> int | None:
    """The replica whose passes end last; None where none took any time."""
    spans = timeline.actual(step)
    passes = [i for i, name in enumerate(spans.names) if name.split("-")[0] in _PASSES]
    spans = spans.select(~spans.transfer & np.isin(spans.name, passes))
    if not spans.start_s.size:
        return None
    return int(spans.replica[np.argmax(spans.start_s + spans.duration_s)])


_PASSES = ("forward", "backward")


def _numbers(analysis: Analysis) -> list[tuple[str, str, str]]:
    """Key figures: value, name, explanation."""
    numbers = [
        (f"{analysis.diagnosis.slowdown:.3f}x", "slowdown", "step time over the ideal step time"),
        (analysis.diagnosis.root_cause.value.replace("_", " "), "root cause", ""),
    ]
    whatif = analysis.whatif
    if whatif is None:
        return numbers
    for name, value, words in (
        ("M_W", whatif.m_w, "of the lost time goes with the worst 3% of the workers"),
        ("M_S", whatif.m_s, "of the lost time goes with the last stage"),
    ):
        if value is not None:
            beyond = "; beyond 100%: the ideal, an average, holds some of it" if value > 1 else ""
            numbers.append((f"{value:.1%}", name, words + beyond))
    numbers.append((f"{whatif.ideal_step_s:.3f} s", "ideal step", "when all took the average"))
    return numbers


def _kinds(analysis: Analysis) -> list[tuple[str, float]]:
    """What each kind of operation alone would slow the ideal job by."""
    whatif = analysis.whatif
    if whatif is None:
        return []
    slowdowns = [(name, float(whatif.slowdown_of(s))) for name, s in whatif.by_kind_s.items()]
    return sorted(slowdowns, key=lambda item: -item[1])


def _unwell(analysis: Analysis) -> list[dict[str, Any]]:
    places = {entry["rank"]: entry for entry in analysis.devices()}
    return [
        {**places[verdict.rank], "evidence": verdict.evidence, "confidence": verdict.confidence}
        for verdict in sorted(analysis.verdicts, key=lambda v: -v.slowdown)
        if verdict.status is not Status.HEALTHY
    ]
