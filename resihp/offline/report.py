"""The report of an analysis: one HTML page that needs no other file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from . import plots
from ._analysis import Analysis
from ._page import KeyFigure, render
from .summary import CAUSE_WORDS, facts, headline, health
from .timeline import TraceTimeline


def write_html(analysis: Analysis, path: str | Path) -> None:
    """Write the report."""
    Path(path).write_text(html(analysis), encoding="utf-8")


def html(analysis: Analysis) -> str:
    """The report: diagnosis, heat maps, onset, timelines and devices."""
    timeline = TraceTimeline(analysis)
    step = slowest_step(analysis, timeline)
    replica = None if step is None else last_replica(timeline, step)
    shares = sorted(analysis.diagnosis.attribution.items(), key=lambda item: -item[1])
    return render(
        "resihp.offline",
        "report.html",
        job=analysis.trace.job.name,
        facts=facts(analysis),
        headline=headline(analysis),
        sentences=analysis.diagnosis.detail,
        shares=[(CAUSE_WORDS[cause], share) for cause, share in shares],
        cards=_key_figures(analysis),
        workers=analysis.whatif and plots.workers(analysis),
        onset=plots.onset(timeline),
        replanned=bool(timeline.steps and timeline.devices.replanned),
        step=step,
        replica=replica,
        gantt=None if step is None or replica is None else plots.gantt(timeline, step, replica),
        steps=plots.steps(analysis),
        kinds=_kinds(analysis),
        health=health(analysis),
        unwell=[
            {**device, "evidence": verdict.evidence, "confidence": verdict.confidence}
            for verdict, device in analysis.unwell()
        ],
        changes=[(change.step, change.verdict) for change in analysis.changes][:200],
        devices=len(analysis.verdicts),
    )


def slowest_step(analysis: Analysis, timeline: TraceTimeline) -> int | None:
    """The longest step; the middle one for formats without start times. None if no passes were
    recorded."""
    if not timeline.steps:
        return None
    if analysis.whatif is None:
        return timeline.steps[len(timeline.steps) // 2]
    return timeline.steps[int(np.argmax(analysis.whatif.no_delay_s))]


def last_replica(timeline: TraceTimeline, step: int) -> int | None:
    """The replica whose passes end last; None if no pass took any time."""
    spans = timeline.actual(step)
    passes = [i for i, name in enumerate(spans.names) if name.startswith(("forward", "backward"))]
    spans = spans.select(~spans.transfer & np.isin(spans.name, passes))
    if not spans.start_s.size:
        return None
    return int(spans.replica[np.argmax(spans.start_s + spans.duration_s)])


def _key_figures(analysis: Analysis) -> list[KeyFigure]:
    diagnosis, whatif = analysis.diagnosis, analysis.whatif
    cause = diagnosis.root_cause.value.replace("_", " ")
    figures = [
        KeyFigure("Slowdown", f"{diagnosis.slowdown:.3f}x", "step time over the ideal step time"),
        KeyFigure("Root cause", cause),
    ]
    if whatif is None:
        return figures
    for name, value, part in (
        ("M_W", whatif.m_w, "the worst 3% of the workers"),
        ("M_S", whatif.m_s, "the last stage"),
    ):
        if value is not None:
            detail = f"of the lost time goes with {part}"
            if value > 1:
                detail += "; beyond 100%: the ideal, an average, holds some of it"
            figures.append(KeyFigure(name, f"{value:.1%}", detail))
    return [
        *figures,
        KeyFigure("Ideal step", f"{whatif.ideal_step_s:.3f} s", "all take the average"),
    ]


def _kinds(analysis: Analysis) -> list[tuple[str, float]]:
    """Slowdown of the ideal job by each kind of operation alone."""
    whatif = analysis.whatif
    if whatif is None:
        return []
    slowdowns = [(name, float(whatif.slowdown_of(s))) for name, s in whatif.by_kind_s.items()]
    return sorted(slowdowns, key=lambda item: -item[1])
