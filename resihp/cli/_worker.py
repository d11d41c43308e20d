"""`resihp worker`: one more worker for a sidecar."""

from __future__ import annotations

import signal
import threading

import typer

from ._app import app, fail
from ._serve import Data, LogFormat, LogLevel, Redis, settings_from

_HELP = """
Start one more **worker** for a sidecar.

A worker owns some of the jobs: it applies their telemetry to the detector, requests plans from the
scheduler, and saves both. Jobs are distributed over all workers by the processor time they cost;
when one dies, the others resume its jobs from the last saved state.

Use the same `--data` as the sidecar (its embedded Redis on this machine) or the same `--redis`. A
worker started before its sidecar waits for it, half a minute at most.
"""


@app.command("worker", help=_HELP)
def worker_command(
    data: Data = None,
    redis: Redis = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Start a worker."""
    from service.errors import StartError
    from service.worker.loop import work

    settings = settings_from(data=data, redis_url=redis, log_level=log_level, log_format=log_format)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        work(settings, stop)
    except StartError as error:
        fail(str(error))
    typer.echo("resihp: worker stopped", err=True)
