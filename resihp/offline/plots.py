"""The figures of an analysis, as matplotlib figures."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from resihp.formatting import rank_span

from ._analysis import Analysis
from ._figures import (
    ALARM,
    BACKWARD,
    BAND,
    COMMUNICATION,
    FORWARD,
    INK,
    MUTED,
    ON_SLOW,
    OTHER,
    SURFACE,
    cell_lines,
    new_figure,
    png,
    slowdown_map,
    sparse_ticks,
)
from .timeline import Spans, TraceTimeline

__all__ = ["gantt", "onset", "png", "steps", "workers"]

_MOST_DEVICES, _MOST_PLANS = 32, 64  # rows of the onset map, and lines in it


def workers(analysis: Analysis) -> Figure:
    """Heat map of the slowdown by each worker alone (OSDI'25, figure 14)."""
    whatif = analysis.whatif
    assert whatif is not None
    slowdown = whatif.by_worker.T
    stages, replicas = slowdown.shape
    figure, axes = new_figure(0.9 + 0.42 * stages)
    top = slowdown_map(figure, axes, slowdown, least_top=1.1)
    if replicas <= 16:
        for (stage, replica), value in np.ndenumerate(slowdown):
            colour = ON_SLOW if value > 1.0 + 0.6 * (top - 1.0) else INK
            axes.text(replica, stage, f"{value:.2f}", color=colour, ha="center", va="center")
    axes.set(xlabel="replica", ylabel="stage", yticks=range(stages))
    axes.set_xticks(sparse_ticks(replicas), minor=False)
    cell_lines(axes, stages, replicas)
    return figure


def onset(timeline: TraceTimeline) -> Figure | None:
    """Heat map of the slowdown of each device against its peers in each step, and the steps at
    which plans took effect; None if no passes were recorded."""
    if not timeline.steps:
        return None
    devices = timeline.devices
    factor = devices.factor
    worst = np.sort(np.argsort(-np.nanmax(factor, axis=1), kind="stable")[:_MOST_DEVICES])
    figure, axes = new_figure(1.1 + 0.16 * worst.size)
    slowdown_map(figure, axes, factor[worst])
    axes.set(xlabel="step", ylabel="rank")
    columns = sparse_ticks(len(devices.steps))
    axes.set_xticks(columns, [str(devices.steps[column]) for column in columns])
    rows = sparse_ticks(worst.size, most=24)
    shown = [devices.groups[row] for row in worst]
    axes.set_yticks(rows, [rank_span(shown[row]) for row in rows])
    for column in devices.replanned[-_MOST_PLANS:]:
        axes.axvline(column - 0.5, color=MUTED, linewidth=0.8, linestyle=":")
    _mark_onsets(axes, timeline, shown)
    return figure


def _mark_onsets(axes: Axes, timeline: TraceTimeline, groups: list[tuple[int, ...]]) -> None:
    """Mark the steps from which the detector called a device slow."""
    devices = timeline.devices
    rows = {rank: row for row, group in enumerate(groups) for rank in group}
    named = [device for slow in timeline.analysis.slow.values() for device in slow]
    for rank, since, until in {(device.rank, device.since, device.until) for device in named}:
        column = None if since is None or rank not in rows else devices.column(rank, since)
        if column is None or (until is not None and devices.steps[column] >= until):
            continue
        row = rows[rank]
        axes.plot([column - 0.5] * 2, [row - 0.5, row + 0.5], color=INK, linewidth=2)


def steps(analysis: Analysis) -> Figure | None:
    """Recorded step times over the ideal one; None for formats without start times."""
    whatif = analysis.whatif
    if whatif is None:
        return None
    figure, axes = new_figure(2.2, grid=True)
    at = np.arange(whatif.recorded_s.size)
    axes.fill_between(at, whatif.ideal_step_s, whatif.recorded_s, color=BAND, linewidth=0)
    axes.plot(at, whatif.recorded_s, color=BACKWARD, linewidth=1.6, label="recorded")
    axes.axhline(whatif.ideal_step_s, color=MUTED, linewidth=1.2, linestyle="--", label="ideal")
    axes.set(xlabel="step", ylabel="seconds", xlim=(0, max(at.size - 1, 1)), ylim=(0, None))
    columns = sparse_ticks(at.size)
    axes.set_xticks(columns, [str(whatif.recording.steps[column]) for column in columns])
    axes.legend(frameon=False, loc="lower right", ncols=2, labelcolor=MUTED, fontsize=8)
    return figure


def gantt(timeline: TraceTimeline, step: int, replica: int) -> Figure:
    """A step of one replica as recorded and as ideal, on the same scale."""
    both = [timeline.actual(step), timeline.ideal(step)]
    both = [spans.select(spans.replica == replica) for spans in both]
    stages = 1 + max(int(spans.stage.max()) for spans in both)
    figure, rows = new_figure(1.3 + 2 * 0.3 * stages, rows=2)
    end = max(float((spans.start_s + spans.duration_s).max()) for spans in both)
    unit, words = (1.0, "seconds") if end >= 1.0 else (1e3, "milliseconds")
    end *= unit
    for axes, spans, title in zip(rows, both, ("recorded", "ideal"), strict=True):
        _draw(axes, spans, unit)
        axes.set(ylim=(stages - 0.4, -0.6), yticks=range(stages), xlim=(0, end), ylabel="stage")
        axes.set_title(title, loc="left", fontsize=9)
        last = unit * float((spans.start_s + spans.duration_s).max())
        axes.axvline(last, color=ALARM, linewidth=1)
    rows[0].set_xticklabels([])
    rows[1].set_xlabel(words)
    return figure


def _draw(axes: Axes, spans: Spans, unit: float) -> None:
    order = np.argsort(~spans.transfer, kind="stable")  # compute above communication
    names = np.array([spans.names[name] for name in spans.name])
    colours = np.where(spans.transfer, COMMUNICATION, OTHER)
    colours = np.where(np.char.startswith(names, "forward") & ~spans.transfer, FORWARD, colours)
    colours = np.where(np.char.startswith(names, "backward") & ~spans.transfer, BACKWARD, colours)
    height = np.where(spans.transfer, 0.34, 0.8)
    axes.barh(
        spans.stage[order],
        unit * spans.duration_s[order],
        left=unit * spans.start_s[order],
        height=height[order],
        color=colours[order].tolist(),
        edgecolor=SURFACE,
        linewidth=0.4,
    )
