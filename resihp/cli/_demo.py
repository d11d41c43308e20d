"""`resihp demo`."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._app import app, readable

if TYPE_CHECKING:
    from resihp.demo.training.settings import DemoSettings


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps.", min=20)] = 72,
    slow_rank: Annotated[int, typer.Option(help="Rank to slow down; -1 for none.")] = 5,
    slow_factor: Annotated[float, typer.Option(help="Factor of its slowdown.", min=1.0)] = 1.5,
    dead_rank: Annotated[int, typer.Option(help="Rank to kill; -1 for none.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the model and the order of the text.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report, logs and data.", show_default="temporary"),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the record of the run to this file.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write the job's recording to this file, for `resihp analyze`.",
            show_default="trace.parquet in that folder",
        ),
    ] = None,
) -> None:
    """Run the whole loop on this machine: a slow rank is compensated, a killed one survived.

    Trains a small Llama on real text over eight processes (2 replicas x 2 stages x 2-way tensor
    parallel) with a sidecar. One rank is slowed down in mid-run, another is killed later; the
    layout changes live, without a restart. Ends with a summary and an HTML report. The speed of
    the emulated devices follows what this machine can compute, so that other load does no harm.

    Exit status: 0 if the slow rank was named (and no other), the plan was applied live, the kill
    was survived and the job ran faster after the resize than before; 1 if not; 2 if a folder or
    file cannot be written.
    """
    from resihp.demo.training.settings import DemoSettings

    settings = DemoSettings(
        steps=steps,
        slow_rank=None if slow_rank < 0 else slow_rank,
        slow_factor=slow_factor,
        slow_at=round(0.3 * steps),
        dead_rank=None if dead_rank < 0 else dead_rank,
        dead_at=round(0.72 * steps),
        seed=seed,
    )
    for option, rank in (("--slow-rank", slow_rank), ("--dead-rank", dead_rank)):
        if rank >= len(settings.layout.ranks):
            reason = f"the demo has {len(settings.layout.ranks)} ranks, from 0 on"
            raise typer.BadParameter(reason, param_hint=option)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends ranks and sidecar, too
    with readable("demo"):
        folder = out or Path(tempfile.mkdtemp(prefix="resihp-demo-"))
        trace = trace or folder / "trace.parquet"
        for needed in (folder, trace.parent, *([json_path.parent] if json_path else [])):
            needed.mkdir(parents=True, exist_ok=True)
    raise typer.Exit(0 if _play(settings, folder, json_path, trace) else 1)


def _play(settings: DemoSettings, folder: Path, json_path: Path | None, trace: Path) -> bool:
    """Run and display the demo, write its files; returns True if all checks passed."""
    from rich.console import Console

    from resihp.contracts import to_json
    from resihp.demo.live.display import LiveDisplay
    from resihp.demo.report import write_report
    from resihp.demo.run import DemoError, play
    from resihp.demo.summary import print_summary
    from resihp.demo.training.trace_log import write_recording

    console = Console()
    try:
        with LiveDisplay(settings.plan(), settings.steps, console=console) as display:
            record = play(settings, folder, display)
    except DemoError as error:
        typer.echo(str(error), err=True)
        return False
    report = folder / "report.html"
    with readable("demo"):
        write_report(record, report)
        print_summary(record, report, console)
        if json_path is not None:
            document = {**to_json(record), "passed": record.passed}
            json_path.write_text(json.dumps(document, indent=1))
        write_recording(folder, settings.at(record.flops_per_ms).job(), record.plans, trace)
    console.print(f"The job's recording: resihp analyze {trace}", soft_wrap=True)
    return record.passed
