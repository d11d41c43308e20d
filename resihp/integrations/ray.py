"""Ray Train: the loop of each worker, and the controller, which sees workers fail."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from resihp.client import Client
from resihp.contracts import Heartbeat
from resihp.contracts.job import acceptable_name
from resihp.hooks._sender import own_fault
from resihp.hooks._stats import FailureLog
from resihp.hooks.monitor import DEFAULT_URL

from ._observer import TrainingObserver

__all__ = ["ResiHPCallback", "observe"]

_TIMEOUT_S = 2.0
"""Longest that the controller waits for the sidecar, for the connection and for the answer."""

try:
    _train: Any = import_module("ray.train")
except ImportError:  # the names below can be imported still
    _train = None


def observe(
    model: Any, optimizer: Any = None, *, step: int = 0, **options: Any
) -> TrainingObserver:
    """Observe the training loop of a worker, inside `train_loop_per_worker`.

    Every worker calls it once, with what `prepare_model` returned, in a `with` statement: Ray ends
    workers without notice, and their errors too are known in the loop alone. On rank 0 `metrics()`
    of the result returns what to report, and the end prints a line. Nothing here fails or stops
    training.

    model, optimizer, options  as in `resihp.instrument`; the job has the name of the run
    step                       number of the first step
    """
    observer = TrainingObserver(options)
    observer.begin(model, optimizer, step)
    return observer


class ResiHPCallback(getattr(_train, "UserCallback", object)):  # type: ignore[misc]
    """Reports workers that failed or were preempted: `RunConfig(callbacks=[ResiHPCallback()])`.

    Ray calls it in the controller, at once where the sidecar would have to wait for the silence of
    a worker. A worker that takes the place of a lost one is healthy again by its first heartbeat.
    Nothing here fails or stops training.

    job         name; default RESIHP_JOB, else the name of the run
    url, token  of the sidecar; default RESIHP_URL and RESIHP_TOKEN where this object is made
    """

    def __init__(
        self, *, job: str | None = None, url: str | None = None, token: str | None = None
    ) -> None:
        self._job = job or os.environ.get("RESIHP_JOB")
        self._url = url or os.environ.get("RESIHP_URL") or DEFAULT_URL
        self._token = token or os.environ.get("RESIHP_TOKEN")
        self._failures = FailureLog()

    def after_exception(
        self, run_context: Any, worker_exceptions: Mapping[int, BaseException]
    ) -> None:
        """Report what ended each worker; the loss of another one is not its own fault."""
        try:
            self._report(run_context, worker_exceptions)
        except Exception as error:  # noqa: BLE001 the boundary: training goes on
            self._failures.add("reporting lost workers", error)

    def _report(self, run_context: Any, errors: Mapping[int, BaseException]) -> None:
        client = Client(self._url, self._token, timeout=_TIMEOUT_S)
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, error in errors.items():
            ranks_of[_cause(error)].append(rank)
        job = self._job or acceptable_name(run_context.run_config.name)
        for cause, ranks in ranks_of.items():
            heartbeat = Heartbeat(ranks=tuple(ranks), left=True, error=cause)
            client.send_heartbeat(job, heartbeat)
        client.close()


def _cause(error: BaseException) -> str:
    """Describe what ended a worker; "" if that was the loss of another one."""
    lost = getattr(error, "health_check_failure", None)
    if lost is None:
        return own_fault(error)
    if getattr(lost, "preempted", False):
        return "the preemption of its node"
    return f"{type(lost).__name__}: {str(lost).splitlines()[0]}"
