"""`resihp worker`: one more worker for a sidecar."""

from __future__ import annotations

import signal
import threading

import typer

from ._app import app
from ._serve import Data, LogFormat, LogLevel, Redis, fail, settings_from

_HELP = """
Start one more **worker** for a sidecar.

A worker owns some of the jobs: it applies their telemetry to the detector, asks the scheduler for
plans, and saves both. Jobs are spread over all workers; when one dies, the others take its jobs
over, where its last saved state ends.

Give it the same `--data` (the sidecar's embedded Redis on this machine) or the same `--redis`. One
that is started before its sidecar waits for half a minute.
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
    from service.worker.main import work

    settings = settings_from(data=data, redis_url=redis, log_level=log_level, log_format=log_format)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        work(settings, stop)
    except StartError as error:
        fail(str(error))
    typer.echo("resihp: worker stopped", err=True)
