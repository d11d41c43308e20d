"""The plots of the report: step time, health of each device, loss; numbered marks of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean, median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from resihp.contracts import Status
from resihp.formatting import duration
from resihp.offline._figures import (
    ALARM,
    BAND,
    INK,
    MUTED,
    SECOND,
    SERIES,
    new_figure,
    slowdown_map,
)

from ..descriptions import switch_line, verdict_line
from ..findings import phase_spans, plan_periods, scripted, step_times
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
    happened = []
    slow, slow_at = scripted(record, "slow_rank"), scripted(record, "slow_at")
    if slow is not None and slow_at is not None:
        text = f"rank {slow} runs at 1/{record.script['slow_factor']:g} of its speed from here on"
        happened.append((slow_at, 0, "fault", text))
    dead, dead_at = scripted(record, "dead_rank"), scripted(record, "dead_at")
    if dead is not None and dead_at is not None:
        happened.append((dead_at, 0, "lost", f"rank {dead} is killed with SIGKILL"))
    for seen in record.verdicts:
        if seen.verdict.status in (Status.FAIL_SLOW, Status.FAIL_STOP):
            # A loss is reported during its step, when only the step before is complete.
            step = max(seen.at_step, seen.verdict.since_step or 0)
            happened.append((step, 1, "verdict", verdict_line(seen.verdict)))
    happened += [(switch.step, 2, "plan", switch_line(switch)) for switch in record.switches]
    numbered = [
        Marker(number=number, step=step, kind=kind, text=text, x=step - 0.5, label_x=step - 0.5)
        for number, (step, _, kind, text) in enumerate(sorted(happened), 1)
    ]
    last = max([*(seen.step for seen in record.steps), 40])
    return tuple(_apart(numbered, last / 40))


def _apart(numbered: list[Marker], gap: float) -> list[Marker]:
    """Spread numbers that would overlap around the middle of their group."""
    groups: list[list[Marker]] = []
    middle = -inf
    for marker in numbered:
        if groups and marker.x - middle - (len(groups[-1]) - 1) / 2 * gap < gap:
            groups[-1].append(marker)
        else:
            groups.append([marker])
        middle = fmean(marker.x for marker in groups[-1])
    return [
        replace(marker, label_x=fmean(m.x for m in group) + (index - (len(group) - 1) / 2) * gap)
        for group in groups
        for index, marker in enumerate(group)
    ]


def step_time_plot(record: DemoRecord, markers: Sequence[Marker]) -> Figure:
    """Step time over steps: each step, the median of each phase, predictions and bounds."""
    figure, axes = new_figure(3.7, grid=True)
    axes.set(xlabel="step", ylabel="step time (ms)")
    _x_range(axes, record)
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
    return figure


def health_plot(record: DemoRecord, markers: Sequence[Marker]) -> Figure:
    """Heat map of the slowdown by the detector, rank by step; empty while it learns."""
    ranks, slowdown = slowdowns(record)
    figure, axes = new_figure(0.75 + 0.31 * max(len(ranks), 3))
    slowdown_map(figure, axes, slowdown)
    axes.set(xlabel="step", ylabel="rank")
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    for row, rank in enumerate(ranks):
        known = [item for item in record.health if item.rank == rank]
        dead = [item.step for item in known if item.status == "fail_stop"]
        if dead:
            axes.text(min(dead), row, "dead", va="center", color=MUTED, fontsize=9)
    _draw_markers(axes, markers)
    return figure


def slowdowns(record: DemoRecord) -> tuple[list[int], NDArray[np.float64]]:
    """The ranks R of a run, and the last known slowdown [R, steps] of each.

    NaN before the first one, and of a dead rank.
    """
    ranks = sorted({*record.layout.ranks, *(seen.rank for seen in record.health)})
    last = max((seen.step for seen in record.steps), default=0)
    steps = 1 + max([last, *(item.step for item in record.health)])
    slowdown = np.full((len(ranks), steps), np.nan)
    for item in sorted(record.health, key=lambda item: item.step):
        known = np.nan if item.status == "fail_stop" else item.slowdown
        slowdown[ranks.index(item.rank), item.step :] = known
    return ranks, slowdown


def loss_plot(record: DemoRecord, markers: Sequence[Marker]) -> Figure:
    """The loss and its reference; below, their distance on a logarithmic axis."""
    figure, (upper, lower) = new_figure(4.2, rows=2, grid=True, sharex=True, height_ratios=(2.3, 1))
    for axes in (upper, lower):
        _x_range(axes, record)
    upper.set_ylabel("loss")
    lower.set_xlabel("step")
    reference = list(enumerate(record.reference))
    upper.plot(*_columns(reference), color=SECOND, linewidth=4.5, alpha=0.55, zorder=2)
    losses = [(seen.step, seen.loss) for seen in record.steps]
    upper.plot(*_columns(losses), color=SERIES, linewidth=1.4, zorder=3)
    _differences(lower, record)
    _draw_markers(upper, markers)
    return figure


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
        if period.plan.version % 2:
            axes.axvspan(period.start - 0.5, period.stop - 0.5, color=BAND, linewidth=0, zorder=0)
        if period.stop > period.start:
            axes.annotate(
                f"plan {period.plan.version}",
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
        plan = period.plan
        if plan.step_ms <= 0:
            continue
        span = (period.start - 0.4, period.stop - 0.6)
        axes.hlines(plan.step_ms, *span, color=SECOND, linewidth=1.6, linestyle="--", zorder=3)
        if plan.bound_ms > 0:
            axes.hlines(plan.bound_ms, *span, color=SECOND, linewidth=1.4, linestyle=":", zorder=3)


def _draw_markers(axes: Axes, markers: Sequence[Marker]) -> None:
    """Numbered marks above the axes; the page explains each number."""
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
