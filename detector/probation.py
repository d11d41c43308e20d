"""Devices that were named slow and left the layout.

They compute nothing any more, so that only probes can show that they recovered: a sequential test
on the ratio of each probe to that on a healthy device, slow against healthy, with hysteresis. A
device that was slow, came back and was slow again has to be healthy for twice as long each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from resihp.contracts import Status, Verdict

from .evidence.sequential import log_ratio
from .persistence import Persistent
from .probes import PROBE_SPREAD, ProbeKind, ProbeResult
from .settings import DetectorSettings

_MOST = 6.0
"""Most that one probe may say (log)."""
_KINDS = 2
"""Probes of a round: a product of matrices and a copy within memory."""
_CLEAN = 0.4
"""A probe looks healthy when it is slow by less than this share of the known slowness (log)."""


@dataclass
class _Place:
    """One device outside the layout.

    slowdown   that it was named with, since step `since` (-1: from its first step)
    evidence   log-likelihood ratio of slow against healthy, bounded on both sides
    clean      probes running that looked healthy
    status     what is said of it, at step `step`
    """

    slowdown: float
    since: int
    evidence: float
    step: int
    clean: int = 0
    asked_s: float = -math.inf
    rounds: int = 0
    status: str = Status.FAIL_SLOW.value
    words: str = "not measured since it left the layout"


class Probation(Persistent):
    """Who stands outside, and what is known of them."""

    _saved = ("_places", "_times")
    _places: dict[int, _Place]
    _times: dict[int, int]

    def __init__(self, settings: DetectorSettings) -> None:
        self._settings = settings
        self._sure = math.log(settings.suspect_steps)
        self._places = {}
        self._times = {}

    def leave(self, rank: int, slowdown: float, since: int, step: int) -> None:
        """A device named slow leaves the layout."""
        self._times[rank] = self._times.get(rank, 0) + 1
        self._places[rank] = _Place(slowdown, since, self._sure, step)

    def back(self, ranks: Iterable[int]) -> dict[int, tuple[float, int]]:
        """Devices that work again; slowdown and onset of those that are still slow."""
        taken = {rank: self._places.pop(rank) for rank in ranks if rank in self._places}
        return {
            rank: (place.slowdown, place.since)
            for rank, place in taken.items()
            if place.status == Status.FAIL_SLOW
        }

    def knows(self, rank: int) -> bool:
        """Return whether a device is on probation."""
        return rank in self._places

    def fail(self, ranks: Iterable[int], step: int) -> list[Verdict]:
        """Devices that died out there; the verdicts that this changed."""
        found = [rank for rank in ranks if rank in self._places]
        for rank in found:
            self._places[rank].status, self._places[rank].step = Status.FAIL_STOP.value, step
        return [self.verdict(rank) for rank in found]

    def due(self, now: float, reference: list[int]) -> list[tuple[int, int]]:
        """Devices to be probed at `now` (seconds), each with one of `reference` to compare with,
        another one each time."""
        wait = self._settings.probation_probe_s
        return [
            (rank, reference[place.rounds % len(reference)])
            for rank, place in sorted(self._places.items())
            if reference and place.status != Status.FAIL_STOP and now - place.asked_s >= wait
        ]

    def asked(self, rank: int, now: float) -> None:
        """A round of probes was asked for."""
        self._places[rank].asked_s = now
        self._places[rank].rounds += 1

    def observe(self, result: ProbeResult, step: int) -> list[Verdict] | None:
        """Takes the answer to a probe: what it changed; None if it is of no one here."""
        place = self._places.get(result.rank)
        if place is None or place.status == Status.FAIL_STOP or result.kind is ProbeKind.LINK:
            return None
        ratio, known = math.log(result.slowdown), math.log(place.slowdown)
        shift = np.asarray(max(known, PROBE_SPREAD))
        gain = float(log_ratio(np.asarray(ratio), np.asarray(PROBE_SPREAD), shift))
        total = place.evidence + min(max(gain, -_MOST), _MOST)
        place.evidence = min(max(total, -self._sure), self._sure)
        place.clean = place.clean + 1 if ratio < _CLEAN * known else 0
        place.words = result.words
        return self._decide(result.rank, place, step)

    def _decide(self, rank: int, place: _Place, step: int) -> list[Verdict]:
        needed = _KINDS * self._settings.recover_steps * 2 ** (self._times[rank] - 1)
        recovered = place.evidence <= -self._sure and place.clean >= needed
        slow_again = place.evidence >= self._sure
        before = place.status
        if before == Status.FAIL_SLOW and recovered:
            place.status, place.step = Status.HEALTHY.value, step
        elif before == Status.HEALTHY and slow_again:
            place.status, place.step = Status.FAIL_SLOW.value, step
        return [self.verdict(rank)] if place.status != before else []

    def verdict(self, rank: int) -> Verdict:
        """What is said of a device outside the layout."""
        place = self._places[rank]
        slow = place.status == Status.FAIL_SLOW
        since = place.since if slow else place.step
        return Verdict(
            rank=rank,
            status=Status(place.status),
            slowdown=place.slowdown if slow else 1.0,
            since_step=since if since >= 0 else None,
            evidence=("stands outside the layout", place.words),
            step=place.step,
        )

    def verdicts(self) -> list[Verdict]:
        """What is said of everyone here."""
        return [self.verdict(rank) for rank in self._places]
