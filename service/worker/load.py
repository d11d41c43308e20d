"""Processor time that jobs cost the workers, and the jobs that a worker takes or gives away for it.

Loads are shares of a core. Each worker reads the same table of owners and loads and decides for
itself; a lease keeps two workers from holding one job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import exp
from statistics import fmean

_SMOOTHING_S = 5.0
MOST_LOAD = 0.8
"""A worker above it gives jobs away."""
_FILL_LOAD = 0.7
"""A worker is given jobs up to this load, so that it does not give them away again."""
_LEAST_GIVEN = 0.001
"""A job below it is not given away: the giver would not gain by it."""
_FIRST_LOAD = 0.01
"""Assumed of the first job."""

_Place = tuple[float, int, str]
"""Load, number of jobs and name of a worker; the least comes first."""


class TimeShare:
    """Keeps one kind of work of a worker within a share of its time.

    What was not used in the last `slack_s` may be made up for. After a piece of work that takes
    more than its share, the next one waits.
    """

    def __init__(self, share: float, slack_s: float = 1.0) -> None:
        self._share, self._slack_s = share, slack_s
        self._free_s = float("-inf")

    def has_time(self, now_s: float) -> bool:
        """Return whether a piece of the work may begin, by the monotonic clock."""
        return now_s >= self._free_s

    def spend(self, seconds: float, now_s: float) -> None:
        """Count a piece of the work that took so long."""
        self._free_s = max(self._free_s, now_s - self._slack_s) + seconds / self._share


class LoadMeter:
    """Smoothed loads of a worker's jobs. Time that is not the work of one job counts for all."""

    def __init__(self) -> None:
        self._processor_s = self._begin_processor_s = 0.0
        self._begin_s = float("-inf")
        self._spent_s = dict[str, float]()
        self._loads = dict[str, float]()

    def begin(self, processor_s: float, now_s: float) -> None:
        """Begin a measurement at these readings of the processor's clock and the monotonic one."""
        self._processor_s = self._begin_processor_s = processor_s
        self._begin_s = now_s
        self._spent_s = {}

    def add(self, job: str | None, processor_s: float) -> None:
        """Count the processor time since the last reading for a job; None: for all."""
        spent_s, self._processor_s = processor_s - self._processor_s, processor_s
        if job is not None:
            self._spent_s[job] = self._spent_s.get(job, 0.0) + spent_s

    def take(self, job: str, load: float) -> None:
        """Start with the load that a job had at another worker."""
        self._loads[job] = load

    def measure(self, jobs: Collection[str], now_s: float) -> dict[str, float]:
        """Loads of the worker's jobs, smoothed over 5 s; their sum is the load of the worker."""
        elapsed_s = max(now_s - self._begin_s, 1e-3)
        spent_s = sum(self._spent_s.values())
        busy_s = self._processor_s - self._begin_processor_s
        scale = busy_s / spent_s / elapsed_s if spent_s > 0 else 0.0
        weight = 1.0 - exp(-elapsed_s / _SMOOTHING_S)
        loads = dict[str, float]()
        for job in jobs:
            old, new = self._loads.get(job, 0.0), self._spent_s.get(job, 0.0) * scale
            loads[job] = old + weight * (new - old)
        self._loads = loads
        return dict(loads)


@dataclass(frozen=True)
class WorkerLoads:
    """Live workers, the owner of each job (None: it is free), and the loads of the jobs."""

    workers: Collection[str]
    owners: Mapping[str, str | None]
    loads: Mapping[str, float]

    def load(self, job: str) -> float:
        """Load of a job; that of the average job where it is not known yet."""
        known = self.loads.get(job)
        return self._average if known is None else known

    def jobs_to_take(self, worker: str) -> list[str]:
        """Free jobs that fall to a worker, which is among the live ones.

        One after the other, the idle ones first, each free job falls to the worker with the least
        load then, and among equal ones to that with the fewest jobs.
        """
        _, taken = self._assignment
        return taken[worker]

    def jobs_to_give(self, worker: str) -> list[str]:
        """Jobs that a worker above `MOST_LOAD` releases, the idle ones first, until it is not.

        Each falls to a worker that stays below `MOST_LOAD` with it. Of several workers with too
        much load one gives at a time, so that together they do not give another too much.
        """
        places, _ = self._assignment
        for giver in sorted(places, key=lambda name: places[name], reverse=True):
            if given := self._given_by(giver):
                return given if giver == worker else []
        return []

    def _given_by(self, giver: str) -> list[str]:
        places = dict(self._assignment[0])
        load, *_ = places.pop(giver)
        given = list[str]()
        for job in self._idle_first(job for job, owner in self.owners.items() if owner == giver):
            if load <= MOST_LOAD or not places:
                break
            if self.load(job) < _LEAST_GIVEN:
                continue
            receiver = min(places, key=lambda name: places[name])
            if places[receiver][0] + self.load(job) > _FILL_LOAD:
                break  # the others are larger
            places[receiver] = self._with(places[receiver], job)
            load -= self.load(job)
            given.append(job)
        return given

    @cached_property
    def _assignment(self) -> tuple[dict[str, _Place], dict[str, list[str]]]:
        """The free jobs that fall to each worker, after the places of the workers with them."""
        places = {name: (0.0, 0, name) for name in self.workers}
        for job, owner in self.owners.items():
            if owner in places:
                places[owner] = self._with(places[owner], job)
        taken: dict[str, list[str]] = {name: [] for name in places}
        for job in self._idle_first(job for job, owner in self.owners.items() if owner is None):
            receiver = min(places, key=lambda name: places[name])
            places[receiver] = self._with(places[receiver], job)
            taken[receiver].append(job)
        return places, taken

    def _with(self, place: _Place, job: str) -> _Place:
        load, jobs, name = place
        return load + self.load(job), jobs + 1, name

    def _idle_first(self, jobs: Iterable[str]) -> list[str]:
        return sorted(jobs, key=lambda job: (self.load(job), job))

    @cached_property
    def _average(self) -> float:
        return fmean(self.loads.values()) if self.loads else _FIRST_LOAD
