"""What a step took on this rank, told to whoever watches."""

from __future__ import annotations

import time

from resihp.contracts import Op

from ..models import Packed
from ..process_groups.abortable import WaitClock
from .setup import Recorder


class Telemetry:
    """Times pieces of work and records them. `waited` counts what the rank is blocked on others."""

    def __init__(self, record: Recorder, waited: WaitClock) -> None:
        self._record_one, self._waited = record, waited

    def start(self) -> Timing:
        """Begin a piece of work."""
        return Timing(self._waited)

    def record(self, op: Op, step: int, timing: Timing) -> None:
        """Work of the whole step: data, sums, update."""
        compute_ms, wait_ms = timing.stop_ms()
        self._record_one(op=op, step=step, microbatch=-1, compute_ms=compute_ms, wait_ms=wait_ms)

    def record_pass(self, op: Op, packed: Packed, timing: Timing, *, chunk: int) -> None:
        """A pass of one microbatch through one model chunk."""
        compute_ms, wait_ms = timing.stop_ms()
        self._record_one(
            op=op,
            step=packed.step,
            microbatch=packed.index,
            chunk=chunk,
            compute_ms=compute_ms,
            wait_ms=wait_ms,
            tokens=len(packed.tokens),
            sequences=len(packed.seq_lens),
            sum_sq_len=packed.sum_sq_len,
            max_len=max(packed.seq_lens),
        )


class Timing:
    """Time since it was made, split into computing and waiting; `earlier` is added to it."""

    def __init__(self, waited: WaitClock) -> None:
        self.earlier = (0.0, 0.0)
        self._waited, self._waited_before = waited, waited.seconds
        self._start = time.perf_counter()

    @property
    def compute_s(self) -> float:
        """Computing so far, in seconds."""
        return time.perf_counter() - self._start - (self._waited.seconds - self._waited_before)

    def stop_ms(self) -> tuple[float, float]:
        """Computing and waiting so far, in milliseconds, and what was `earlier`."""
        waited_s = self._waited.seconds - self._waited_before
        compute_ms = max(self.compute_s, 0.0) * 1e3
        return self.earlier[0] + compute_ms, self.earlier[1] + waited_s * 1e3
