"""Probes of suspects, and of devices that were named slow and left the layout.

A probe is the same short work on a suspect and on a healthy peer, between two steps.

The detector makes requests and takes answers; the service delivers both. A probe has the same work
on both ends by construction, so that it needs no workload model, and it separates a slow processor
from slow memory. It lasts a few milliseconds; their number is limited.

Devices outside the layout compute nothing, so that only probes can show that they recovered: a
sequential test on the ratio of each probe to one on a healthy device, slow against healthy, with
hysteresis. A device that recovered and became slow again has to be healthy for twice as long each
time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from resihp.contracts import ContractError, Status, Verdict

from .arrays import Ints
from .evidence.sequential import log_ratio
from .evidence.status import SUSPECT_AT
from .persistence import Persistent
from .settings import DetectorSettings

_WAIT_S = 20.0
_SPREAD = 0.03
"""Spread (log) of the ratio of two probes on healthy devices."""
_MOST_EVIDENCE = 6.0
"""Largest evidence of one probe (log)."""


class ProbeKind(StrEnum):
    """Work of a probe: a matrix product, a copy within memory."""

    GEMM = "gemm"
    MEMORY = "memory"


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """Request to run `kind` on `rank` and on `reference`."""

    rank: int
    reference: int
    kind: ProbeKind


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Best time in ms of a probe on the suspect and on its reference."""

    rank: int
    reference: int
    kind: ProbeKind
    rank_ms: float
    reference_ms: float

    def __post_init__(self) -> None:
        for name in ("rank_ms", "reference_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ContractError(name, "must be finite and above 0")
        if not 0 < self.slowdown < math.inf:
            raise ContractError("rank_ms", f"must be comparable with {self.reference_ms}")

    @property
    def slowdown(self) -> float:
        """Time on the suspect over time on the reference."""
        return self.rank_ms / self.reference_ms

    @property
    def words(self) -> str:
        """The result as an evidence sentence."""
        return (
            f"a {self.kind.value} probe took {self.slowdown:.2f} times as long as on rank "
            f"{self.reference}"
        )


class ProbeBudget(Persistent):
    """Limit of probes: at most `per_minute`, and no rank twice within `_WAIT_S` seconds."""

    _saved = ("_asked", "_last")
    _asked: deque[float]
    _last: dict[int, float]

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._asked = deque()
        self._last = {}

    def allow(self, rank: int, kinds: int, now: float) -> bool:
        """Returns whether `kinds` probes of a rank may be asked for at `now` (seconds); counts
        them."""
        while self._asked and self._asked[0] <= now - 60.0:
            self._asked.popleft()
        if now - self._last.get(rank, -np.inf) < _WAIT_S:
            return False
        if len(self._asked) + kinds > self._per_minute:
            return False
        self._asked.extend([now] * kinds)
        self._last[rank] = now
        return True


def probe_gain(result: ProbeResult, slowdown: float) -> float:
    """Log-likelihood ratio that a probe adds: the suspected slowdown against none; bounded."""
    shift = np.asarray(max(np.log(slowdown), _SPREAD))
    ratio = float(log_ratio(np.asarray(np.log(result.slowdown)), np.asarray(_SPREAD), shift))
    return min(max(ratio, -_MOST_EVIDENCE), _MOST_EVIDENCE)


_KINDS = 2
"""Probes of a round: a matrix product and a copy within memory."""
_CLEAN = 0.4
"""A probe looks healthy when it is slow by less than this share of the known slowness (log)."""


@dataclass
class _Device:
    """One device outside the layout.

    slowdown   with which it was named, since step `since` (-1: from its first step)
    evidence   log-likelihood ratio of slow against healthy, bounded on both sides
    clean      consecutive probes that looked healthy
    status     of the device, since step `step`
    """

    slowdown: float
    since: int
    evidence: float
    step: int
    clean: int = 0
    asked_s: float = -math.inf
    rounds: int = 0
    status: Status = Status.FAIL_SLOW
    words: str = "not measured since it left the layout"


class Probation(Persistent):
    """Devices outside the layout, and the evidence on each."""

    _saved = ("_devices", "_times")
    _devices: dict[int, _Device]
    _times: dict[int, int]

    def __init__(self, settings: DetectorSettings) -> None:
        self._settings = settings
        self._devices = {}
        self._times = {}

    def leave(self, rank: int, slowdown: float, since: int, step: int) -> None:
        """A device named slow leaves the layout."""
        self._times[rank] = self._times.get(rank, 0) + 1
        self._devices[rank] = _Device(slowdown, since, SUSPECT_AT, step)

    def back(self, ranks: Iterable[int]) -> dict[int, tuple[float, int]]:
        """Removes devices that work again; returns slowdown and onset of those that are still
        slow."""
        taken = {rank: self._devices.pop(rank) for rank in ranks if rank in self._devices}
        return {
            rank: (device.slowdown, device.since)
            for rank, device in taken.items()
            if device.status == Status.FAIL_SLOW
        }

    def knows(self, rank: int) -> bool:
        """Return whether a device is on probation."""
        return rank in self._devices

    def fail(self, ranks: Iterable[int], step: int) -> list[Verdict]:
        """Marks devices as dead; returns the verdicts that this changed."""
        found = [rank for rank in ranks if rank in self._devices]
        for rank in found:
            self._devices[rank].status, self._devices[rank].step = Status.FAIL_STOP, step
        return [self.verdict(rank) for rank in found]

    def revive(self, rank: int, step: int) -> list[Verdict]:
        """Takes back that a device is dead; returns the verdict if it was held for that. It is as
        slow as before, or as healthy."""
        device = self._devices.get(rank)
        if device is None or device.status != Status.FAIL_STOP:
            return []
        device.status = Status.HEALTHY if self._has_recovered(rank) else Status.FAIL_SLOW
        device.step = step
        return [self.verdict(rank)]

    def stopped(self) -> set[int]:
        """Devices that are held for dead."""
        devices = self._devices.items()
        return {rank for rank, device in devices if device.status == Status.FAIL_STOP}

    def due(self, now: float, reference: Ints) -> list[tuple[int, int]]:
        """Devices to be probed at `now` (seconds), each with one of the ranks in `reference` to
        compare with, another one each time."""
        wait = self._settings.probation_probe_s
        return [
            (rank, int(reference[device.rounds % reference.size]))
            for rank, device in sorted(self._devices.items())
            if reference.size and device.status != Status.FAIL_STOP and now - device.asked_s >= wait
        ]

    def asked(self, rank: int, now: float) -> None:
        """Notes that a round of probes was asked for."""
        self._devices[rank].asked_s = now
        self._devices[rank].rounds += 1

    def observe(self, result: ProbeResult, step: int) -> list[Verdict] | None:
        """Takes the answer to a probe; returns the verdicts that it changed, None if the device is
        not one of these."""
        device = self._devices.get(result.rank)
        if device is None or device.status == Status.FAIL_STOP:
            return None
        ratio, known = math.log(result.slowdown), math.log(device.slowdown)
        total = device.evidence + probe_gain(result, device.slowdown)
        device.evidence = min(max(total, -SUSPECT_AT), SUSPECT_AT)
        device.clean = device.clean + 1 if ratio < _CLEAN * known else 0
        device.words = result.words
        before = device.status
        if before == Status.FAIL_SLOW and self._has_recovered(result.rank):
            device.status, device.step = Status.HEALTHY, step
        elif before == Status.HEALTHY and device.evidence >= SUSPECT_AT:
            device.status, device.step = Status.FAIL_SLOW, step
        return [self.verdict(result.rank)] if device.status != before else []

    def _has_recovered(self, rank: int) -> bool:
        device = self._devices[rank]
        needed = _KINDS * self._settings.recover_steps * 2 ** (self._times[rank] - 1)
        return device.evidence <= -SUSPECT_AT and device.clean >= needed

    def verdict(self, rank: int) -> Verdict:
        """Verdict on a device outside the layout."""
        device = self._devices[rank]
        slow = device.status == Status.FAIL_SLOW
        since = device.since if slow else device.step
        return Verdict(
            rank=rank,
            status=device.status,
            slowdown=device.slowdown if slow else 1.0,
            since_step=since if since >= 0 else None,
            evidence=("stands outside the layout", device.words),
            step=device.step,
        )

    def verdicts(self) -> list[Verdict]:
        """Verdicts on all of them."""
        return [self.verdict(rank) for rank in self._devices]
