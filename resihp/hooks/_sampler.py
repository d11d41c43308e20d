"""Readings of a rank's host and accelerator between two heartbeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic

from resihp.contracts import Op, SensorSample, TelemetryBatch

from ._device_sensors import device_sensors
from ._kernel_sensors import kernel_sensors
from ._sensor import Quantity, Sensor
from ._spans import Recording

_EVERY_S = 1.0
"""Time between two readings of the quantities that are averaged."""
_SHORTEST_S = 0.5
"""Shorter samples are not taken: their rates would say little."""
_GROWING = (Quantity.TOTAL, Quantity.TIME)
_VANISHED = (FileNotFoundError, ProcessLookupError)


@dataclass
class _Readings:
    """Readings of one sensor since the last sample.

    first, last  readings of a total; `first` is the last one of the sample before
    sum, count   of the readings in this sample
    """

    sensor: Sensor
    first: float | None = None
    last: float | None = None
    sum: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if self.sensor.quantity is Quantity.EVENTS:
            self.last = value or self.last or 0.0
            return
        if value is None:
            return
        self.first = value if self.first is None or value < self.first else self.first
        self.last = value
        self.sum, self.count = self.sum + value, self.count + 1

    def value(self, seconds: float) -> float | None:
        if self.sensor.quantity is Quantity.EVENTS:
            return self.last
        if not self.count or self.first is None or self.last is None:  # as of a thread that ended
            return None
        if self.sensor.quantity is Quantity.LEVEL:
            return self.sum / self.count
        growth = (self.last - self.first) / seconds
        # The clock is read before the sensors, which count on meanwhile.
        return min(growth, 1.0) if self.sensor.quantity is Quantity.TIME else growth

    def restart(self) -> None:
        self.first = self.last if self.sensor.quantity in _GROWING else None
        self.last, self.sum, self.count = self.first, 0.0, 0


class Sampler:
    """Samples of all sensors that this machine has; all methods are called by the sender's thread.

    Totals and times are read as a sample is taken, so that a sample covers the whole time since the
    one before. A sensor that is not there is left out silently; one that fails is counted and
    logged once, and left out from then on.

    find  makes the sensors of the machine, given the id of the training thread
    """

    def __init__(
        self,
        recording: Recording,
        *,
        find: Callable[[int], list[Sensor]] = kernel_sensors,
        now_s: Callable[[], float] = monotonic,
    ) -> None:
        self._recording, self._find, self._now_s = recording, find, now_s
        self.reset()

    def reset(self) -> None:
        """Return to the initial state, as in a forked child."""
        self._readings: list[_Readings] = []
        self._device: object = None
        self._is_started = False
        self._busy_s: float | None = None
        self._since_s = self._due_s = self._sampled_s = 0.0

    def count(self, batch: TelemetryBatch) -> None:
        """Count the time in the passes of a batch of records."""
        spent_ms = float(batch.compute_ms[batch.op <= Op.OPTIMIZER].sum())
        self._busy_s = (self._busy_s or 0.0) + 1e-3 * spent_ms

    def tick(self) -> None:
        """Read what is averaged, if that is due; the first call finds the sensors."""
        now_s = self._now_s()
        if not self._is_started:
            self._is_started = True
            self._since_s, self._due_s = now_s, now_s + _EVERY_S
            self._begin(lambda: [Sensor("busy", Quantity.TOTAL, lambda: self._busy_s)])
            self._begin(partial(self._find, self._recording.thread_id))
        device = self._recording.device
        if device is not self._device:
            self._device = device
            if device is not None:
                self._begin(partial(device_sensors, device))
        if now_s >= self._due_s:
            self._due_s = now_s + _EVERY_S
            self._read(totals=False)

    def sample(self) -> SensorSample | None:
        """The sample since the last one that was kept; None where there is nothing to tell yet."""
        now_s = self._now_s()
        seconds = now_s - self._since_s
        if not self._is_started or seconds < _SHORTEST_S:
            return None
        self._read(totals=True)
        self._sampled_s = now_s
        values = {each.sensor.name: each.value(seconds) for each in self._readings}
        rounded = {
            name: float(f"{max(value, 0.0):.4g}")
            for name, value in values.items()
            if value is not None
        }
        try:
            return SensorSample(seconds=round(seconds, 3), **rounded) if rounded else None
        except Exception as error:  # noqa: BLE001 the boundary: the heartbeat is sent without it
            self._recording.failures.add("a sample of the sensors", error)
            return None

    def keep(self) -> None:
        """Begin the next sample, as the last one has arrived."""
        self._since_s = self._sampled_s
        for readings in self._readings:
            readings.restart()

    def _begin(self, find: Callable[[], list[Sensor]]) -> None:
        failures = self._recording.failures
        try:
            sensors = find()
        except Exception as error:  # noqa: BLE001 the boundary: training goes on without sensors
            failures.add("looking for sensors", error)
            return
        for sensor in sensors:
            readings = _Readings(sensor)
            try:
                readings.add(sensor.read())
            except sensor.absent:
                continue
            except Exception as error:  # noqa: BLE001 the boundary: the others are read
                failures.add(f"the sensor {sensor.name}", error)
                continue
            self._readings.append(readings)

    def _read(self, *, totals: bool) -> None:
        failed = []
        for readings in self._readings:
            sensor = readings.sensor
            if (sensor.quantity in _GROWING) is not totals:
                continue
            try:
                readings.add(sensor.read())
            except _VANISHED:  # as of a thread that has ended
                continue
            except Exception as error:  # noqa: BLE001 the boundary: the others are read
                self._recording.failures.add(f"the sensor {sensor.name}", error)
                failed.append(readings)
        for readings in failed:
            self._readings.remove(readings)
