"""Whether the host of a rank keeps it waiting; told beside the verdicts, it names no device."""

from __future__ import annotations

import numpy as np

from resihp.contracts import Op, TelemetryBatch

from ..base.arrays import Bools, Ints
from ..base.places import Places
from ..evidence.level import LevelTest
from ..settings import DetectorSettings


class Hosts:
    """Whether a rank's host keeps it waiting: data loading, garbage collection."""

    def __init__(self, places: Places, settings: DetectorSettings) -> None:
        self._places = places
        self.test = LevelTest(np.zeros(places.size, np.int64), settings, least=1.5, error=0.1)

    def observe(self, step: TelemetryBatch, index: Ints, number: int) -> Bools:
        """Takes all records of a step; returns the ranks whose host is slow."""
        data = step.op == Op.DATA
        if not data.any():
            return self.test.slow
        size = self._places.size
        spent = np.bincount(index[data], step.compute_ms[data], size)
        present = np.bincount(index[data], minlength=size) > 0
        # Measured against the work of a step, so that a slow start of nearly nothing is nothing.
        compute = (step.op == Op.FORWARD) | (step.op == Op.BACKWARD)
        busy = np.bincount(index[compute], step.compute_ms[compute], size)
        floor = 0.01 * float(np.median(busy[busy > 0])) if (busy > 0).any() else 0.0
        value = np.log(np.maximum(spent + floor, 1e-9))
        return self.test.observe(number, np.where(present, value, np.nan))
