"""Sensors of an NVIDIA accelerator, read through NVML by the module `pynvml`.

What a device or its driver does not offer is left out. On an H200 all of them take 0.6 ms, the
first time 18 ms.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ._clocks import CudaClock
from ._sensor import Quantity, Sensor

_THERMAL, _POWER = 0x20 | 0x40, 0x04 | 0x80
"""Bits of NVML's reasons for low clocks, each set by software and by hardware."""
_LINK_ERRORS = ("DL_REPLAY", "DL_RECOVERY", "DL_CRC_FLIT", "DL_CRC_DATA")


def device_sensors(clock: CudaClock, nvml: Any = None) -> list[Sensor]:
    """Sensors of the device that a process computes on; none where NVML does not know it.

    `nvml` is the module `pynvml` by default, if that is installed.
    """
    uuid = clock.device_uuid()
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return []
    if uuid is None:
        return []
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return []
    return _Device(nvml, handle).sensors()


class _Device:
    """Readings of one device."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._links: list[int] | None = None
        self._events: Any = None

    def sensors(self) -> list[Sensor]:
        nvml, ask = self._nvml, self._ask
        level, total = Quantity.LEVEL, Quantity.TOTAL
        absent = (nvml.NVMLError, AttributeError)  # an older `pynvml` lacks some names
        readings: list[tuple[str, Quantity, Callable[[], float | None]]] = [
            ("sm_mhz", level, lambda: ask("ClockInfo", nvml.NVML_CLOCK_SM)),
            ("memory_mhz", level, lambda: ask("ClockInfo", nvml.NVML_CLOCK_MEM)),
            ("thermal_slowdown", level, lambda: self._is_limited_by(_THERMAL)),
            ("power_slowdown", level, lambda: self._is_limited_by(_POWER)),
            ("temperature_c", level, lambda: ask("Temperature", nvml.NVML_TEMPERATURE_GPU)),
            ("power_w", level, lambda: 1e-3 * ask("PowerUsage")),
            ("pcie_gen", level, lambda: ask("CurrPcieLinkGeneration")),
            ("pcie_width", level, lambda: ask("CurrPcieLinkWidth")),
            ("ecc_corrected", total, lambda: self._memory_errors("CORRECTED")),
            ("ecc_uncorrected", total, lambda: self._memory_errors("UNCORRECTED")),
            ("pcie_replays", total, lambda: ask("PcieReplayCounter")),
            ("nvlink_errors", total, self._link_errors),
            ("xid", Quantity.EVENTS, self._xid),
        ]
        return [Sensor(name, quantity, read, absent) for name, quantity, read in readings]

    def _ask(self, what: str, *arguments: int) -> float:
        return float(getattr(self._nvml, f"nvmlDeviceGet{what}")(self._handle, *arguments))

    def _is_limited_by(self, reasons: int) -> float:
        """1.0 while one of the reasons limits the clocks; newer versions rename the function."""
        old = hasattr(self._nvml, "nvmlDeviceGetCurrentClocksThrottleReasons")
        mask = self._ask("CurrentClocksThrottleReasons" if old else "CurrentClocksEventReasons")
        return float(bool(int(mask) & reasons))

    def _memory_errors(self, kind: str) -> float:
        nvml = self._nvml
        error = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}")
        return self._ask("TotalEccErrors", error, nvml.NVML_VOLATILE_ECC)

    def _link_errors(self) -> float | None:
        nvml = self._nvml
        if self._links is None:
            self._links = [link for link in range(nvml.NVML_NVLINK_MAX_LINKS) if self._is_up(link)]
        if not self._links:
            return None
        kinds = [getattr(nvml, f"NVML_NVLINK_ERROR_{kind}") for kind in _LINK_ERRORS]
        return sum(
            self._ask("NvLinkErrorCounter", link, kind) for link in self._links for kind in kinds
        )

    def _is_up(self, link: int) -> bool:
        try:
            return bool(self._ask("NvLinkState", link))
        except self._nvml.NVMLError:
            return False

    def _xid(self) -> float:
        """The last XID error since the call before; 0 for none."""
        nvml = self._nvml
        if self._events is None:
            events = nvml.nvmlEventSetCreate()
            kind = nvml.nvmlEventTypeXidCriticalError
            nvml.nvmlDeviceRegisterEvents(self._handle, kind, events)
            self._events = events
        code = 0.0
        try:
            for _ in range(16):
                code = float(nvml.nvmlEventSetWait_v2(self._events, 0).eventData)
        except nvml.NVMLError_Timeout:  # no more of them
            pass
        return code
