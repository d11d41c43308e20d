"""Pacing: hold a device until the time that its work would take at its speed has passed.

On a machine with fewer accelerators than ranks all ranks share the same cores, so that a "device"
has no speed of its own. Pacing gives it one: the real computation runs, and the rank is then held
until work / speed has passed, waiting for others not counted. As events of a GPU do, the clock of
the emulated device tells how long a pass took: a process that gets no core, or is woken late, makes
no device slow. It is for demonstrations and tests; nothing paces a real job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Pacer:
    """Holds one device to a speed.

    flops_per_ms  what a device of speed 1 computes in a millisecond
    speed         speed of this device as a function of the step; 1.0 is healthy
    """

    flops_per_ms: float
    speed: Callable[[int], float] = field(default=lambda step: 1.0)

    def hold(self, flops: float, step: int, spent_s: float) -> float:
        """Sleep until the device is done with `flops`; `spent_s` of its time has passed already.

        Returns the time that the device takes for them, in seconds.
        """
        due_s = flops / self.flops_per_ms / self.speed(step) / 1e3
        deadline = time.perf_counter() + due_s - spent_s
        while (left := deadline - time.perf_counter()) > 0:
            time.sleep(left)
        return due_s
