"""DeepSpeed's engines, with ZeRO or a pipeline."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from resihp.hooks._sender import fatal_error
from resihp.instrumentation._deepspeed_engines import is_pipeline_engine

from ._observer import SLOWDOWN, VERDICT, TrainingObserver

__all__ = ["observe"]


def observe(engine: Any, **options: Any) -> TrainingObserver:
    """Observe the training by an engine: on every rank, after `deepspeed.initialize`.

    Rank 0 writes `resihp/slowdown_max` to the engine's monitors with each step, logs
    `resihp/verdict` when it changes, and prints a line in `close()` of the result, at the end of a
    `with` statement or of the process. Nothing here fails or stops training.

    options  of `resihp.instrument`. Raises `TypeError` for one that it does not have
    """
    observer = TrainingObserver(options)
    observer.begin(engine, None, engine.global_steps)
    monitor = observer.monitor
    if monitor is not None and observer.reads_verdicts:
        method = "train_batch" if is_pipeline_engine(engine) else "step"
        monitor._patches.wrap(engine, method, _EngineLog(engine, observer).after)
    atexit.register(lambda: observer.close(fatal_error()))
    return observer


class _EngineLog:
    """Log of an engine, and its monitors, for verdicts."""

    def __init__(self, engine: Any, observer: TrainingObserver) -> None:
        self._engine, self._observer = engine, observer
        self._logged = ""

    def after(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `step`, after whose updates the verdicts are logged."""
        log = self._observer.safely(self._log)

        def step_and_log(*args: Any, **kwargs: Any) -> Any:
            done = self._engine.global_steps
            result = step(*args, **kwargs)
            if self._engine.global_steps > done:
                log()
            return result

        return step_and_log

    def _log(self) -> None:
        found = self._observer.metrics()
        if not found:
            return
        engine, text = self._engine, found[VERDICT]
        samples = engine.global_samples
        if engine.monitor.enabled:
            engine.monitor.write_events([(SLOWDOWN, found[SLOWDOWN], samples)])
        if text != self._logged:
            self._logged = text
            level = logging.INFO if text == "healthy" else logging.WARNING
            _logger().log(level, "%s: %s (step %d)", VERDICT, text, engine.global_steps)
            self._observer.safely(_write_text)(engine.monitor, text, samples)


def _logger() -> Any:
    return import_module("deepspeed.utils").logger


def _write_text(monitors: Any, text: str, samples: int) -> None:
    """Write the verdict to those of the engine's monitors that hold text."""
    for name in ("csv_monitor", "wandb_monitor"):
        one = getattr(monitors, name, None)
        if one is not None:
            one.write_events([(VERDICT, text, samples)])
    board = getattr(getattr(monitors, "tb_monitor", None), "summary_writer", None)
    if board is not None:  # which refuses text among numbers
        board.add_text(VERDICT, text, samples)
