"""`resihp analyze`: why a recorded job was slow."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from ._app import app, readable

_HELP = """
Explain a **recorded job**: which devices are slow, and what else costs time.

TRACE is a file, or a folder with one file for each rank: a recording by ResiHP (parquet), parquet
in the layout of the published what-if traces, or JSON of the PyTorch profiler (also gzipped).

**Examples**

- `resihp analyze run.parquet` — for people
- `resihp analyze run.parquet --json` — one JSON object
- `resihp analyze run.parquet --html report.html --perfetto timeline.json` — to look at; the
  timeline opens in ui.perfetto.dev

Exit status: 0 whatever it finds, 2 with one clear line for a file that it cannot read.
"""


@app.command("analyze", help=_HELP)
def analyze_command(
    trace: Annotated[Path, typer.Argument(help="Recording: a file or a folder.", metavar="TRACE")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a report that needs no other file.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write the actual and the ideal timeline.")
    ] = None,
) -> None:
    """Reads, analyzes, writes what was asked for."""
    from resihp.offline import analyze, read_trace

    with readable("analyze"):
        analysis = analyze(read_trace(trace))
        if html is not None:
            from resihp.offline.report import write_html

            write_html(analysis, html)
        if perfetto is not None:
            from resihp.offline.perfetto import write_perfetto

            write_perfetto(analysis, perfetto)
    if json:
        typer.echo(dumps(analysis.to_json()))
    else:
        from resihp.offline.summary import print_summary

        print_summary(analysis)
