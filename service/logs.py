"""Structured logs of the sidecar and the web server, as text or as JSON lines."""

from __future__ import annotations

import logging
import multiprocessing
import sys

import structlog

from .settings import Settings


def _add_process(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Add the name of the process if it is one of several of a sidecar."""
    if multiprocessing.parent_process() is not None:
        event.setdefault("process", multiprocessing.current_process().name)
    return event


_SHARED: tuple[structlog.typing.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    _add_process,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """A structured logger on top of `logging`, with the levels and handlers set there.

    This holds without `configure_logs` too, as in a program that embeds the app: structlog with
    its default configuration prints every record, at every level.
    """
    found: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return found


def configure_logs(settings: Settings) -> None:
    """Send all log records to stderr in one format. Called by commands, never on import."""
    as_json = settings.log_format == "json"
    last: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if as_json
        else [
            # Tracebacks with local variables would show tokens and block the event loop.
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_SHARED,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    # uvicorn's messages at start and stop repeat those of the sidecar.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_not_start_error)


def _is_not_start_error(record: logging.LogRecord) -> bool:
    """Filter out tracebacks of a failed start, which the command reports in one line."""
    message = record.getMessage()
    return "StartError" not in message and "Application startup failed" not in message
