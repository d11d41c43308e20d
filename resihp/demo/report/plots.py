"""The plots of the report: step time, health of each device, loss."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..descriptions import duration
from ..findings import plan_periods
from ..phases import phase_spans, step_times
from ..record import DemoRecord, SlowdownRecord
from .markers import Marker
from .svg import ALARM, BAND, DEAD, HEAT, INK, MUTED, SECOND, SERIES, inline_svg

HEAT_EDGES = (1.05, 1.15, 1.25, 1.4, 1.6)
"""Slowdowns at which the heat map goes to its next colour."""


def step_time_plot(record: DemoRecord, markers: Sequence[Marker]) -> str:
    """Step time over steps: each step, the median of each phase, predictions and bounds."""

    def draw(figure: Figure) -> None:
        axes = _axes(figure, record, "step time (ms)")
        top = _top([seen.paced_ms for seen in record.steps])
        axes.set_ylim(0, top)
        _draw_periods(axes, record)
        steps = [seen.step for seen in record.steps]
        shown = [min(seen.paced_ms, top) for seen in record.steps]
        axes.plot(steps, shown, color=SERIES, linewidth=1.2, marker="o", markersize=3, alpha=0.75)
        _beyond(axes, record, top)
        _medians(axes, record)
        _predictions(axes, record)
        _draw_markers(axes, markers)

    return inline_svg("times", draw, height=3.7)


def health_plot(record: DemoRecord, markers: Sequence[Marker]) -> str:
    """Heat map of the slowdown that the detector saw, rank by step."""

    def draw(figure: Figure) -> None:
        axes = _axes(figure, record, "rank")
        axes.grid(visible=False)
        every = sorted({*record.layout.ranks, *(seen.rank for seen in record.health)})
        for row, rank in enumerate(every):
            _heat_row(axes, row, [seen for seen in record.health if seen.rank == rank], record)
        _not_yet_judged(axes, record, len(every))
        axes.set_yticks(range(len(every)), [str(rank) for rank in every])
        axes.set_ylim(len(every) - 0.45, -0.55)
        axes.tick_params(left=False)
        axes.spines["left"].set_visible(False)
        _draw_markers(axes, markers)

    return inline_svg("health", draw, height=0.75 + 0.31 * max(len(record.layout.ranks), 3))


def loss_plot(record: DemoRecord, markers: Sequence[Marker]) -> str:
    """The loss and its reference; below, their distance on a logarithmic axis."""

    def draw(figure: Figure) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.3, 1))
        for axes in (upper, lower):
            _x_range(axes, record)
        upper.set_ylabel("loss")
        reference = list(enumerate(record.reference))
        upper.plot(*_columns(reference), color=SECOND, linewidth=4.5, alpha=0.55, zorder=2)
        upper.plot(
            [seen.step for seen in record.steps],
            [seen.loss for seen in record.steps],
            color=SERIES,
            linewidth=1.4,
            zorder=3,
        )
        _differences(lower, record)
        _draw_markers(upper, markers)
        lower.set_xlabel("step")

    return inline_svg("loss", draw, height=4.2)


def _axes(figure: Figure, record: DemoRecord, label: str) -> Axes:
    axes: Axes = figure.subplots()
    _x_range(axes, record)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    return axes


def _x_range(axes: Axes, record: DemoRecord) -> None:
    last = max([*(seen.step for seen in record.steps), len(record.reference) - 1, 1])
    axes.set_xlim(-0.8, last + 0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))


def _columns(pairs: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _top(times: Sequence[float]) -> float:
    """Upper end of the axis: warm-up and recovery may take many times longer than a step."""
    if not times:
        return 1.0
    ordered = sorted(times)
    return 1.3 * max(1.15 * median(times), ordered[int(0.95 * (len(ordered) - 1))])


def _draw_periods(axes: Axes, record: DemoRecord) -> None:
    for period in plan_periods(record):
        if period.version % 2:
            axes.axvspan(period.start - 0.5, period.stop - 0.5, color=BAND, linewidth=0, zorder=0)
        if period.stop > period.start:
            axes.annotate(
                f"plan {period.version}",
                (period.start - 0.5, 0),
                xytext=(5, 6),
                textcoords="offset points",
                color=MUTED,
                fontsize=9,
            )


def _beyond(axes: Axes, record: DemoRecord, top: float) -> None:
    """Steps above the axis: a triangle at its upper end with the time in words."""
    for seen in record.steps:
        if seen.paced_ms > top:
            axes.plot([seen.step], [top * 0.985], color=SERIES, marker="^", markersize=6)
            axes.annotate(
                duration(seen.paced_ms),
                (seen.step, top * 0.985),
                xytext=(6, -5),
                textcoords="offset points",
                color=MUTED,
                fontsize=9,
            )


def _medians(axes: Axes, record: DemoRecord) -> None:
    times = step_times(record)
    for name, (start, stop) in phase_spans(record).items():
        ms = times[name]
        if ms is None:
            continue
        colour = ALARM if name == "slow" else INK
        axes.hlines(ms, start - 0.4, stop - 0.6, color=colour, linewidth=2.4, zorder=4)
        axes.annotate(
            duration(ms),
            ((start + stop - 1) / 2, ms),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            color=colour,
            fontweight="bold",
            zorder=5,
        )


def _predictions(axes: Axes, record: DemoRecord) -> None:
    for period in plan_periods(record):
        plan = period.switch.plan if period.switch else None
        if plan is None or plan.step_ms <= 0:
            continue
        span = (period.start - 0.4, period.stop - 0.6)
        axes.hlines(plan.step_ms, *span, color=SECOND, linewidth=1.6, linestyle="--", zorder=3)
        if plan.bound_ms > 0:
            axes.hlines(plan.bound_ms, *span, color=SECOND, linewidth=1.4, linestyle=":", zorder=3)


def _draw_markers(axes: Axes, markers: Sequence[Marker]) -> None:
    """Numbered marks above the axes; the page lists what each number stands for."""
    transform = axes.get_xaxis_transform()
    for marker in markers:
        colour = {"fault": ALARM, "lost": INK}.get(marker.kind, MUTED)
        axes.axvline(marker.x, color=colour, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1)
        axes.text(
            marker.label_x,
            1.045,
            str(marker.number),
            transform=transform,
            ha="center",
            va="center",
            fontsize=9,
            color=colour,
            fontweight="bold",
            bbox={"boxstyle": "circle,pad=0.25", "fc": "none", "ec": colour, "lw": 1.1},
        )


def heat_level(slowdown: float) -> int:
    """Index of the heat map's colour for a slowdown."""
    return sum(slowdown >= edge for edge in HEAT_EDGES)


