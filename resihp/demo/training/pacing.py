"""The pace of the emulated devices, kept slow enough for the machine that computes for them.

A paced rank computes for real and is then held until its emulated device would be done. That only
works while the real computation is the shorter of the two: on a slow or busy machine a step with a
slow device would take no longer than the others. So the ranks measure their load, real over paced
time, on a few steps of the same training before the run, and in every step of the run. Where the
load of the busiest rank exceeds `LIMIT`, all ranks lower the pace of all devices alike. It is not
raised again: a machine that became busy may do so once more, and each change of the pace is one of
all devices that the detector has to tell from slow ones.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Layout
from resihp.elastic.step.pacing import Pacer

LIMIT = 0.6
"""Load above which the pace is lowered."""
TARGET = 0.4
"""Load at which a lowered pace aims."""
CALIBRATION_STEPS = 6
_FIRST_MEASURED = 2  # the steps before it load libraries and allocate memory
_BUSY_STEPS = 2  # in a row, before the pace is lowered
_LAG = 2  # steps until the loads of a step are final on every rank


class LoadTable:
    """The load of every rank in every step: a file that all processes map.

    A rank writes its own row before the gradients of the step are reduced. No rank begins step
    s + 1 before that reduction has ended on all ranks, so that rows up to step s - 1 are final in
    step s + 1, even if step s is repeated after a loss.
    """

    def __init__(self, path: Path, ranks: int, steps: int) -> None:
        self._shape = (steps, ranks)
        with path.open("ab") as file:  # a file that grows is filled with zeros
            file.truncate(8 * steps * ranks)
        self._loads: NDArray[np.float64] = np.memmap(path, np.float64, "r+", shape=self._shape)

    @classmethod
    def calibration(cls, folder: Path, layout: Layout) -> LoadTable:
        """The table of the steps before the run."""
        return cls(folder / "calibration-loads.f64", len(layout.ranks), CALIBRATION_STEPS)

    @classmethod
    def training(cls, folder: Path, layout: Layout, steps: int) -> LoadTable:
        """The table of the run."""
        return cls(folder / "loads.f64", len(layout.ranks), steps)

    def write(self, step: int, rank: int, load: float) -> None:
        """Set the load of a rank in a step."""
        self._loads[step, rank] = load

    def highest(self, step: int) -> float:
        """The load of the busiest rank in a step; 0 where none computed."""
        return float(self._loads[step].max())

    def calibrated(self, pace: float) -> float:
        """The pace for the run, from a calibration at `pace`."""
        load = float(np.median(self._loads[_FIRST_MEASURED:].max(axis=1)))
        return pace if load <= LIMIT else pace * TARGET / load

    def paces(self, pace: float) -> Iterator[float]:
        """The pace of each step of a run that began at `pace`; ends with the last known step.

        A pure function of the final loads: every rank computes the same paces by itself.
        """
        since = _FIRST_MEASURED
        for step in range(self._shape[0]):
            loads = [self.highest(at) for at in range(since, step - _LAG + 1)]
            busy = loads[-_BUSY_STEPS:]
            if len(busy) == _BUSY_STEPS and min(busy) > LIMIT:
                pace, since = pace * TARGET / fmean(busy), step
            yield pace


@dataclass
class MeasuredPacer(Pacer):
    """Holds one emulated device to a pace that follows the load of the machine.

    table    loads of all ranks, of which this one writes its own
    rank     this rank
    fixed    the pace stays as given, whatever the load: for the calibration
    scatter  standard deviation of the time that a pass takes, over its mean
    """

    table: LoadTable = field(kw_only=True)
    rank: int = field(kw_only=True)
    fixed: bool = field(kw_only=True, default=False)
    scatter: float = field(kw_only=True, default=0.0)
    _random: random.Random = field(init=False)
    _paces: Iterator[float] = field(init=False)
    _step: int = field(init=False, default=-1)
    _real_s: float = field(init=False, default=0.0)
    _paced_s: float = field(init=False, default=0.0)
    _late_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._random = random.Random(self.rank)
        paces = self.table.paces(self.flops_per_ms)
        self._paces = repeat(self.flops_per_ms) if self.fixed else paces

    def hold(self, flops: float, step: int, spent_s: float) -> float:
        """Sleep until the device is done with `flops`; `spent_s` of its time has passed already.

        A pass that ends late, because the machine was busy or woke this process late, shortens
        the next ones, so that the time of a step is that of the devices. Returns the time that
        the device takes for the pass, in seconds.
        """
        if step > self._step:
            self._begin(step)
        due_s = flops / self.flops_per_ms / self.speed(step) / 1e3
        due_s *= self._random.gauss(1.0, self.scatter)
        self._real_s += spent_s
        self._paced_s += due_s
        self.table.write(step, self.rank, self._real_s / self._paced_s)
        began = time.perf_counter() - spent_s
        deadline = began + max(due_s - self._late_s, 0.0)
        while (left_s := deadline - time.perf_counter()) > 0:
            time.sleep(left_s)
        late_s = self._late_s + time.perf_counter() - began - due_s
        self._late_s = min(max(late_s, 0.0), due_s)
        return due_s

    def _begin(self, step: int) -> None:
        for _ in range(step - self._step):
            self.flops_per_ms = next(self._paces)
        self._step = step
        self._real_s = self._paced_s = self._late_s = 0.0
