"""Figures of an analysis, as matplotlib figures; `svg` makes them part of a page."""

from __future__ import annotations

import io
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from resihp.formatting import rank_span

from ._analysis import Analysis
from .timeline import Spans, Timeline

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ec"
FORWARD, BACKWARD, COMMUNICATION, OTHER = "#4c8dd6", "#1f5fa8", "#e0a33a", "#9aa5b1"
BAD = "#c8402f"
_SLOW = LinearSegmentedColormap.from_list("slow", ["#f5f8fb", "#f6c9a8", "#c8402f", "#6d1610"])
_RC: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "resihp",
}
_MOST_LINES = 64  # white lines between the columns of a heat map
_MOST_DEVICES = 32  # rows of the onset map


def svg(figure: Figure) -> str:
    """The figure as an SVG element. The same figure gives the same text."""
    text = io.StringIO()
    with mpl.rc_context(_RC):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    document = text.getvalue()
    return document[document.index("<svg") :]


def workers(analysis: Analysis) -> Figure:
    """Heat map: what each worker alone would slow the ideal job by (OSDI'25, figure 14)."""
    whatif = analysis.whatif
    assert whatif is not None
    slowdown = whatif.by_worker.T
    stages, replicas = slowdown.shape
    figure, axes = _figure(9.2, 0.9 + 0.42 * stages)
    top = max(1.1, float(slowdown.max()))
    image = axes.imshow(slowdown, cmap=_SLOW, vmin=1.0, vmax=top, aspect="auto")
    if replicas <= 16:
        for (stage, replica), value in np.ndenumerate(slowdown):
            dark = value > 1.0 + 0.6 * (top - 1.0)
            text = {"color": "white" if dark else INK, "ha": "center", "va": "center"}
            axes.text(replica, stage, f"{value:.2f}", **text)
    axes.set(xlabel="replica", ylabel="stage", yticks=range(stages))
    axes.set_xticks(_ticks(replicas), minor=False)
    _grid(axes, stages, replicas)
    _bar(figure, axes, image)
    return figure


def onset(analysis: Analysis, timeline: Timeline) -> Figure:
    """Heat map: how much slower than its peers each device was, step by step."""
    groups, factor = timeline.device_factor
    worst = np.sort(np.argsort(-np.nanmax(factor, axis=1), kind="stable")[:_MOST_DEVICES])
    figure, axes = _figure(9.2, 1.1 + 0.16 * worst.size)
    top = max(1.2, float(np.nanmax(factor)))
    image = axes.imshow(
        factor[worst], cmap=_SLOW, vmin=1.0, vmax=top, aspect="auto", interpolation="nearest"
    )
    axes.set(xlabel="step", ylabel="rank")
    columns = _ticks(len(timeline.steps))
    axes.set_xticks(columns, [str(timeline.steps[column]) for column in columns])
    rows = _ticks(worst.size, most=24)
    shown = [groups[row] for row in worst]
    axes.set_yticks(rows, [rank_span(shown[row]) for row in rows])
    _mark_onsets(axes, analysis, timeline, shown)
    _bar(figure, axes, image)
    return figure


def _mark_onsets(
    axes: Axes, analysis: Analysis, timeline: Timeline, groups: list[tuple[int, ...]]
) -> None:
    """A line where the detector says that a device became slow."""
    rows = {rank: row for row, group in enumerate(groups) for rank in group}
    for verdict in analysis.verdicts:
        if verdict.since_step is None or verdict.rank not in rows:
            continue
        column = int(np.searchsorted(timeline.steps, verdict.since_step))
        row = rows[verdict.rank]
        axes.plot([column - 0.5] * 2, [row - 0.5, row + 0.5], color=INK, linewidth=2)


def steps(analysis: Analysis) -> Figure | None:
    """Step times as recorded, over the ideal; None where the format does not tell."""
    whatif = analysis.whatif
    if whatif is None:
        return None
    figure, axes = _figure(9.2, 2.1)
    at = np.arange(whatif.recorded_s.size)
    axes.fill_between(at, whatif.ideal_step_s, whatif.recorded_s, color="#dbe7f4", linewidth=0)
    axes.plot(at, whatif.recorded_s, color=BACKWARD, linewidth=1.6, label="recorded")
    axes.axhline(whatif.ideal_step_s, color=MUTED, linewidth=1.2, linestyle="--", label="ideal")
    axes.set(xlabel="step", ylabel="seconds", xlim=(0, max(at.size - 1, 1)), ylim=(0, None))
    columns = _ticks(at.size)
    axes.set_xticks(columns, [str(whatif.recording.steps[column]) for column in columns])
    axes.grid(axis="y", color=GRID)
    axes.legend(frameon=False, loc="lower right", ncols=2, labelcolor=MUTED, fontsize=8)
    return figure


def gantt(timeline: Timeline, step: int, replica: int) -> Figure:
    """One replica's step as it was, above the ideal one, on the same scale."""
    both = [timeline.actual(step), timeline.ideal(step)]
    both = [spans.select(spans.replica == replica) for spans in both]
    stages = 1 + max(int(spans.stage.max()) for spans in both)
    figure, rows = _figure(9.2, 1.3 + 2 * 0.3 * stages, rows=2)
    end = max(float((spans.start_s + spans.duration_s).max()) for spans in both)
    unit, words = (1.0, "seconds") if end >= 1.0 else (1e3, "milliseconds")
    end *= unit
    for axes, spans, title in zip(rows, both, ("as it was", "ideal"), strict=True):
        _draw(axes, spans, unit)
        axes.set(ylim=(stages - 0.4, -0.6), yticks=range(stages), xlim=(0, end), ylabel="stage")
        axes.set_title(title, loc="left", fontsize=9)
        last = unit * float((spans.start_s + spans.duration_s).max())
        axes.axvline(last, color=BAD, linewidth=1)
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
        edgecolor="white",
        linewidth=0.4,
    )


def _figure(width: float, height: float, rows: int = 1) -> tuple[Figure, Any]:
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(length=0)
    return figure, axes[0] if rows == 1 else axes


def _bar(figure: Figure, axes: Axes, image: Any) -> None:
    bar = figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01, aspect=14)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=MUTED)


def _grid(axes: Axes, rows: int, columns: int) -> None:
    """White lines between the cells."""
    if columns <= _MOST_LINES:
        axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)


def _ticks(count: int, most: int = 16) -> list[int]:
    return list(range(0, count, -(-count // most)))
