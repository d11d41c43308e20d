"""Timing of a rank's work and its microbatch records."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from resihp._devices import finish_own_work
from resihp.contracts import Op

from ..models import Packed
from ..process_groups.abortable import WaitClock
from ..process_groups.communicators import CPU
from .setup import Recorder, TransferRecorder


class PassRecorder:
    """Times pieces of work and records them; `waited` measures the time blocked on other ranks."""

    def __init__(self, record: Recorder, waited: WaitClock, device: torch.device = CPU) -> None:
        self._record_one, self._waited, self._device = record, waited, device

    def start(self) -> Timing:
        """Start timing a piece of work."""
        return Timing(self._waited, self._device)

    def record(self, op: Op, step: int, timing: Timing) -> None:
        """Record work of the whole step: data, gradient sums, update."""
        compute_ms, wait_ms = timing.stop_ms()
        self._record_one(op=op, step=step, microbatch=-1, compute_ms=compute_ms, wait_ms=wait_ms)

    def record_pass(self, op: Op, packed: Packed, timing: Timing, *, chunk: int) -> None:
        """Record a pass of one microbatch through one chunk."""
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


@dataclass(frozen=True)
class TransferStamps:
    """Records the transfers of one microbatch over one boundary, each at both of its ends.

    chunk  that whose output crosses the boundary in a forward pass: the same at both ends
    """

    record: TransferRecorder | None
    packed: Packed
    chunk: int

    def sent(self, peer: int) -> None:
        """Record that a transfer to `peer` starts, for whose end nobody waits."""
        if self.record is not None:
            self._record(peer, time.perf_counter(), 0.0)

    @contextmanager
    def receiving(self, peer: int) -> Iterator[None]:
        """Record the block as the receipt of a transfer from `peer`."""
        start_s = time.perf_counter()
        yield
        if self.record is not None:
            self._record(peer, start_s, time.perf_counter() - start_s)

    def _record(self, peer: int, start_s: float, spent_s: float) -> None:
        assert self.record is not None
        self.record(
            op=Op.P2P,
            step=self.packed.step,
            microbatch=self.packed.index,
            chunk=self.chunk,
            compute_ms=spent_s * 1e3,
            peer=peer,
            start_ms=start_s * 1e3,
        )


class Timing:
    """Time since construction, split into own time and waiting; `earlier` is added.

    The device has done all earlier work then, which its own timing has waited for. `device_s` is
    own time by the clock of an emulated device, where there is one.
    """

    def __init__(self, waited: WaitClock, device: torch.device) -> None:
        self.earlier = (0.0, 0.0)
        self.device_s: float | None = None
        self._waited, self._waited_before = waited, waited.seconds
        self._device = device
        self._start = time.perf_counter()

    def finish(self) -> None:
        """Wait until the device has computed, too, what has been timed so far."""
        finish_own_work(self._device)

    @property
    def compute_s(self) -> float:
        """Own time so far, in seconds."""
        return time.perf_counter() - self._start - (self._waited.seconds - self._waited_before)

    def stop_ms(self) -> tuple[float, float]:
        """Return own time and waiting so far, in milliseconds, `earlier` included."""
        self.finish()
        waited_s = self._waited.seconds - self._waited_before
        compute_ms = max(self.compute_s if self.device_s is None else self.device_s, 0.0) * 1e3
        return self.earlier[0] + compute_ms, self.earlier[1] + waited_s * 1e3
