"""The summary of an analysis on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from resihp.contracts import Cause, Status
from resihp.formatting import ended_early, plural, ratio

from ._analysis import Analysis

CAUSE_WORDS = {
    Cause.NONE: "nothing in particular",
    Cause.DEVICE: "a slow device",
    Cause.STAGE_IMBALANCE: "stages of unequal weight",
    Cause.SEQUENCE_IMBALANCE: "sequences of unequal length",
    Cause.COMMUNICATION: "communication",
    Cause.HOST: "the host",
}
_COLOURS = {Status.FAIL_SLOW: "red", Status.FAIL_STOP: "red", Status.SUSPECT: "yellow"}
_BAR = 30


def print_summary(analysis: Analysis, console: Console | None = None) -> None:
    """Print the findings of an analysis."""
    console = console or Console(soft_wrap=not sys.stdout.isatty())
    diagnosis = analysis.diagnosis
    console.print(f"[bold]{escape(analysis.trace.job.name)}[/bold]  {' · '.join(facts(analysis))}")
    first, *others = diagnosis.detail
    console.print(f"\n{first}", style="bold", highlight=False)
    for sentence in others:
        console.print(sentence, highlight=False)
    console.print(f"\n{headline(analysis)}", highlight=False)
    console.print(_attribution(analysis))
    if analysis.whatif is not None:
        for line in _published(analysis):
            console.print(f"  {line}", highlight=False)
    _print_devices(analysis, console)


def facts(analysis: Analysis) -> list[str]:
    """Size, length and format of the recording; the layout is the last one of the job."""
    layout, trace = analysis.layout, analysis.trace
    step_ms = analysis.costs.step * (1.0 if analysis.whatif is None else 1e3)
    layouts = [trace.job.layout, *(plan.layout for plan in trace.plans)]
    moved = sum(one != other for one, other in pairwise(layouts))
    changes = {"change of layout": moved, "change of quotas or schedule": len(trace.plans) - moved}
    return [
        f"{plural(layout.dp, 'replica')} × {plural(layout.pp, 'stage')} × TP {analysis.tp}",
        *(plural(count, noun) for noun, count in changes.items() if count),
        f"{plural(len(trace.ranks), 'rank')} recorded",
        plural(len(trace.steps), "step"),
        f"{step_ms:.0f} ms per step",
        *([f"{trace.untimed_ms:.0f} ms more in no pass"] if trace.untimed_ms >= 0.5 else ()),
        analysis.trace.format,
    ]


def health(analysis: Analysis) -> str:
    """Summarise the verdicts, and whose records end early, in one sentence."""
    devices = plural(len(analysis.verdicts), "recorded device")
    unwell = {v.rank for v in analysis.verdicts if v.status is not Status.HEALTHY}
    ended = ended_early({r: step for r, step in analysis.ended.items() if r not in unwell})
    if unwell:
        verb = "is" if len(unwell) == 1 else "are"
        return "; ".join([f"{len(unwell)} of {devices} {verb} not healthy", *ended]) + "."
    if ended:
        return f"{devices}: {'; '.join(ended)}; the others are healthy."
    return f"{devices}, {'healthy' if len(analysis.verdicts) == 1 else 'all healthy'}."


def headline(analysis: Analysis) -> str:
    """The slowdown of the job and the cause with the largest share of it."""
    diagnosis = analysis.diagnosis
    costs = analysis.costs
    lost = sum(costs.lost.values()) / costs.step if costs.step else 0.0
    said = (
        f"Steps take {ratio(diagnosis.slowdown)} the ideal; all causes together cost {lost:.1%} of "
        "the step"
    )
    if diagnosis.root_cause is Cause.NONE:
        return f"{said}. No cause stands out:"
    share = diagnosis.attribution[diagnosis.root_cause]
    return f"{said}, {share:.0%} of that due to {CAUSE_WORDS[diagnosis.root_cause]}:"


def _attribution(analysis: Analysis) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    shares = sorted(analysis.diagnosis.attribution.items(), key=lambda item: -item[1])
    for cause, share in shares:
        bar = "█" * round(_BAR * share)
        table.add_row("", cause.value, f"{share:6.1%}", f"[cyan]{bar}[/cyan]")
    return table


def _published(analysis: Analysis) -> Iterator[str]:
    """The published measures (OSDI'25) with their meaning."""
    whatif = analysis.whatif
    assert whatif is not None
    yield f"S {whatif.slowdown:.4f}: the step over the ideal one, {whatif.ideal_step_s:.4f} s"
    for name, value, words in (
        ("M_W", whatif.m_w, "goes with the slowest 3% of the workers"),
        ("M_S", whatif.m_s, "goes with the last stage"),
    ):
        if value is not None:
            yield f"{name} {value:.4f}: the share of the loss in S that {words}"


def _print_devices(analysis: Analysis, console: Console) -> None:
    console.print(f"\n{health(analysis)}")
    for verdict, place in analysis.unwell():
        since = "" if verdict.since_step is None else f" since step {verdict.since_step}"
        colour = _COLOURS.get(verdict.status, "cyan")
        console.print(
            f"  rank {verdict.rank} (replica {place['dp']}, stage {place['pp']}): "
            f"[{colour}]{verdict.status.value}[/{colour}] {ratio(verdict.slowdown)}{since}",
            highlight=False,
        )
        for sentence in verdict.evidence:
            console.print(f"    {sentence}", highlight=False)
