"""The shortest way to monitor a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from resihp.contracts import Job

from .monitor import Monitor

P = ParamSpec("P")
R = TypeVar("R")


def hook(
    *, job: str | Job, url: str | None = None, **options: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`@resihp.hook(job="llama-7b")` over a training step is `Monitor(job=…).step`.

    `options` are those of `Monitor`. The decorated function has the monitor as its attribute
    `monitor`, for `train_step.monitor.microbatch(…)` inside it; without any such block the step is
    recorded as a whole.
    """
    monitor = Monitor(job=job, url=url, **options)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        timed = monitor.step(function)
        timed.monitor = monitor  # type: ignore[attr-defined]
        return timed

    return decorate
