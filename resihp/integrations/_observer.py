"""Observation of one training by the callback of a trainer."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar

from resihp.client import Client
from resihp.formatting import plural
from resihp.hooks import Monitor
from resihp.hooks._stats import FailureLog
from resihp.hooks.monitor import DEFAULT_URL
from resihp.instrumentation import InstrumentedMonitor, instrument
from resihp.instrumentation._inferred_job import job_name, require_valid

from ._verdicts import VerdictReader, largest_slowdown, summary

P = ParamSpec("P")
R = TypeVar("R")

_END_TIMEOUT_S = 2.0
SLOWDOWN, VERDICT, QUOTAS = "resihp/slowdown_max", "resihp/verdict", "resihp/quotas"
"""Names under which the trainer's logger gets the largest slowdown, the worst verdict, and the
microbatches of each rank where they can change."""


class TrainingObserver:
    """Monitor of a training, and on one rank a reader of the verdicts on it.

    No method raises: failures are counted in `monitor.stats`, and logged once. In a `with`
    statement it is closed at the end, with the error that ended the block. Copies and pickles are
    observers with the same options and no training.

    options       of `resihp.instrument`. Raises `TypeError` for one that it does not have, and
                  `ContractError` for a value that no job can have
    instrument    used in its place
    logging_rank  rank that reads the verdicts and has the trainer's log
    monitor       of the present training, or of the last one; None before the first
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        instrument: Callable[..., InstrumentedMonitor] = instrument,
        *,
        logging_rank: int = 0,
    ) -> None:
        _check(options)
        self.monitor: InstrumentedMonitor | None = None
        self._instrument, self._logging_rank = instrument, logging_rank
        self._options = dict(options)
        self._failures = FailureLog()
        self._reader: VerdictReader | None = None
        self._is_open = False
        self._job = self._url = ""
        self._token: str | None = None

    def __reduce__(self) -> Any:
        return partial(TrainingObserver, logging_rank=self._logging_rank), (
            self._options,
            self._instrument,
        )

    @property
    def reads_verdicts(self) -> bool:
        """True on the rank that logs them."""
        return self._reader is not None

    @property
    def job(self) -> str:
        """Name of the job; "" before the first training."""
        return self._job

    @property
    def client(self) -> Any:
        """Client of the sidecar."""
        return self._options.get("client") or Client(self._url, self._token)

    def warn(self, kind: str, message: str) -> None:
        """Log a warning on the logging rank, unless one of this kind was logged before."""
        if self.reads_verdicts and self.monitor is not None:
            self.monitor._recording.failures.warn_once(kind, message)

    def begin(self, target: Any, optimizer: Any, step: int, **defaults: Any) -> None:
        """Observe a training of `target` that begins with `step`."""
        self.safely(self._begin)(target, optimizer, step, defaults)

    def metrics(self) -> dict[str, Any]:
        """Return what is to be logged; nothing while no verdict is known, and on other ranks."""
        reader = self._reader
        verdicts = () if reader is None else reader.latest
        if reader is None or not verdicts:
            return {}
        return {SLOWDOWN: largest_slowdown(verdicts), VERDICT: summary(verdicts, reader.advice)}

    def end(self, error: BaseException | None = None) -> str | None:
        """Send what is left and the `error` that ends the training, leave it as it was, and return
        a summary on the logging rank; None on others and if there is no training."""
        return self.safely(self._end)(error) if self._is_open else None

    def close(self, error: BaseException | None = None) -> None:
        """End the training, and print its summary on the logging rank."""
        summary = self.end(error)
        if summary is not None:
            print(summary, flush=True)  # noqa: T201 as trainers without a logger do

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def safely(self, callback: Callable[P, R]) -> Callable[P, R | None]:
        """Return `callback` for use by a trainer: its failure is counted, not raised."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return callback(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 the boundary: training goes on
                self._failed(error)
                return None

        return call

    def _begin(self, target: Any, optimizer: Any, step: int, defaults: Mapping[str, Any]) -> None:
        if self._is_open:
            self._end(None)
        options = {**defaults, **self._options}
        options["job"] = self._job = options.get("job") or job_name()
        self._url = options.get("url") or os.environ.get("RESIHP_URL") or DEFAULT_URL
        self._token = options.get("token") or os.environ.get("RESIHP_TOKEN")
        self.monitor = monitor = self._instrument(target, optimizer, **options)
        self._is_open = True
        monitor.current_step = step
        if monitor.rank == self._logging_rank:
            self._reader = VerdictReader(
                self.client,
                self._job,
                is_due=lambda: monitor.stats.sent > 0,
                on_failure=self._failed,
            )

    def _end(self, error: BaseException | None) -> str | None:
        self._is_open = False
        reader, self._reader = self._reader, None
        if self.monitor is None:
            return None
        self.monitor.remove()
        self.monitor._close(_END_TIMEOUT_S, error)
        if reader is None:
            return None
        reader.finish(_END_TIMEOUT_S)
        stats = self.monitor.stats
        if not reader.latest:
            return f"ResiHP: no verdict ({self._url}: {_sent(stats.sent, stats.dropped)})"
        verdicts = reader.latest
        return (
            f"ResiHP: {summary(verdicts, reader.advice)} ({plural(len(verdicts), 'rank')}; "
            f"rank {self.monitor.rank}: {_sent(stats.sent, stats.dropped)})"
        )

    def _failed(self, error: Exception) -> None:
        failures = self.monitor._recording.failures if self.monitor is not None else self._failures
        failures.add("the callback of a trainer", error)


def _sent(sent: int, dropped: int) -> str:
    return f"{plural(sent, 'record')} sent, {dropped:,} lost"


def _check(options: Mapping[str, Any]) -> None:
    known = {*inspect.signature(instrument).parameters, *inspect.signature(Monitor).parameters}
    known -= {"target", "optimizer", "options"}
    for name in options:
        if name not in known:
            raise TypeError(f"there is no option {name!r}, but {sorted(known)}")
    require_valid(
        options.get("job") or job_name(),
        options.get("layout"),
        options.get("microbatches"),
        options.get("actions", ()),
    )
