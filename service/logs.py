"""Structured logs of the whole process: ours and the web server's, as text or as JSON lines."""

from __future__ import annotations

import logging
import sys

import structlog

from .settings import Settings

_SHARED: tuple[structlog.typing.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """A structured logger that goes through `logging`, whose levels and handlers hold for it.

    Also where `configure_logs` was not called, as by a program that embeds the app: structlog by
    itself would print every record, those for debugging as well.
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
    """Send every log record to stderr in one format. Called by the commands, never by imports."""
    as_json = settings.log_format == "json"
    last: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if as_json
        else [
            # Tracebacks with locals would show tokens, and take seconds of the event loop each.
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
    # The web server's own start and stop messages say what ours say better.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_not_start_error)


def _is_not_start_error(record: logging.LogRecord) -> bool:
    """The command prints a failed start in one line; no traceback beside it."""
    message = record.getMessage()
    return "StartError" not in message and "Application startup failed" not in message
