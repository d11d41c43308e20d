"""Expected time of a step from its own work: predicted passes on the graph of its schedule.

The iteration-time predictor of ResiHP (arXiv 2605.06374): an iteration is a critical path through
the pipeline, so that its time follows from the times of its passes, and these from the lengths of
their sequences. `PipelineTime` replays the passes; `StepTimeModel` adds what a step takes besides
them (transfers, collectives, optimizer, launches), as the last steps showed it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import ContractError, Job, Op, Replica, TelemetryBatch
from resihp.pipeline.graph import Graph
from resihp.pipeline.orders import Part, chunks_run, replayed_schedule, replica_orders
from resihp.pipeline.replay import WEIGHT_PART

from .arrays import Floats, Ints, appended
from .persistence import Persistent
from .rank_table import RankTable

_MOST_PIPELINES = 32
"""Graphs that are kept: of the numbers of microbatches that replicas of a layout have."""
_MOST_PASSES = 1 << 16
"""Passes of a replica beyond which nothing is expected of its steps: its graph takes seconds."""
_PARTS = {Part.WHOLE: 1.0, Part.INPUT: 1.0 - WEIGHT_PART, Part.WEIGHT: WEIGHT_PART}


@dataclass(frozen=True, eq=False)
class _Pipeline:
    """Graph of the passes of one replica; arrays over passes.

    place   [4, passes] stage, 1 if backward, chunk and microbatch
    part    [passes, 1, 1] share of the pass, below 1 for the halves of a split backward
    """

    graph: Graph
    place: Ints
    part: Floats

    @classmethod
    def of(cls, job: Job, replica: Replica, chunks: int, quota: int) -> _Pipeline:
        """The replica with so many chunks per stage and microbatches, by the job's schedule. Raises
        `ContractError` if they are too many."""
        if 2 * len(replica.stages) * chunks * quota > _MOST_PASSES:
            raise ContractError("microbatches", "are too many to expect the time of a step")
        stages, given = len(replica.stages), (quota, replayed_schedule(job.schedule, chunks))
        place: list[tuple[int, int, int, int]] = []
        part, before, made = list[float](), list[list[int]](), dict[tuple[int, int, int], int]()
        orders = replica_orders(replica, *given, max_in_flight=job.max_in_flight, chunks=chunks)
        for stage, order in enumerate(orders):
            for at, item in enumerate(order):
                number, backward = len(place), int(item.op is Op.BACKWARD)
                if item.part is not Part.WEIGHT:
                    made[backward, item.chunk * stages + stage, item.microbatch] = number
                place.append((stage, backward, item.chunk, item.microbatch))
                part.append(_PARTS[item.part])
                before.append([number - 1] if at else [])
        for (backward, virtual, microbatch), number in made.items():
            source = made.get((backward, virtual + (1 if backward else -1), microbatch))
            if source is not None:
                before[number].append(source)
        return cls(Graph(before), np.array(place, np.int64).T, np.array(part)[:, None, None])


class PipelineTime:
    """Time of the pipelines of a layout, from the compute times of the passes of a step.

    A tensor-parallel group takes as long as its slowest rank, a step as long as its slowest
    replica. The graph of every number of microbatches is made once.
    """

    def __init__(self, job: Job, places: RankTable) -> None:
        self._job, self._places = job, places
        self._stages = np.array([len(replica.stages) for replica in job.layout.replicas])
        self._first_group = np.cumsum(self._stages) - self._stages
        replicas = job.layout.replicas
        self._chunks = chunks_run(job, replicas, job.schedule)
        shapes = [
            (len(replica.stages), count, replica.in_flight)
            for replica, count in zip(replicas, self._chunks, strict=True)
        ]
        self._first_alike = np.array([shapes.index(shape) for shape in shapes])
        self._pipelines: dict[tuple[int, int], _Pipeline] = {}

    def ms(
        self,
        step: TelemetryBatch,
        healthy_ms: Floats,
        slowdowns: Mapping[int, float] = MappingProxyType({}),
    ) -> tuple[float, float]:
        """Time of a step with the known slow devices, and with all devices healthy.

        step        forward and backward records of one step, whose microbatches are numbered from 0
                    in each replica
        healthy_ms  predicted compute time of each record on a healthy device, shape (records,)
        slowdowns   of the slow ranks, 1.0 and more

        A pass without a record takes as long as the others of its stage. Raises `ContractError`
        for numbers of microbatches that the schedule cannot run.
        """
        index = self._places.index(step.rank)
        factor = np.ones(self._places.size)
        for rank, slowdown in slowdowns.items():
            factor[self._places.ranks == rank] = slowdown
        slow = healthy_ms * factor[index] if slowdowns else healthy_ms
        times, quotas = self._grid(step, index, [slow, healthy_ms][: 2 if slowdowns else 1])
        longest = np.zeros(len(times))
        kinds = np.stack([self._first_alike, quotas])
        for kind in {tuple(kind) for kind in kinds[:, quotas > 0].T.tolist()}:
            alike = np.flatnonzero((kinds == np.array(kind)[:, None]).all(axis=0))
            pipeline = self._pipeline(*kind)
            stage, backward, chunk, microbatch = pipeline.place
            group = stage[:, None] + self._first_group[alike]
            own = times[:, group, backward[:, None], chunk[:, None], microbatch[:, None]]
            spans = pipeline.graph.makespan(np.moveaxis(own, 0, -1) * pipeline.part)
            np.maximum(longest, spans, out=longest)
        return float(longest[0]), float(longest[-1])

    def _pipeline(self, dp: int, quota: int) -> _Pipeline:
        key = dp, quota
        if key not in self._pipelines:
            while len(self._pipelines) >= _MOST_PIPELINES:
                del self._pipelines[next(iter(self._pipelines))]
            replica, chunks = self._job.layout.replicas[dp], self._chunks[dp]
            self._pipelines[key] = _Pipeline.of(self._job, replica, chunks, quota)
        return self._pipelines[key]

    def _grid(self, step: TelemetryBatch, index: Ints, cases: list[Floats]) -> tuple[Floats, Ints]:
        """Times [case, group, forward or backward, chunk, microbatch], those of passes without a
        record filled in, and the number of microbatches of each replica."""
        microbatch = np.maximum(step.microbatch, 0).astype(np.int64)
        quotas = np.zeros(self._stages.size, np.int64)
        np.maximum.at(quotas, self._places.dp[index], microbatch + 1)
        chunk = np.minimum(step.chunk, self._job.chunks - 1)
        shape = (int(self._stages.sum()), 2, self._job.chunks, int(quotas.max()))
        where = (self._places.group[index], (step.op == Op.BACKWARD) * 1, chunk, microbatch)
        cell = np.ravel_multi_index(where, shape)
        times = np.zeros((len(cases), int(np.prod(shape))))
        for row, own in zip(times, cases, strict=True):
            np.maximum.at(row, cell, own)
        there = np.bincount(cell, minlength=times.shape[1]).reshape(shape) > 0
        return _filled(times.reshape(len(cases), *shape), there), quotas


def _filled(times: Floats, there: NDArray[np.bool_]) -> Floats:
    """Times with those that are not there as the mean of their stage; where it has none, as that
    of all stages; 0 where those have none."""
    for axes in ((-1,), (-4, -1)):
        if there.all():
            break
        count = there.sum(axis=axes, keepdims=True)
        total = np.where(there, times, 0.0).sum(axis=axes, keepdims=True)
        times = np.where(there, times, total / np.maximum(count, 1))
        there = there | (count > 0)
    return times


@dataclass(frozen=True)
class StepExpectation:
    """Measured and expected time of a step; `None` where that is not known.

    step         its number
    measured_ms  what it took
    expected_ms  with the devices that were known to be slow
    healthy_ms   if all devices had been healthy
    """

    step: int
    measured_ms: float
    expected_ms: float | None = None
    healthy_ms: float | None = None


_WINDOW = 24
"""Steps from which the time besides the passes is learned; a device that is slow for less than half
of them before it is named changes little."""
_LEAST_STEPS = 3
_KEPT = 4
"""Steps of another layout that stay."""
_MOST_OPEN = 256


class StepTimeModel(Persistent):
    """Expected time of each step of a layout: of its pipelines, and of what it takes besides.

    The rest is a constant or a constant share, whichever fitted the last steps better: transfers
    and optimizer add about the same to every step, while a loop that reports less than it does (or
    waits in every pass) takes as many times as long.
    """

    _saved = ("_open", "_learned")
    _open: dict[int, tuple[float, float]]

    def __init__(self, job: Job, places: RankTable) -> None:
        self._pipelines = PipelineTime(job, places)
        self._open = {}
        self._learned = np.empty((0, 2))  # time of the pipelines, measured time

    def expect(
        self, step: TelemetryBatch, healthy_ms: Floats, slowdowns: Mapping[int, float]
    ) -> None:
        """Takes the passes of a step, see `PipelineTime.ms`, before its time is measured."""
        try:
            found = self._pipelines.ms(step, healthy_ms, slowdowns)
        except ContractError:  # an odd number of microbatches: nothing is expected of such a step
            return
        self._open[int(step.step[0])] = found
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def measured(self, step: int, measured_ms: float) -> StepExpectation:
        """Compares the time of a step with the expectation, and learns from it."""
        passes = self._open.pop(step, None)
        if passes is None or not all(0.0 < ms < math.inf for ms in (*passes, measured_ms)):
            return StepExpectation(step, measured_ms)
        share, rest = self._fit()
        self._learned = appended(self._learned, (passes[0], measured_ms), _WINDOW)
        if len(self._learned) <= _LEAST_STEPS:
            return StepExpectation(step, measured_ms)
        expected, healthy = (share * ms + rest for ms in passes)
        return StepExpectation(step, measured_ms, expected, healthy)

    def _fit(self) -> tuple[float, float]:
        """Share and constant by which the pipelines' time becomes that of the step."""
        if not len(self._learned):
            return 1.0, 0.0
        passes, measured = self._learned.T
        share, rest = float(np.median(measured / passes)), float(np.median(measured - passes))
        errors = [np.abs(fit / measured - 1.0) for fit in (share * passes, passes + rest)]
        by_share = rest < 0.0 or np.median(errors[0]) < np.median(errors[1])
        return (share, 0.0) if by_share else (1.0, rest)

    def start_from(self, older: StepTimeModel) -> None:
        """Starts from the last steps of an older layout."""
        self._learned = older._learned[-_KEPT:]
