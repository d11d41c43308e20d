"""Causes of a rank's slowness among the readings of its sensors, by comparison only.

A reading is a cause if, since the onset, it is worse than its peers' and worse than the rank's own
before, both beyond their scatter, and if it can explain a fair part of the slowdown. No reading is
judged by a limit of its own: what all ranks share explains nothing.

What a host does to a rank shows on its accelerator too (an idle one lowers its clocks), but not the
other way round, so that a host which explains most of the slowdown is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from resihp.contracts import Cause

from .arrays import Bools, Floats, Ints
from .sensor_history import SensorHistory

_FAIR_PART = 0.25
"""Least part of a slowdown (log) that a cause explains."""
_MOST_PART = 0.5
"""Part of the slowdown (log) from which the host is its cause, whatever the device shows."""
_SAMPLES, _PEER_SAMPLES = 2, 4
"""Least samples of the rank, and of its peers together, since the onset."""
_MOST_PEERS = 64
_HIGH = 0.95
"""Quantile of the peers' readings beyond which a reading must be."""
_SCATTER = 5.0
"""Median distances of the rank's own past from its middle, beyond which a reading is another."""
_FAULT_S = 0.01
"""Longest wait for a page from a disk, in general."""
_MOST_SENTENCES = 3
_LIMITS = {"thermal_slowdown": "thermal throttling", "power_slowdown": "power throttling"}
"""Reasons for which the SM clock is low."""


@dataclass(frozen=True)
class SensorCause:
    """A sensor that explains a rank's slowness; `explained` as the log of a slowdown, at most."""

    sensor: str
    cause: Cause
    explained: float
    own: float
    peers: float


_Explains = Callable[[float, float, float], float]
"""Slowdown (log) that a reading explains at most: of the rank's, of its peers', and of the share of
the time that the rank spends in its passes."""


def _lost_time(own: float, peers: float, busy: float) -> float:
    """Time that was lost of the passes."""
    return math.log((1.0 - min(peers / busy, 0.95)) / (1.0 - min(own / busy, 0.95)))


def _clock(own: float, peers: float, busy: float) -> float:
    return math.log(max(peers, 1e-9) / max(own, 1e-9))


def _faults(own: float, peers: float, busy: float) -> float:
    return math.log1p(_FAULT_S * (own - peers))


def _state(own: float, peers: float, busy: float) -> float:
    """A state, such as throttling, at most doubles a time."""
    return math.log1p(own - peers)


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.095 or not value else f"{value:.1%}"


def _hertz(mhz: float) -> str:
    return f"{mhz / 1e3:.2f} GHz"


def _count(value: float) -> str:
    return f"{value:.0f}" if value >= 9.5 or not value else f"{value:.2g}"


@dataclass(frozen=True)
class _Kind:
    """A sensor: who is the cause, how much of a slowdown a reading explains at most (None: any,
    as errors do), how it is written, and whether low readings are the worse ones."""

    cause: Cause
    explains: _Explains | None
    written: Callable[[float], str]
    sentence: str
    low_is_worse: bool = False


def _host(sentence: str, explains: _Explains = _lost_time) -> _Kind:
    return _Kind(Cause.HOST, explains, _share, sentence)


def _errors(what: str) -> _Kind:
    return _Kind(Cause.DEVICE, None, _count, f"{{own}} {what} {{since}}; its peers {{peers}}")


def _speed(cause: Cause, what: str, written: Callable[[float], str] = _hertz) -> _Kind:
    sentence = f"{what} {{own}} {{since}}; its peers' {{peers}}"
    return _Kind(cause, _clock, written, sentence, low_is_worse=True)


def _limited(what: str) -> _Kind:
    sentence = f"{what} {{own}} of the time {{since}}; its peers {{peers}}"
    return _Kind(Cause.DEVICE, _state, _share, sentence)


_KINDS = {
    "cpu_throttled": _host("its cgroup throttled it {own} of the time {since}; its peers {peers}"),
    "cpu_steal": _host(
        "the hypervisor took {own} of its host's CPU time {since}; of its peers' {peers}"
    ),
    "cpu_waiting": _host(
        "its training thread waited for a CPU {own} of the time {since}; its peers' {peers}"
    ),
    "cpu_pressure": _host(
        "tasks beside it waited for a CPU {own} of the time {since}; beside its peers {peers}"
    ),
    "memory_pressure": _host("memory was short {own} of the time {since}; for its peers {peers}"),
    "io_pressure": _host(
        "tasks beside it waited for disks {own} of the time {since}; beside its peers {peers}"
    ),
    "major_faults": _Kind(
        Cause.HOST,
        _faults,
        _count,
        "{own} page faults a second waited for a disk {since}; its peers' {peers}",
    ),
    "cpu_mhz": _speed(Cause.HOST, "CPU clock"),
    "numa_away": _host(
        "its training thread left its NUMA node {own} of the time {since}; its peers' {peers}",
        _state,
    ),
    **{name: _limited(what) for name, what in _LIMITS.items()},
    "sm_mhz": _speed(Cause.DEVICE, "SM clock"),
    "memory_mhz": _speed(Cause.DEVICE, "memory clock"),
    "pcie_gen": _speed(Cause.DEVICE, "PCIe generation", _count),
    "pcie_width": _speed(Cause.DEVICE, "PCIe lanes", _count),
    "pcie_replays": _errors("PCIe replays a second"),
    "ecc_corrected": _errors("corrected memory errors a second"),
    "ecc_uncorrected": _errors("uncorrected memory errors a second"),
    "nvlink_errors": _errors("NVLink errors a second"),
    "xid": _Kind(Cause.DEVICE, None, _count, "XID error {own} {since}; its peers none"),
}
_IMPLIED = {
    "cpu_throttled": ("cpu_waiting", "cpu_pressure"),
    "cpu_waiting": ("cpu_pressure",),
    "memory_pressure": ("io_pressure",),
    "thermal_slowdown": ("power_slowdown", "sm_mhz"),
    "power_slowdown": ("sm_mhz",),
}
"""Readings that follow from others, and are not worth a sentence beside them."""


