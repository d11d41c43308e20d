"""Recorded loops of healthy ranks with each rank slowed in turn: when the detector names it, and
when the best test there is would.

From each of several steps on, the passes of one rank take longer by what the emulated device takes
longer for their documents. The oracle is told the rank, the onset, what every pass takes longer,
and from the whole recording the rank's usual time beyond its device's and how that scatters. It
takes the likelihood ratio of slow against healthy, for noise as heavy-tailed as that of a shared
machine (Student's distribution with four degrees of freedom), and names where the detector does: at
one false name in 100,000 steps of a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from detector import Detector
from resihp.contracts import Op, Status
from resihp.offline import Trace, read_trace
from resihp.testing.ordinary_loops import LAYERS, work_ms

_NAME_AT = np.log(100_000)
_FREEDOM = 4.0
_TO_SCALE = 1.0 / 0.7407
"""Scale of that distribution over its median absolute deviation."""
_PASSES = {"forward": (Op.FORWARD, 1.0), "backward": (Op.BACKWARD, 2.0)}
"""Records of a pass, and the time that it takes a device over that of a forward pass."""
_EVERY = 6
"""Steps from one onset to the next for the detector."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Slowing:
    """What is slow: a device of this `pace` by `factor`, in some `passes`, from `onset` on."""

    factor: float
    passes: tuple[str, ...]
    pace: float
    onset: int

    def onsets(self, steps: int) -> range:
        """First slow steps; the last one leaves half of the others."""
        return range(self.onset, self.onset + (steps - self.onset) // 2)

    def device_ms(self, trace: Trace) -> Floats:
        """Milliseconds that each record takes a healthy device, 0 for passes that stay as fast."""
        records = trace.records
        found = np.zeros(records["op"].size)
        for op, times in (_PASSES[name] for name in self.passes):
            some = records["op"] == op
            work = work_ms(records["tokens"][some], records["sum_sq_len"][some])
            found[some] = self.pace * LAYERS * times * work
        return found


def detector_steps(recording: Path, slowing: Slowing) -> float:
    """Median number of steps until the detector names a rank; infinity if it does not."""
    trace = read_trace(recording)
    onsets = slowing.onsets(len(trace.steps))[::_EVERY]
    return median(
        min(_named(_slowed(trace, slowing, rank, onset), rank, onset), default=np.inf) - onset + 1
        for onset, rank in product(onsets, trace.ranks)
    )


def _slowed(trace: Trace, slowing: Slowing, rank: int, onset: int) -> Trace:
    records = trace.records
    longer = (slowing.factor - 1.0) * slowing.device_ms(trace)
    longer *= (records["rank"] == rank) & (records["step"] >= onset)
    return replace(trace, columns={**records, "compute_ms": records["compute_ms"] + longer})


def _named(trace: Trace, rank: int, onset: int) -> Iterator[int]:
    """Steps from the onset on in which the verdict on a rank becomes that it is slow."""
    detector = Detector(trace.job)
    for batch in trace.batches():
        step = int(batch.step[0])
        for verdict in detector.update(batch):
            if verdict.rank == rank and verdict.status is Status.FAIL_SLOW and step >= onset:
                yield step


def least_steps(recording: Path, slowing: Slowing) -> float:
    """Median number of steps until the oracle names a rank; infinity if that is too many."""
    device, beyond = _times(read_trace(recording), slowing)
    usual = np.median(beyond, axis=0)
    noise = beyond - usual
    scale = _TO_SCALE * np.median(np.abs(noise), axis=0)
    longer = (slowing.factor - 1.0) * device
    # A slow rank's time is longer than usual by its noise and what it takes longer.
    ratio = _log_density(noise / scale) - _log_density((noise + longer) / scale)
    steps, ranks = ratio.shape
    return median(_first(ratio[at:, r]) for at, r in product(slowing.onsets(steps), range(ranks)))


def _log_density(deviation: Floats) -> Floats:
    return -0.5 * (_FREEDOM + 1.0) * np.log1p(deviation**2 / _FREEDOM)


def _first(ratio: Floats) -> float:
    over = np.flatnonzero(np.cumsum(ratio) >= _NAME_AT)
    return float(over[0] + 1) if len(over) else np.inf


def _times(trace: Trace, slowing: Slowing) -> tuple[Floats, Floats]:
    """Milliseconds of each step's passes, [steps, ranks]: those of the device, and those beyond."""
    records, of_device = trace.records, slowing.device_ms(trace)
    shape = int(records["step"].max()) + 1, len(trace.ranks)
    device, own = np.zeros(shape), np.zeros(shape)
    some = of_device > 0
    where = records["step"][some], np.searchsorted(trace.ranks, records["rank"][some])
    np.add.at(device, where, of_device[some])
    np.add.at(own, where, records["compute_ms"][some])
    return device, own - device
