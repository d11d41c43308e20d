"""Fault scenarios: a timeline of device faults, simulated under several policies.

A scenario file (TOML):

hours = 24                      # simulated time
restart_s = 300                 # cost of a restart from a checkpoint

[[fault]]
at_s = 600                      # seconds from the start
rank = 3
speed = 0.5                     # 0: dead; a later entry replaces an earlier one
until_s = 7200                  # healthy again; default: never
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from resihp.contracts import ContractError, Job, from_json

from .cost_model import layer_cost
from .job_file import read_toml
from .migration import migration_ms
from .policies import PolicyOutcome, policy_outcome
from .policies.base import Transition, replica_makespans
from .simulator import MOST_SPEED

_MOST_HOURS = 1e12  # so that neither milliseconds nor the steps in them are infinite
_VISIBLE = 1e-3  # of the time range of a plot
_LEAST_GAIN = 0.02  # a layout that still runs is kept unless the new one is faster by this


@dataclass(frozen=True, kw_only=True)
class FaultEvent:
    """Speed of one device from `at_s` to `until_s`, or to the end."""

    at_s: float
    rank: int
    speed: float
    until_s: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.at_s < math.inf:  # nor NaN
            raise ContractError("at_s", f"must be finite and 0 or more, not {self.at_s}")
        if self.rank < 0:
            raise ContractError("rank", "must be 0 or more")
        if self.speed != 0.0 and not 1.0 / MOST_SPEED <= self.speed <= 1.0:
            raise ContractError("speed", f"must be 0, or from {1.0 / MOST_SPEED:g} to 1")
        if self.until_s is not None and not self.at_s < self.until_s < math.inf:
            raise ContractError("until_s", f"must be finite and after at_s, not {self.until_s}")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Faults over time, and the cost of a restart."""

    hours: float
    fault: tuple[FaultEvent, ...] = ()
    restart_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0.0 < self.hours <= _MOST_HOURS:
            problem = f"must be above 0 and at most {_MOST_HOURS:g}, not {self.hours}"
            raise ContractError("hours", problem)
        if not 0.0 <= self.restart_s < math.inf:
            raise ContractError("restart_s", f"must be finite and 0 or more, not {self.restart_s}")

    def speeds_at(self, seconds: float) -> dict[int, float]:
        """Speeds of unhealthy devices at a time."""
        speeds: dict[int, float] = {}
        for fault in sorted(self.fault, key=lambda f: f.at_s):
            if fault.at_s <= seconds:
                over = fault.until_s is not None and fault.until_s <= seconds
                speeds[fault.rank] = 1.0 if over else fault.speed
        return {rank: speed for rank, speed in speeds.items() if speed != 1.0}

    def changes(self) -> list[float]:
        """Times at which a speed changes within the simulated time, 0 first."""
        times = {0.0, *(f.at_s for f in self.fault), *(f.until_s or 0.0 for f in self.fault)}
        return sorted(t for t in times if t < 3600.0 * self.hours)


@dataclass(frozen=True)
class Segment:
    """Time between two changes: a pause, then steps of constant duration."""

    start_s: float
    end_s: float
    pause_s: float
    step_ms: float

    def steps(self) -> float:
        """Completed steps, including fractions; 0 while the job cannot run."""
        if math.isinf(self.step_ms):
            return 0.0
        return max(0.0, self.end_s - self.start_s - self.pause_s) * 1e3 / self.step_ms


@dataclass(frozen=True)
class PolicyRun:
    """Result of a policy over a scenario."""

    policy: str
    segments: tuple[Segment, ...]
    fault_free_ms: float

    @property
    def goodput(self) -> float:
        """Completed work relative to a fault-free job."""
        watched_ms = 1e3 * (self.segments[-1].end_s - self.segments[0].start_s)
        return sum(s.steps() for s in self.segments) * self.fault_free_ms / watched_ms

    @property
    def paused_s(self) -> float:
        """Total time of pauses between layouts."""
        return sum(segment.pause_s for segment in self.segments)