def _heat_row(axes: Axes, row: int, seen: Sequence[SlowdownRecord], record: DemoRecord) -> None:
    """Equal neighbours are drawn as one bar: fewer elements and no seams."""
    end = 1 + max((step.step for step in record.steps), default=0)
    ordered = sorted(seen, key=lambda item: item.step)
    starts = [item.step for item in ordered]
    bars: list[tuple[int, int, str]] = []
    for item, stop in zip(ordered, [*starts, end][1:], strict=True):
        colour = DEAD if item.status == "fail_stop" else HEAT[heat_level(item.slowdown)]
        if bars and bars[-1][2] == colour and bars[-1][1] == item.step:
            bars[-1] = (bars[-1][0], stop, colour)
        elif stop > item.step:
            bars.append((item.step, stop, colour))
    for start, stop, colour in bars:
        axes.broken_barh([(start - 0.5, stop - start)], (row - 0.42, 0.84), color=colour, lw=0)
        if colour == DEAD:
            axes.text(start, row, "dead", va="center", color=INK, fontsize=9)


def _not_yet_judged(axes: Axes, record: DemoRecord, rows: int) -> None:
    """Says what the empty stretch at the left is: the detector learns what is normal."""
    first = min((seen.step for seen in record.health), default=0)
    if first >= 5:
        middle = (first - 1) / 2
        axes.text(middle, (rows - 1) / 2, "learning", ha="center", color=MUTED, fontsize=9)


def _differences(axes: Axes, record: DemoRecord) -> None:
    axes.set_ylabel("|difference|")
    known = [seen for seen in record.steps if seen.step < len(record.reference)]
    pairs = [(seen.step, abs(seen.loss - record.reference[seen.step])) for seen in known]
    above = [(step, distance) for step, distance in pairs if distance > 0]
    if not above:
        axes.set_yticks([])
        word = "no difference at all" if pairs else "no reference"
        axes.text(0.5, 0.5, word, transform=axes.transAxes, ha="center", color=MUTED)
        return
    axes.set_yscale("log")
    axes.plot(*_columns(above), color=SERIES, linewidth=0, marker="o", markersize=3)
    axes.set_ylim(min(y for _, y in above) / 3, max(y for _, y in above) * 3)
