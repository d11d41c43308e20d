"""`resihp replay`: a recorded job, step by step, through the detector."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from resihp.formatting import ended_early, listed, plural, rank_list, ratio

from ._app import app, readable

if TYPE_CHECKING:
    from rich.console import Console

    from resihp.client import Client
    from resihp.contracts import Job, TelemetryBatch, Verdict
    from resihp.offline import Trace

_HELP = """
Replay a **recorded job** step by step and print every verdict as it changes.

The detector runs in this process or, with `--url`, in a running sidecar, whose dashboard shows the
job as `NAME (replay)` as if it ran now. TRACE is in any format that `resihp analyze` reads. A
recording in which the plan changed, as that of `resihp demo`, is replayed in this process only.

**Examples**

- `resihp replay run.parquet` — as fast as possible
- `resihp replay run.parquet --url http://127.0.0.1:8700 --rate 2` — two steps a second

Exit status: 0 for any verdict, 2 with one clear line for a file that cannot be read or a sidecar
that does not answer or gives no verdicts.
"""
_PATIENCE_S = 20.0  # until the sidecar has verdicts on the last step
_POLL_S = 0.5
_UNKNOWN = 404  # status of the sidecar's answer about a job that it does not have


@app.command("replay", help=_HELP)
def replay_command(
    trace: Annotated[Path, typer.Argument(help="Recording: a file or a folder.", metavar="TRACE")],
    url: Annotated[str | None, typer.Option(help="Sidecar to replay through.")] = None,
    token: Annotated[
        str | None, typer.Option(help="Its bearer token.", envvar="RESIHP_TOKEN")
    ] = None,
    rate: Annotated[
        float, typer.Option(help="Steps per second; 0: as fast as possible.", min=0.0)
    ] = 0.0,
) -> None:
    """Replay a trace and print a summary of the final verdicts."""
    from rich.console import Console

    from resihp.offline import read_trace
    from resihp.offline._analysis import LastSteps

    console = Console(soft_wrap=True)
    with readable("replay"):
        recorded = read_trace(trace)
        seen = LastSteps(recorded)
        batches = seen.of(_paced(recorded, console, rate))
        if url is None:
            verdicts = _local(recorded, batches, console)
        else:
            verdicts = _remote(recorded, batches, console, rate, url, token)
        found = summary(verdicts, seen.ended)
    steps = plural(len(recorded.steps), "step")
    console.print(f"\n{steps} replayed: {found}", highlight=False)


def summary(verdicts: Iterable[Verdict], ended: Mapping[int, int] = MappingProxyType({})) -> str:
    """The ranks of each status except healthy, the most serious first, with their slowdowns.

    `ended` has the last step of ranks whose records end early: of those the detector knows nothing
    bad, but they are not called healthy.
    """
    from resihp.contracts import Status

    ordered = sorted(verdicts, key=lambda verdict: verdict.rank)
    parts = []
    for status in (Status.FAIL_STOP, Status.FAIL_SLOW, Status.SUSPECT, Status.INCONCLUSIVE):
        if found := [verdict for verdict in ordered if verdict.status is status]:
            verb = "is" if len(found) == 1 else "are"
            slowdowns = listed(ratio(verdict.slowdown) for verdict in found)
            factors = f" ({slowdowns})" if status is Status.FAIL_SLOW else ""
            parts.append(f"{rank_list(v.rank for v in found)} {verb} {status.value}{factors}")
    healthy = {verdict.rank for verdict in ordered if verdict.status is Status.HEALTHY}
    gone = {rank: step for rank, step in ended.items() if rank in healthy}
    parts += ended_early(gone)
    if not parts:
        return "all ranks are healthy"
    if rest := len(healthy) - len(gone):
        parts.append(f"{plural(rest, 'rank')} healthy")
    return "; ".join(parts)


def _local(trace: Trace, batches: Iterable[TelemetryBatch], console: Console) -> list[Verdict]:
    from resihp.offline._analysis import TraceJudge

    judge = TraceJudge(trace)
    for change in judge.changes(batches):
        _show(console, [change.verdict])
    return list(judge.verdicts.values())


def _remote(
    trace: Trace,
    batches: Iterable[TelemetryBatch],
    console: Console,
    rate: float,
    url: str,
    token: str | None,
) -> list[Verdict]:
    from resihp.client import Client
    from resihp.contracts import ServiceError, TraceError
    from resihp.contracts.codec import WireFormat, encode

    if trace.plans:
        raise TraceError(f"{trace.path}: the job changed its plan; replay it without --url")
    # A job with the recorded name may be running.
    job = replace(trace.job, name=trace.job.name[:119] + " (replay)")
    client = Client(url, token)
    try:
        _register_anew(client, job)
        shown: dict[int, str] = {}

        def final_verdicts() -> list[Verdict] | None:
            verdicts = client.verdicts(job.name)
            _show(console, (v for v in verdicts if shown.get(v.rank, "healthy") != v.status.value))
            shown.update({verdict.rank: verdict.status.value for verdict in verdicts})
            reached = max((v.step for v in verdicts if v.step is not None), default=-1)
            return verdicts if reached >= trace.steps[-1] else None

        for batch in batches:
            client.send_telemetry(job.name, encode(batch), WireFormat.MSGPACK)
            if rate > 0:
                final_verdicts()
        deadline = time.monotonic() + _PATIENCE_S
        while (final := final_verdicts()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        final = final or client.verdicts(job.name)
        if all(verdict.step is None for verdict in final):
            raise ServiceError(
                f"{url} accepted all steps and has no verdicts; is a worker running?"
            )
        return final
    finally:
        client.close()


def _register_anew(client: Client, job: Job) -> None:
    """Registers a job without what an earlier replay left under its name."""
    from resihp.contracts import ServiceError

    try:
        client.delete(job.name)
    except ServiceError as error:
        if error.status != _UNKNOWN:
            raise
    client.register(job)


def _paced(trace: Trace, console: Console, rate: float) -> Iterator[TelemetryBatch]:
    """The batches at `rate` steps per second at most, with a progress bar."""
    from rich.markup import escape
    from rich.progress import track

    start = time.monotonic()
    batches = track(
        trace.batches(),
        description=escape(trace.job.name),
        total=len(trace.steps),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    for index, batch in enumerate(batches):
        if rate > 0:
            time.sleep(max(0.0, start + index / rate - time.monotonic()))
        yield batch


def _show(console: Console, verdicts: Iterable[Verdict]) -> None:
    for verdict in verdicts:
        step = "" if verdict.step is None else f"step {verdict.step}: "
        console.print(
            f"{step}rank {verdict.rank} {verdict.status.value} {verdict.slowdown:.2f}x",
            highlight=False,
        )
        for sentence in verdict.evidence:
            console.print(f"  {sentence}", highlight=False, style="dim")