def parse_scenario(text: str) -> Scenario:
    """Scenario described by a TOML text. Raises `ContractError` with the dotted field."""
    return from_json(Scenario, read_toml(text))


def play_scenario(
    job: Job,
    scenario: Scenario,
    policies: Iterable[str],
    progress: Callable[[str, float], None] = lambda policy, seconds: None,
) -> list[PolicyRun]:
    """Simulate the scenario under every policy; each change of speed is known as it happens.

    `progress` is called with the policy and the time reached in seconds. A layout that still runs
    is kept unless the new one is faster by 2%; a live change costs its migration time, a restart
    the scenario's `restart_s`; a pause outlasts further faults. Raises `ContractError` for a fault
    of an unknown rank or policy.
    """
    for fault in scenario.fault:
        if fault.rank not in set(job.layout.ranks):
            raise ContractError("fault", f"rank {fault.rank} does not work in the job's layout")
    healthy = policy_outcome("nothing", job, {})
    spans = list(pairwise([*scenario.changes(), 3600.0 * scenario.hours]))
    runs = []
    for name in policies:
        current, segments, left = healthy, [], 0.0
        for start, end in spans:
            speeds = scenario.speeds_at(start)
            current, pause = _next(job, name, current, speeds, scenario.restart_s)
            left = max(left, pause)
            paused = min(left, end - start)
            left -= paused
            segments.append(Segment(start, end, paused, current.step_ms))
            progress(name, end)
        runs.append(PolicyRun(name, tuple(segments), healthy.step_ms))
    return runs


def _next(
    job: Job, name: str, current: PolicyOutcome, speeds: Mapping[int, float], restart_s: float
) -> tuple[PolicyOutcome, float]:
    """Outcome under new speeds, and the pause before it in seconds."""
    fresh = policy_outcome(name, job, speeds)
    kept_ms = _step_ms(job, current, speeds)
    if kept_ms <= fresh.step_ms * (1 + _LEAST_GAIN):
        return replace(current, step_ms=kept_ms), 0.0
    return fresh, _pause_s(job, current, fresh, restart_s)


def _step_ms(job: Job, outcome: PolicyOutcome, speeds: Mapping[int, float]) -> float:
    """Step time of an outcome under other speeds; inf if it cannot run or has no layout."""
    layout = outcome.layout
    if layout is None or any(speeds.get(rank, 1.0) <= 0.0 for rank in layout.ranks):
        return math.inf
    makespans = replica_makespans(job, layout.replicas, outcome.quotas, speeds, outcome.schedule)
    return max(makespans) + layer_cost(job).step_ms


def _pause_s(job: Job, old: PolicyOutcome, new: PolicyOutcome, restart_s: float) -> float:
    if math.isinf(new.step_ms) or new.transition is Transition.NONE:
        return 0.0
    if new.transition is Transition.RESTART:
        return restart_s
    if old.layout is None or new.layout is None:
        return 0.0
    return migration_ms(job, old.layout, new.layout) / 1e3


def throughput(played: PolicyRun, microbatches: int) -> tuple[Sequence[float], Sequence[float]]:
    """Edges in hours and microbatches per second after each edge, for a step plot.

    Pauses too short to be visible are left out.
    """
    edges, rates = [], []
    visible_s = _VISIBLE * (played.segments[-1].end_s - played.segments[0].start_s)
    for segment in played.segments:
        rate = 0.0 if math.isinf(segment.step_ms) else 1e3 * microbatches / segment.step_ms
        if segment.pause_s > visible_s:
            edges.append(segment.start_s / 3600.0)
            rates.append(0.0)
        edges.append((segment.start_s + segment.pause_s) / 3600.0)
        rates.append(rate)
    edges.append(played.segments[-1].end_s / 3600.0)
    rates.append(rates[-1])
    return edges, rates
