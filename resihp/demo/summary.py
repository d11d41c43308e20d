"""The summary of a run on the terminal."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from resihp.contracts import Status
from resihp.formatting import duration, plural

from .descriptions import layout_lines, pace_lines, plan_line, switch_line, verdict_line
from .findings import (
    PHASES,
    detections,
    loss_difference,
    outcome,
    recovered_sentence,
    scripted,
    step_times,
)
from .record import DemoRecord

_WIDTH = 110


def print_summary(record: DemoRecord, report_path: Path | None, console: Console) -> None:
    """Print the summary of a run; `report_path` is None without a report."""
    width = min(console.width, _WIDTH)
    body = Table.grid(padding=(0, 2))
    body.add_column(style="dim", width=11)
    body.add_column(width=max(width - 17, 20))
    for name, content in _sections(record):
        body.add_row(name, Padding(content, (0, 0, 1, 0)))
    body.add_row("checks", _checks(record))
    title = Text(f" {outcome(record)} ", "bold #58b58d" if record.passed else "bold #e0703f")
    panel = Panel(body, title=title, border_style="dim", box=box.ROUNDED, width=width)
    console.print(panel)
    if report_path is not None:
        target = report_path.absolute()
        link = Text.assemble("Report: ", (str(report_path), f"cyan link {target.as_uri()}"))
        console.print(link, soft_wrap=True)


def _sections(record: DemoRecord) -> list[tuple[str, RenderableType]]:
    sections: list[tuple[str, RenderableType]] = [
        ("run", _lines(_run(record))),
        ("done to it", _lines(_script(record))),
        ("found", _lines(_found(record))),
        ("changed", _changed(record)),
        ("step time", _times(record)),
    ]
    difference = loss_difference(record)
    if difference is not None:
        line = (
            f"at most {difference.largest:.2g} from the undisturbed reference over "
            f"{plural(difference.steps, 'step')} (at step {difference.at_step})"
        )
        sections.append(("loss", Text(line)))
    if record.emulated:
        sections.append(("emulated", _lines(list(record.emulated), "dim")))
    return sections


def _lines(lines: list[str], style: str = "") -> Group:
    return Group(*(Text(line, style) for line in lines or ["nothing"]))


def _run(record: DemoRecord) -> list[str]:
    steps = len({seen.step for seen in record.steps})
    lines = [f"{plural(steps, 'step')} in {duration(record.seconds * 1000)} on {record.machine}"]
    return [*lines, record.trained] if record.trained else lines


def _script(record: DemoRecord) -> list[str]:
    lines = []
    slow, slow_at = scripted(record, "slow_rank"), scripted(record, "slow_at")
    if slow is not None and slow_at is not None:
        factor = record.script["slow_factor"]
        lines.append(f"rank {slow} slowed down to 1/{factor:g} of its speed from step {slow_at} on")
    dead, dead_at = scripted(record, "dead_rank"), scripted(record, "dead_at")
    if dead is not None and dead_at is not None:
        lines.append(f"rank {dead} killed (SIGKILL) in step {dead_at}")
    return lines


def _found(record: DemoRecord) -> list[str]:
    lines = []
    for item in detections(record):
        after = "a false alarm"
        if item.delay_steps is not None:
            after = f"said {plural(item.delay_steps, 'step')} after the fault"
        lines.append(f"{verdict_line(item.seen.verdict)} ({after})")
    lines += [
        f"{verdict_line(seen.verdict)} (said after step {seen.at_step})"
        for seen in record.verdicts
        if seen.verdict.status is Status.FAIL_STOP
    ]
    return lines


def _changed(record: DemoRecord) -> Group:
    parts: list[RenderableType] = []
    for switch in record.switches:
        plan = switch.plan
        below = [Text(reason, "dim") for reason in (*plan.reason, plan_line(plan)) if reason]
        below += [Text(line) for line in layout_lines(plan.layout, plan.quotas)]
        parts += [Text(switch_line(switch)), Padding(Group(*below), (0, 0, 0, 2))]
    return Group(*(parts or [Text("nothing")]))


def _times(record: DemoRecord) -> RenderableType:
    times = step_times(record)
    healthy = times["healthy"]
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", style="bold")
    table.add_column(justify="right", style="dim")
    for name, words in PHASES.items():
        ms = times[name]
        ratio = f"{ms / healthy:.2f}x healthy" if ms is not None and healthy else ""
        table.add_row(words, duration(ms), ratio if name != "healthy" else "")
    notes = [recovered_sentence(record), *pace_lines(record)]
    return Group(table, *(Text(note, "dim") for note in notes if note))


def _checks(record: DemoRecord) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column()
    table.add_column(style="dim")
    for check in record.checks:
        mark = Text("✓", "bold #58b58d") if check.passed else Text("✗", "bold #e0703f")
        table.add_row(mark, check.name, check.detail)
    return table if record.checks else Text("none")
