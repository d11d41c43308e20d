"""What a monitor needs once, as it is made."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from resihp.contracts import ContractError, Job

from ._clocks import CudaClock

if TYPE_CHECKING:
    from .monitor import Monitor


def rank_of_process(given: int | None) -> int:
    if given is None:
        text = os.environ.get("RANK", "0")
        if not text.isdigit():
            raise ContractError("RANK", f"must be a whole number, 0 or more, not {text!r}")
        return int(text)
    if given < 0:
        raise ContractError("rank", f"must be 0 or more, not {given}")
    return given


def check(job: str | Job, capacity: int, batch_records: int, interval_s: float) -> None:
    if not job:
        raise ContractError("job", "must be the job, or its name")
    for name, value in (("capacity", capacity), ("batch_records", batch_records)):
        if value < 1:
            raise ContractError(name, f"must be 1 or more, not {value}")
    if not interval_s > 0:
        raise ContractError("interval_s", f"must be above 0, not {interval_s}")


def device_of(monitor: Monitor) -> Callable[[], CudaClock | None]:
    """What the sender asks; it must not keep the monitor alive."""
    reference = weakref.ref(monitor)

    def device() -> CudaClock | None:
        alive = reference()
        return None if alive is None else alive._device

    return device


def start_afresh_in_children(monitor: Monitor) -> None:
    reference = weakref.ref(monitor)

    def start_afresh() -> None:
        alive = reference()
        if alive is not None:
            alive._start_afresh()

    os.register_at_fork(after_in_child=start_afresh)
