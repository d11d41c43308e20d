"""Rule of the ResiHP paper (arXiv 2605.06374): one dimension of parallelism after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from resihp.contracts import Job, Replica, Stage, even_quotas
from resihp.pipeline.orders import most_in_flight, most_split

from ..cost_model import layer_cost, transfer_ms
from ..makespan import pipeline_makespans
from ..memory import MemoryFootprint, plan_schedules
from ..simulator import stage_times
from .base import (
    STOPPED,
    PolicyOutcome,
    Speeds,
    Transition,
    counts_by_rate,
    replica_makespans,
    timed,
    with_layers,
)

_ROUNDS = 3  # of quotas by what a replica runs after re-routing
_Row = tuple[Replica, list[Stage | None]]  # replica as it was, stages after step 1


def resihp_rule(job: Job, speeds: Speeds, steps: int = 3) -> PolicyOutcome:
    """Rule of the ResiHP paper, or the first one or two of its `steps`.

    1. TP: the k fastest ranks of a group, with the power of two k (from the least that fits into
       memory) that maximises `k * min(speed)`.
    2. PP: layers by `floor(layers * new degree / old degree)`, then balanced by the ratio of
       layers to degree until the total is conserved. The layers of a dead group go to the rest of
       its replica.
    3. DP: microbatches by the capacity of the replicas; then, stage by stage, single microbatches
       of the stage that is furthest behind go to a stage of another replica (`_Rerouting`).

    What the paper leaves open is decided in favour of the rule: with three steps, the layers of
    before and quotas that are equal are tried as well. Fewer steps have equal quotas, and without
    the second a replica with a dead group is left out.
    """
    rows: list[_Row] = [
        (r, [_shrunk(job, stage, len(r.stages) - i, speeds) for i, stage in enumerate(r.stages)])
        for r in job.layout.replicas
    ]
    before, after = _as_before(rows), _layered(rows, job.layout.layers)
    options = {1: [before], 2: [after], 3: [after, before]}[steps]
    outcomes = [_divided(job, replicas, speeds, steps) for replicas in options if replicas]
    return min(outcomes, key=lambda outcome: outcome.step_ms, default=STOPPED)


def _divided(job: Job, replicas: Sequence[Replica], speeds: Speeds, steps: int) -> PolicyOutcome:
    """Outcome of step 3 for these replicas; with fewer steps, of equal quotas."""
    even = even_quotas(job.microbatches, len(replicas[: job.microbatches]))
    if steps < 3:
        kept = replicas[: job.microbatches]
        return timed(job, kept, even, speeds, transition=Transition.LIVE)
    ends = replica_makespans(job, replicas, [job.microbatches] * len(replicas), speeds)
    ranked = sorted(range(len(replicas)), key=lambda i: ends[i])[: job.microbatches]
    kept = [replicas[i] for i in ranked]
    capacity = counts_by_rate([1.0 / ends[i] for i in ranked], job.microbatches)
    plain = timed(job, kept, capacity, speeds, transition=Transition.LIVE)
    if any(replica.chunks > 1 for replica in kept):
        return plain
    best = _Rerouting(job, kept, speeds).best([capacity, list(even)])
    return best if best.step_ms < plain.step_ms * (1 - 1e-9) else plain


class _Rerouting:
    """Microbatches that stages run for stages of other replicas.

    A stage may take a microbatch of another one if it holds its layers and has memory for the
    activations. The stage with most work left gives one to the taker that would be done first,
    until that is no earlier. A pipeline is then timed with stages that are longer or shorter by
    what they took or gave. That costs the rule less than it would cost in a job: the activations
    that travel between replicas take no time, and no pipeline waits for another.
    """

    def __init__(self, job: Job, replicas: Sequence[Replica], speeds: Speeds) -> None:
        self._job, self._replicas = job, replicas
        self._schedule = plan_schedules(job)[0]
        self._footprint = MemoryFootprint.of(job, len(replicas))
        self._times = [stage_times(job, replica, speeds) for replica in replicas]
        self._each = [[f + b for f, b in zip(*times, strict=True)] for times in self._times]
        self._takers = {
            (r, s): list(self._able(r, stage))
            for r, replica in enumerate(replicas)
            for s, stage in enumerate(replica.stages)
        }

    def _able(self, row: int, stage: Stage) -> Iterator[tuple[int, int, float]]:
        """Stages of other replicas that hold the layers of a stage, and their time for those."""
        start, stop = stage.layers
        for r, replica in enumerate(self._replicas):
            for s, other in enumerate(replica.stages):
                if r != row and other.layers[0] <= start < stop <= other.layers[1]:
                    part = stage.layer_count / other.layer_count
                    yield r, s, part * self._each[r][s]

    def best(self, starts: Sequence[Sequence[int]]) -> PolicyOutcome:
        """Best outcome from these quotas, and from those by what replicas then run."""
        best = STOPPED
        for start in starts:
            quotas = list(start)
            for _ in range(_ROUNDS):
                ends = self._ends(quotas)
                step_ms = max(ends) + layer_cost(self._job).step_ms
                if step_ms < best.step_ms:
                    best = PolicyOutcome(
                        step_ms, None, tuple(quotas), Transition.LIVE, self._schedule
                    )
                if not min(ends):
                    break  # a replica has given all of its microbatches away
                rates = [quota / end for quota, end in zip(quotas, ends, strict=True)]
                quotas = counts_by_rate(rates, self._job.microbatches)
        return replace(best, detail="microbatches are re-routed between stages of replicas")

    def _ends(self, quotas: Sequence[int]) -> list[float]:
        """Makespan of every replica after re-routing."""
        loads = self._moved(quotas)
        ends = [0.0] * len(quotas)
        for count in {len(replica.stages) for replica in self._replicas}:
            rows = [i for i, replica in enumerate(self._replicas) if len(replica.stages) == count]
            scale = [self._longer(i, loads[i], quotas[i]) for i in rows]
            forward, backward = (
                np.array([self._times[i][part] for i in rows]) * scale for part in (0, 1)
            )
            found = pipeline_makespans(
                forward,
                backward,
                [quotas[i] for i in rows],
                p2p=transfer_ms(self._job),
                max_in_flight=self._job.max_in_flight,
                schedule=self._schedule,
            )
            for row, end in zip(rows, found.tolist(), strict=True):
                ends[row] = end
        return ends

    def _longer(self, row: int, loads: Sequence[float], quota: int) -> list[float]:
        """Work of every stage of a replica over its own for so many microbatches."""
        own = [quota * each for each in self._each[row]]
        return [load / mine if mine else 1.0 for load, mine in zip(loads, own, strict=True)]

    def _moved(self, quotas: Sequence[int]) -> list[list[float]]:
        """Time of all work of every stage after re-routing."""
        loads = [[q * each for each in row] for q, row in zip(quotas, self._each, strict=True)]
        own = {place: quotas[place[0]] for place in self._takers}
        while True:
            worst = max(self._takers, key=lambda place: (loads[place[0]][place[1]], place))
            r, s = worst
            able = [
                (loads[i][k] + ms, i, k, ms)
                for i, k, ms in self._takers[worst]
                if loads[i][k] + ms < loads[r][s] * (1 - 1e-9)
            ]
            able = [one for one in able if self._holds(one[1], one[2], quotas[one[1]], one[0])]
            if not able or not own[worst]:
                return loads
            _, i, k, ms = min(able)
            loads[i][k] += ms
            loads[r][s] -= self._each[r][s]
            own[worst] -= 1

    def _holds(self, row: int, index: int, quota: int, load: float) -> bool:
        """True if a stage with so much work has memory for its activations."""
        budget, replica = self._footprint.budget_bytes, self._replicas[row]
        if budget is None:
            return True
        last = len(replica.stages) - 1
        limits = self._schedule, last + 1, self._job.max_in_flight
        usual, split = most_in_flight(*limits)[index], most_split(*limits)[index]
        more = max(load / (quota * self._each[row][index]), 1.0)  # a taker has layers, so time
        held = self._footprint.stage_bytes(
            replica.stages[index],
            first=index == 0,
            last=index == last,
            in_flight=math.ceil(min(usual, quota) * more - 1e-9),
            split=math.ceil(min(split, quota) * more - 1e-9),
        )
        return max(held) <= budget


def _shrunk(job: Job, stage: Stage, in_flight: int, speeds: Speeds) -> Stage | None:
    """Stage with the ranks that step 1 keeps; None if no degree fits."""
    order = sorted(
        (r for r in stage.ranks if speeds.get(r, 1.0) > 0.0), key=lambda r: (-speeds.get(r, 1.0), r)
    )
    footprint = MemoryFootprint.of(job, job.layout.dp)
    best, capacity = None, 0.0
    degree = 1
    while degree <= len(order):
        members = tuple(sorted(order[:degree]))
        option = Stage(members, stage.layers, more_layers=stage.more_layers)
        holds = footprint.stage_bytes(option, first=False, last=False, in_flight=in_flight)
        fits = footprint.budget_bytes is None or max(holds) <= footprint.budget_bytes
        slowest = speeds.get(order[degree - 1], 1.0)
        if fits and degree * slowest > capacity * (1 + 1e-9):
            best, capacity = option, degree * slowest
        degree *= 2
    return best


def _as_before(rows: Sequence[_Row]) -> list[Replica]:
    """Replicas that still have all groups, with the layers of before."""
    kept = [[stage for stage in stages if stage] for _, stages in rows]
    pairs = zip(rows, kept, strict=True)
    return [Replica(tuple(stages)) for (old, _), stages in pairs if len(stages) == len(old.stages)]


def _layered(rows: Sequence[_Row], total: int) -> list[Replica]:
    """Replicas after step 2, without those that have no group left."""
    replicas = []
    for old, stages in rows:
        kept = [(before, s) for before, s in zip(old.stages, stages, strict=True) if s]
        if not kept:
            continue
        least = int(len(kept) <= total)  # of more stages than layers, some hold none
        counts = [max(least, b.layer_count * s.tp // b.tp) for b, s in kept]
        while sum(counts) != total:
            sign = 1 if sum(counts) < total else -1
            able = [i for i in range(len(kept)) if sign > 0 or counts[i] > least]
            index = min(able, key=lambda i: ((sign * counts[i] + (sign > 0)) / kept[i][1].tp, i))
            counts[index] += sign
        replicas.append(with_layers([stage for _, stage in kept], counts))
    return replicas