def causes_of(
    history: SensorHistory, at: int, *, onset: int, slowdown: float, peers: Ints
) -> tuple[SensorCause, ...]:
    """Causes of the slowness of the rank at a position, since the step `onset` (-1: the first one),
    the one that explains most first; `peers` are positions of healthy ranks."""
    if peers.size > _MOST_PEERS:
        peers = peers[np.linspace(0, peers.size - 1, _MOST_PEERS).astype(np.int64)]
    busy = _busy(history, at, onset)
    found, least = [], _FAIR_PART * math.log(max(slowdown, 1.001))
    for name in history.names:
        kind = _KINDS.get(name)
        if kind is None:
            continue
        own = history.since(name, np.array([at]), onset)
        theirs = history.since(name, peers, onset)
        if own.size < _SAMPLES or theirs.size < _PEER_SAMPLES:
            continue
        past = history.before(name, at, onset)
        sign = -1.0 if kind.low_is_worse else 1.0
        value, usual = _middle(name, own), float(np.median(theirs))
        if _is_beyond(sign * value, sign * theirs) and _is_changed(sign * value, sign * past):
            explained = kind.explains(value, usual, busy) if kind.explains is not None else 0.0
            if kind.explains is None or explained >= least:
                found.append(SensorCause(name, kind.cause, explained, value, usual))
    return tuple(sorted(found, key=lambda cause: -cause.explained))


def _busy(history: SensorHistory, at: int, onset: int) -> float:
    """Share of the time that a rank spends in its passes; 1 where that is not known."""
    values = (
        history.since("busy", np.array([at]), onset) if "busy" in history.names else np.empty(0)
    )
    middle = float(np.median(values)) if values.size else 0.0
    return min(middle, 1.0) if middle > 0.0 else 1.0


def _middle(name: str, own: Floats) -> float:
    return float(own.max()) if name == "xid" else float(np.median(own))


def _is_beyond(value: float, others: Floats) -> bool:
    """Return whether a value is above other values by more than these scatter."""
    high = float(np.quantile(others, _HIGH, method="higher"))
    return value > high and value - high > high - float(np.median(others))


def _is_changed(value: float, past: Floats) -> bool:
    """Return whether a value is above most of those from before by more than these scatter; true
    where there are none. The onset is known to a few steps, so that some may be from after it."""
    if not past.size:
        return True
    middle = float(np.median(past))
    return value - middle > _SCATTER * float(np.median(np.abs(past - middle)))


def is_host_made(causes: Sequence[SensorCause], slowdown: float) -> bool:
    """Return whether the host is the cause of a rank's slowness."""
    most = {Cause.HOST: 0.0, Cause.DEVICE: 0.0}
    for each in causes:
        most[each.cause] = max(most[each.cause], each.explained)
    enough = _MOST_PART * math.log(max(slowdown, 1.001))
    return most[Cause.HOST] > 0.0 and most[Cause.HOST] >= min(most[Cause.DEVICE], enough)


def sentences(
    causes: Sequence[SensorCause], history: SensorHistory, at: int, onset: int
) -> tuple[str, ...]:
    """The causes as evidence, with the readings of the rank's peers."""
    by_name = {cause.sensor: cause for cause in causes}
    since = f"since step {onset}" if onset >= 0 else "since the first step seen"
    skipped = {name for cause in by_name for name in _IMPLIED.get(cause, ())}
    lines = []
    for cause in causes:
        if cause.sensor in skipped:
            continue
        kind = _KINDS[cause.sensor]
        own, peers = kind.written(cause.own), kind.written(cause.peers)
        line = kind.sentence.format(own=own, peers=peers, since=since)
        clock = by_name.get("sm_mhz")
        if cause.sensor in _LIMITS and clock is not None:
            own, peers = _hertz(clock.own), _hertz(clock.peers)
            line = f"{_LIMITS[cause.sensor]} {since}: SM clock {own}, its peers' {peers}"
        quota = _latest(history, "cpu_quota", at, onset)
        if cause.sensor == "cpu_throttled" and quota is not None:
            line = line.replace("its cgroup", f"its cgroup (quota {quota:.2g} CPUs)")
        temperature = _latest(history, "temperature_c", at, onset)
        if cause.sensor == "thermal_slowdown" and temperature is not None:
            line += f"; its temperature {temperature:.0f} °C"
        lines.append(line)
    return tuple(lines[:_MOST_SENTENCES])


def _latest(history: SensorHistory, name: str, at: int, onset: int) -> float | None:
    if name not in history.names:
        return None
    values = history.since(name, np.array([at]), onset)
    return float(values[-1]) if values.size else None


def peers_of(at: int, classes: Ints, usable: Bools) -> Ints:
    """Positions of usable ranks to compare a rank with: those that hold the same layers, else all
    others."""
    others = usable.copy()
    others[at] = False
    same = np.flatnonzero(others & (classes == classes[at]))
    return (same if same.size else np.flatnonzero(others)).astype(np.int64)
