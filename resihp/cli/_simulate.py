"""`resihp simulate`: a timeline of faults against several policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from json import dumps
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._app import app, parsed, readable

if TYPE_CHECKING:
    from resihp.contracts import Job
    from scheduler import PolicyRun, Scenario

_HELP = """
Simulate a **timeline of faults** on a job under several policies and compare them.

JOB is a TOML file, and so is SCENARIO: `hours`, `restart_s`, and for each `[[fault]]` the fields
`at_s`, `rank`, `speed` and, where the device recovers, `until_s`.

**Examples**

- `resihp simulate job.toml --scenario faults.toml`
- `resihp simulate job.toml --scenario faults.toml --policy joint --policy malleus --plot out.svg`

Exit status: 0, or 2 with one line for invalid input.
"""


@app.command("simulate", help=_HELP)
def simulate_command(
    job_file: Annotated[Path, typer.Argument(help="Job description (TOML).", metavar="JOB")],
    scenario_file: Annotated[Path, typer.Option("--scenario", help="Faults over time (TOML).")],
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy to simulate; repeatable.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write throughput over time (png, svg or pdf).")
    ] = None,
) -> None:
    """Simulate the scenario, print a table or JSON, and plot."""
    from resihp.contracts import ContractError
    from scheduler import POLICIES, parse_job, parse_scenario

    names = policy or list(POLICIES)
    with readable("simulate"):
        unknown = [name for name in names if name not in POLICIES]
        if unknown:
            raise ContractError("policy", f"must be one of {', '.join(POLICIES)}, not {unknown[0]}")
        job = parsed(job_file, parse_job)
        scenario = parsed(scenario_file, parse_scenario)
        results = _play(job, scenario, names, quiet=json)
        if plot is not None:
            _draw(job, results, plot)
    if json:
        _print_json(results)
    else:
        _print_table(job, results)


def _play(job: Job, scenario: Scenario, names: Sequence[str], *, quiet: bool) -> list[PolicyRun]:
    from rich.console import Console
    from rich.progress import Progress

    from scheduler import play_scenario

    console = Console(stderr=True)
    quiet = quiet or not console.is_terminal  # elsewhere the bar leaves an empty line
    with Progress(console=console, disable=quiet, transient=True) as bar:
        tasks = {name: bar.add_task(name, total=3600.0 * scenario.hours) for name in names}
        return play_scenario(
            job, scenario, names, lambda name, seconds: bar.update(tasks[name], completed=seconds)
        )


def _print_json(results: Sequence[PolicyRun]) -> None:
    rows = []
    for played in results:
        segments = [asdict(segment) for segment in played.segments]
        for segment in segments:
            segment["step_ms"] = segment["step_ms"] if isfinite(segment["step_ms"]) else None
        rows.append(
            {
                "policy": played.policy,
                "goodput": played.goodput,
                "paused_s": played.paused_s,
                "segments": segments,
            }
        )
    typer.echo(dumps({"fault_free_step_ms": results[0].fault_free_ms, "policies": rows}))


def _print_table(job: Job, results: Sequence[PolicyRun]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from scheduler import POLICIES

    table = Table(title=f"{escape(job.name)}: completed work under faults", title_justify="left")
    table.add_column("policy")
    table.add_column("of fault-free", justify="right")
    table.add_column("paused", justify="right")
    table.add_column("longest step", justify="right")
    table.add_column("source")
    best = max(played.goodput for played in results)
    for played in sorted(results, key=lambda p: -p.goodput):
        worst = max(segment.step_ms for segment in played.segments)
        table.add_row(
            played.policy,
            f"{played.goodput:.1%}",
            f"{played.paused_s:.1f} s",
            f"{worst:.0f} ms" if isfinite(worst) else "cannot run",
            POLICIES[played.policy].source,
            style="bold" if played.goodput == best else None,
        )
    Console().print(table)


def _draw(job: Job, results: Sequence[PolicyRun], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from resihp.contracts import ContractError
    from scheduler import throughput

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for played in results:
        edges, rates = throughput(played, job.microbatches)
        wide = 2.4 if played.policy == "joint" else 1.2
        axes.step(edges, rates, where="post", label=played.policy, linewidth=wide)
    axes.set(xlabel="hours", ylabel="microbatches per second", ylim=(0, None), title=job.name)
    axes.legend(ncols=3, fontsize="small")
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ContractError("plot", str(error)) from None
