"""Fail-stop by silence: accuracy and delay of the adaptive time-out beside fixed ones.

Heartbeats are simulated, one a second from each of 64 ranks; eight of the ranks die.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks._detector_cases import job_of
from detector import Detector
from resihp.contracts import Status

RANKS, DEAD = 64, 8
SECONDS, LEARNED = 1_800, 600
FIXED = (5, 10, 30, 60)
COLUMNS = ("heartbeats", "rule", "dead found", "delay s, median", "longest", "live called dead")
Heard = NDArray[np.bool_]  # [second, rank]


@dataclass(frozen=True)
class Network:
    """What happens to heartbeats: a share is lost, they are late (exponential, mean in seconds),
    ranks pause (seconds of a pause, twice in the time), or all are silent together (seconds)."""

    name: str
    lost: float = 0.0
    late_s: float = 0.05
    pause_s: int = 0
    outage_s: int = 0

    def heard(self, random: np.random.Generator) -> tuple[Heard, NDArray[np.int64]]:
        """Whether each rank was heard in each second, and when it died (`SECONDS`: it did not)."""
        sent = np.arange(SECONDS)[:, None] + random.random(RANKS)
        arrived = sent + random.exponential(self.late_s, sent.shape)
        comes = random.random(sent.shape) >= self.lost
        for rank in range(RANKS if self.pause_s else 0):
            for start in random.integers(0, SECONDS - self.pause_s, 2):
                arrived[start : start + self.pause_s, rank] = start + self.pause_s
        if self.outage_s:
            start = int(random.integers(LEARNED, SECONDS - self.outage_s))
            comes[start : start + self.outage_s] = False
        died = np.full(RANKS, SECONDS)
        victims = random.permutation(RANKS)[:DEAD]
        died[victims] = random.integers(LEARNED, SECONDS - 120, DEAD)
        comes &= sent < died
        second = np.minimum(arrived[comes].astype(np.int64), SECONDS - 1)
        heard = np.zeros((SECONDS, RANKS), bool)
        heard[second, np.nonzero(comes)[1]] = True
        return heard, died


NETWORKS = (
    Network("regular"),
    Network("10% lost", lost=0.1),
    Network("30% lost", lost=0.3),
    Network("late by 1 s in the mean", late_s=1.0),
    Network("every rank pauses twice for 8 s", pause_s=8),
    Network("every rank pauses twice for 20 s", pause_s=20),
    Network("no network for 20 s", outage_s=20),
)


@dataclass
class AliveTally:
    """Delays of the deaths that were found, and live ranks that were called dead."""

    delays: list[int] = field(default_factory=list)
    deaths: int = 0
    false: int = 0

    def row(self) -> tuple[str, str, str, str]:
        """Share found, median and longest delay, false deaths."""
        found = len(self.delays) / max(self.deaths, 1)
        median = f"{np.median(self.delays):.0f}" if self.delays else "-"
        return f"{found:.1%}", median, str(max(self.delays, default="-")), str(self.false)


Rule = Callable[[Heard], list[set[int]]]
"""Whether each rank was heard in each second -> ranks that are called dead then."""


def adaptive(heard: Heard) -> list[set[int]]:
    """This detector, asked every second."""
    detector, said = Detector(job_of(RANKS // 8, 8, 1)), []
    for second, row in enumerate(heard):
        detector.heartbeat(np.flatnonzero(row).tolist(), float(second))
        changed = detector.check_alive(float(second))
        said.append({v.rank for v in changed if v.status is Status.FAIL_STOP})
    return said


def fixed(time_out_s: int) -> Rule:
    """Dead after a silence of so many seconds."""

    def rule(heard: Heard) -> list[set[int]]:
        last, said = np.zeros(RANKS, np.int64), []
        for second, row in enumerate(heard):
            last[row] = second
            said.append(set(np.flatnonzero(second - last == time_out_s + 1).tolist()))
        return said

    return rule


RULES: dict[str, Rule] = {"adaptive": adaptive, **{f"{s} s": fixed(s) for s in FIXED}}


def alive_rows(trials: int) -> list[tuple[str, ...]]:
    """One line for each kind of network and each rule."""
    rows: list[tuple[str, ...]] = []
    for network in NETWORKS:
        tallies = {name: AliveTally() for name in RULES}
        for seed in range(trials):
            heard, died = network.heard(np.random.default_rng(seed))
            for name, rule in RULES.items():
                _count(tallies[name], rule(heard), died)
        rows += [(network.name, name, *tally.row()) for name, tally in tallies.items()]
    return rows


def _count(tally: AliveTally, said: list[set[int]], died: NDArray[np.int64]) -> None:
    found: dict[int, int] = {}
    for second, ranks in enumerate(said):
        for rank in ranks:
            if second < died[rank]:
                tally.false += 1
            else:
                found.setdefault(rank, second)
    tally.deaths += DEAD
    tally.delays += [second - int(died[rank]) for rank, second in found.items()]
