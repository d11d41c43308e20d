"""`resihp serve`: the sidecar."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._app import app, fail

if TYPE_CHECKING:
    from service.settings import Settings

_HELP = """
Start the **sidecar**: telemetry in, verdicts and plans out.

It listens on `http://127.0.0.1:8700`, with a dashboard at `/` and its API at `/docs`. Its data are
in Redis: the server given by `--redis`, `RESIHP_REDIS_URL` or `REDIS_URL`, else an embedded one in
the data folder, so that nothing else needs to be installed.

Training jobs on this machine find it: `resihp.instrument(model, optimizer)`; others by `url=...` or
`RESIHP_URL`.

**Examples**

- `resihp serve` — for one machine
- `resihp serve --host 0.0.0.0 --token SECRET` — for a cluster; jobs set `RESIHP_TOKEN`
- `resihp serve --processes 2` — with two API processes on the port
- `resihp serve --no-worker` and a few `resihp worker` — for many jobs

Each other option is also an environment variable with the prefix `RESIHP_` (`RESIHP_PORT`). Limits
and thresholds are environment variables only (`RESIHP_MAX_JOBS`, `RESIHP_MIN_SLOWDOWN`): see
`docs/service.md`.

Exit status: 0 when stopped by a signal, 2 with one clear line when it cannot start.
"""

Data = Annotated[
    Path | None,
    typer.Option(help="Data folder.  [default: ~/.local/state/resihp]", show_default=False),
]
Redis = Annotated[
    str | None,
    typer.Option(help="URL of a Redis, e.g. redis://host:6379/0."),
]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
LogFormat = Annotated[str | None, typer.Option(help="console or json (one object a line).")]


@app.command("serve", help=_HELP)
def serve_command(
    host: Annotated[str | None, typer.Option(help="Address to bind.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind; 0 picks a free one.")] = None,
    data: Data = None,
    redis: Redis = None,
    token: Annotated[
        str | None,
        typer.Option(help="Bearer token required in requests.", envvar="RESIHP_TOKEN"),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="API processes on the port.  [default: 1]")
    ] = None,
    worker: Annotated[
        bool | None, typer.Option("--worker/--no-worker", help="Run a worker process as well.")
    ] = None,
    parent: Annotated[
        int | None,
        typer.Option(help="Process id of the program that starts it, with which it ends."),
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="File for url and pid (JSON), written once it serves.")
    ] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Start the sidecar."""
    settings = settings_from(
        host=host, port=port, data=data, redis_url=redis, token=token,
        processes=processes, worker=worker, parent=parent, ready_file=ready_file,
        log_level=log_level, log_format=log_format,
    )  # fmt: skip
    from service.errors import StartError  # a web framework, with detector and scheduler
    from service.server import serve

    try:
        serve(settings)
    except StartError as error:
        fail(str(error))


def settings_from(**given: Any) -> Settings:
    """Settings from the environment, overridden by the given options."""
    from pydantic import ValidationError

    from service.logs import configure_logs, logger
    from service.settings import Settings, unknown_variables

    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = first["msg"].removeprefix("Value error, ")
        fail(f"{where}: {problem}" if where else problem)
    configure_logs(settings)
    if unknown := unknown_variables(os.environ):
        named = (f"{name} ({near}?)" if near else name for name, near in unknown.items())
        logger("resihp.settings").warning("unknown variables ignored", names=", ".join(named))
    return settings
