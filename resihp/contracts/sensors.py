"""Readings of the sensors of a rank's host and accelerator."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ._numbers import make_plain, number
from .errors import ContractError

MOST_READING = 1e12
"""No reading of any sensor is larger."""


@dataclass(frozen=True, kw_only=True)
class SensorSample:
    """Readings beside a rank's records, over the last `seconds`; None where not measured.

    busy           share of the time that the rank spent in its passes, not waiting for others

    Of the host, by its kernel:
    cpu_throttled  share of the time for which the CPU quota of its cgroup, or of one above, held it
                   back
    cpu_quota      that quota, in CPUs
    cpu_steal      share of its host's CPU time that the hypervisor took
    cpu_waiting    share of the time that the training thread was ready to run and had no CPU
    cpu_pressure, memory_pressure, io_pressure
                   share of the time that some task of its cgroup, or else of its host, was stalled
    major_faults   page faults of the process that waited for a disk, per second
    cpu_mhz        frequency of the CPU of the training thread
    numa_away      share of the readings that found the training thread on another NUMA node than
                   the first one did

    Of the accelerator, by its driver:
    sm_mhz, memory_mhz            clocks
    thermal_slowdown, power_slowdown
                                  share of the readings in which heat, power limited the clocks
    temperature_c, power_w        of the accelerator
    ecc_corrected, ecc_uncorrected  memory errors per second
    pcie_gen, pcie_width          generation and lanes of the link as it runs
    pcie_replays, nvlink_errors   per second
    xid                           the last XID error; 0 where there was none
    """

    seconds: float
    busy: float | None = None
    cpu_throttled: float | None = None
    cpu_quota: float | None = None
    cpu_steal: float | None = None
    cpu_waiting: float | None = None
    cpu_pressure: float | None = None
    memory_pressure: float | None = None
    io_pressure: float | None = None
    major_faults: float | None = None
    cpu_mhz: float | None = None
    numa_away: float | None = None
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    thermal_slowdown: float | None = None
    power_slowdown: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    ecc_corrected: float | None = None
    ecc_uncorrected: float | None = None
    pcie_gen: float | None = None
    pcie_width: float | None = None
    pcie_replays: float | None = None
    nvlink_errors: float | None = None
    xid: float | None = None

    def __post_init__(self) -> None:
        make_plain(self, number, "seconds", above=0.0)
        make_plain(self, number, *self.readings(), least=0.0)
        for name, value in vars(self).items():
            if value is not None and value > MOST_READING:
                raise ContractError(name, f"must be at most {MOST_READING:g}, not {value}")

    def readings(self) -> dict[str, float]:
        """The readings by the names of their sensors, without those that were not measured."""
        held = self.__dict__.items()  # in the order of the fields, of which the first is `seconds`
        return {name: value for name, value in held if value is not None and name != "seconds"}


SENSOR_NAMES = tuple(field.name for field in fields(SensorSample) if field.name != "seconds")
