"""Numbers of microbatches in flight that hide slow links: the order of passes that Adaptra adapts.

A transfer between two stages delays nobody while the receiver has other passes to run. With d more
microbatches in flight than the stage behind it, a stage has d - 1 passes of each kind to run while
activation and gradient of one are on their way (Adaptra, arXiv 2504.19232; for d = 2 everywhere,
eager 1F1B). That takes memory in the stages before the link, and fills the pipeline later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, islice, pairwise
from math import ceil, inf

from resihp.contracts import Job, Layout, Replica, Schedule
from resihp.pipeline.orders import most_ahead

from .link_costs import LinkSlowdowns, boundaries_ms
from .memory import MemoryFootprint, plan_schedules, replica_fits
from .simulator import replica_makespan, stage_times
from .step_time import ReplicaTimes

Counts = tuple[int, ...]

_MOST_PASSES = 300_000  # that are replayed for all replicas
_STARTS = 4  # numbers in flight that fit and cover most, which are timed
_LEAST_GAIN = 1e-3  # of the makespan, for which more is held in flight


def with_forwards_ahead(
    job: Job,
    layout: Layout,
    quotas: Sequence[int],
    speeds: Mapping[int, float],
    links: LinkSlowdowns,
    schedule: Schedule,
    expired: Callable[[], bool] = lambda: False,
    *,
    within_ms: float = inf,
) -> tuple[Layout, tuple[int, ...], float] | None:
    """Layout with the numbers in flight that hide its slow links best, quotas and makespan in ms.

    schedule   under which the layout takes its time now: 1F1B or eager 1F1B
    within_ms  makespan to be shorter than

    Replicas without a slow link between stages hold as many as under `schedule`. None where no link
    is slow, where plans of the job may not start forwards earlier than under 1F1B, and where no
    number in flight that fits into memory shortens the makespan.
    """
    if not links or Schedule.EAGER_1F1B not in plan_schedules(job):
        return None
    if schedule not in (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B):
        return None
    plain = Layout(tuple(replace(replica, in_flight=()) for replica in layout.replicas))
    before = max(ReplicaTimes(job, plain.replicas, schedule, speeds, links).makespans(quotas))
    search = _Search(job, layout.dp, speeds, links, expired)
    replicas = [
        search.best(replica, quota, most_ahead(schedule, len(replica.stages), job.max_in_flight))
        for replica, quota in zip(plain.replicas, quotas, strict=True)
    ]
    times = ReplicaTimes(job, replicas, Schedule.EAGER_1F1B, speeds, links)
    found = times.best_quotas(quotas) if len(quotas) > 1 else tuple(quotas)
    if not all(map(search.fits, replicas, found)):
        found = tuple(quotas)
    makespan_ms = max(times.makespans(found))
    if makespan_ms >= min(before * (1 - _LEAST_GAIN), within_ms):
        return None
    return Layout(tuple(replicas)), found, makespan_ms


class _Search:
    """Search for the best numbers in flight of single replicas."""

    def __init__(
        self,
        job: Job,
        replicas: int,
        speeds: Mapping[int, float],
        links: LinkSlowdowns,
        expired: Callable[[], bool],
    ) -> None:
        self._job, self._speeds, self._links, self._expired = job, speeds, links, expired
        self._footprint = MemoryFootprint.of(job, replicas)
        self._passes = 0

    def best(self, replica: Replica, quota: int, usual: Counts) -> Replica:
        """Replica with the numbers in flight of the shortest makespan, of equal ones the fewest.

        Starts from the usual ones and from those that cover the transfers; then one boundary at a
        time gets one more or one less, until that shortens nothing or enough has been replayed.
        """
        boundaries = pairwise(replica.stages)
        if quota < 2 or all(self._links.boundary(a.ranks, b.ranks) <= 1.0 for a, b in boundaries):
            return replace(replica, in_flight=usual)
        cost = cache(partial(self._cost, replica, quota))
        options = covering(self._job, replica, quota, self._speeds, self._links)
        fitting = (o for o in options if self.fits(replace(replica, in_flight=o), quota))
        counts = min([usual, *islice(fitting, _STARTS)], key=cost)
        while self._passes < _MOST_PASSES and not self._expired():
            nearest = min(_changed(counts, quota), key=cost, default=counts)
            if cost(nearest) >= cost(counts):
                break
            counts = nearest
        return replace(replica, in_flight=counts)

    def fits(self, replica: Replica, quota: int) -> bool:
        """True if a replica has memory for its numbers in flight."""
        most = self._job.max_in_flight
        if most is not None and replica.in_flight[0] > most:
            return False
        return replica_fits(self._job, self._footprint, replica, quota, Schedule.EAGER_1F1B)

    def _cost(self, replica: Replica, quota: int, counts: Counts) -> tuple[float, int]:
        """Makespan in ms (inf: does not fit) and microbatches held by all stages."""
        option = replace(replica, in_flight=counts)
        if not self.fits(option, quota):
            return inf, sum(counts)
        self._passes += 2 * quota * len(counts)
        given = quota, self._speeds, Schedule.EAGER_1F1B, self._links
        return round(replica_makespan(self._job, option, *given), 9), sum(counts)


def covering(
    job: Job, replica: Replica, quota: int, speeds: Mapping[int, float], links: LinkSlowdowns
) -> Iterator[Counts]:
    """Numbers in flight with which every stage has passes to run during each transfer and its
    answer, in units of the slowest stage; then fewer and fewer, down to those of 1F1B."""
    each = max(map(sum, zip(*stage_times(job, replica, speeds, links), strict=True)))
    delays = boundaries_ms(job, replica, links)
    more = [min(ceil(2.0 * delay / each - 1e-9), quota) for delay in delays]
    for fewer in range(max(more, default=0) + 1):
        ahead = [1 + max(0, number - fewer) for number in more]
        yield tuple(accumulate([1, *reversed(ahead)]))[::-1]


def _changed(counts: Counts, quota: int) -> Iterator[Counts]:
    """Numbers in flight with one more or one less ahead at one boundary."""
    for index, (here, behind) in enumerate(pairwise(counts)):
        for change in (1, -1):
            option = (*(count + change for count in counts[: index + 1]), *counts[index + 1 :])
            if here + change > behind and option[0] <= quota:
                yield option
