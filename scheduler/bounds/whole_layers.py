"""Makespan bounds over all partitions into whole layers, by dynamic programming.

Tighter than `relaxed_factors`, which allows fractional layers: with ten layers in a stage, one
more or less is ten percent of its time. `heterogeneous_layers` tightens it for unequal stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Schedule

from .in_flight import Floats, InFlightLimits, PassTimes, stage_line

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Costs and limits of the stages of pipelines of equal depth; arrays are [pipeline, stage].

    forward, backward  milliseconds per layer
    extra              forward time of embedding or head; their backward takes twice as long
    most, least        range of the number of layers; `least` defaults to 1
    """

    forward: Floats
    backward: Floats
    extra: Floats
    most: Ints
    least: Ints | None = None

    def within(self, makespan_ms: float, microbatches: Ints, layers: int) -> StageCosts:
        """Costs with `most` reduced to the layers that a stage can compute within `makespan_ms`."""
        each = makespan_ms * (1 + 1e-9) / microbatches[:, None]
        room = np.floor((each - 3.0 * self.extra) / (self.forward + self.backward))
        most = np.clip(np.minimum(room, self.most), 0, layers).astype(np.int64)
        return replace(self, most=most)

    def pick(self, rows: Ints) -> StageCosts:
        """Costs of some of the pipelines."""
        return StageCosts(
            self.forward[rows], self.backward[rows], self.extra[rows], self.most[rows]
        )


def whole_layers(
    stages: StageCosts,
    layers: int,
    microbatches: Ints,
    within_ms: float,
    *,
    p2p: float = 0.0,
    max_in_flight: int | None = None,
    schedule: Schedule | None = Schedule.ONE_F_ONE_B,
) -> tuple[Floats, Ints]:
    """Makespan bound of each pipeline over whole layers, at least 1 per stage, and the layers.

    Returns [pipeline] and [pipeline, stage]; inf and arbitrary layers if the bound exceeds
    `within_ms`. With n layers before stage s and l in it, its line of `in_flight_bound` holds with
    the least time that n layers can take before it and that of the rest behind it. The smallest
    possible value of the largest line is found stage by stage; with L_s(n, l) for the line,

        G_s+1(n) = min over l of max(G_s(n - l), L_s(n - l, l))
    """
    stages = stages.within(within_ms, microbatches, layers)
    bands = _Bands.of(stages.most, layers)
    if bands is None:
        return np.full(len(microbatches), np.inf), np.ones(stages.most.shape, np.int64)
    options = _Options.of(stages, bands.most, schedule)
    limits = InFlightLimits.of(schedule, bands.stages, max_in_flight)
    behind = _behind(options, bands, p2p)
    m = microbatches[:, None, None].astype(float)
    table = np.zeros((3, len(microbatches), 1))  # forwards before a stage, trips, largest line
    choices = []
    for stage in range(bands.stages):
        passes = PassTimes(*(times[:, stage] for times in options.passes))
        trip = passes.trip + (passes.weight if stage == 0 else 0.0)
        reached, before, worst = ahead = bands.before(table, stage)
        line = stage_line(
            passes,
            m,
            limits.at(stage),
            reached=reached,
            before=before,
            behind=behind[stage + 1][:, None, :],
        )
        fresh = ahead + np.array([passes.forward, trip, np.zeros_like(trip)])
        np.maximum(worst, line, out=fresh[2])
        fresh = np.where(options.fits[:, stage], fresh, np.inf)
        choices.append(fresh[2].argmin(axis=1))
        table = fresh.min(axis=2)
        table[:2] += [[[p2p]], [[2.0 * p2p]]]
    return table[2, :, 0], bands.traced(choices, layers)


def _behind(options: _Options, bands: _Bands, p2p: float) -> list[Floats]:
    """Least trip through stages s.., by the layers before s, for s = 0..stages."""
    tables = [np.zeros((len(options.fits), 1))]
    for stage in reversed(range(bands.stages)):
        further = bands.behind(tables[0], stage) + options.passes.trip[:, stage]
        least = np.where(options.fits[:, stage], further, np.inf).min(axis=1)
        tables.insert(0, least + 2.0 * p2p)
    return tables


class _Options(NamedTuple):
    """Pass times of stages with 1, 2, ... layers, [pipeline, stage, layers - 1, 1]."""

    passes: PassTimes
    fits: NDArray[np.bool_]

    @classmethod
    def of(cls, stages: StageCosts, most: int, schedule: Schedule | None) -> _Options:
        """Options with up to `most` layers per stage."""
        counts = np.arange(1, most + 1)[:, None]
        each = (stages.forward, stages.backward, stages.extra, stages.most)
        forward, backward, extra, fitting = (array[:, :, None, None] for array in each)
        passes = PassTimes.of(forward * counts + extra, backward * counts + 2.0 * extra, schedule)
        passes = passes._replace(weight=np.broadcast_to(passes.weight, passes.forward.shape))
        fits = counts <= fitting
        if stages.least is not None:
            fits &= counts >= stages.least[:, :, None, None]
        return cls(passes, fits)


@dataclass(frozen=True)
class _Bands:
    """Ranges of the dynamic program: layers before each stage (`low`..`high`), most in a stage.

    Tables are [..., pipeline, layers before the stage - low]; options are [..., pipeline,
    layers of the stage - 1, layers before the next stage - its low].
    """

    low: list[int]
    high: list[int]
    most: int

    @classmethod
    def of(cls, most: Ints, layers: int) -> _Bands | None:
        """Bands over all pipelines that can hold all layers; None if there are none."""
        able = most[(most.min(axis=1) >= 1) & (most.sum(axis=1) >= layers)]
        if not len(able):
            return None
        stages = most.shape[1]
        held = np.cumsum(np.pad(able, ((0, 0), (1, 0))), axis=1)
        ahead, left = held.max(axis=0).tolist(), (held[:, -1:] - held).max(axis=0).tolist()
        edges = range(stages + 1)
        low = [max(s, layers - left[s]) for s in edges]
        high = [min(layers - (stages - s), ahead[s]) for s in edges]
        return cls(low, high, int(able.max()))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.low) - 1

    def before(self, table: Floats, stage: int) -> Floats:
        """Values of `table` before a stage, by its layers and the layers before the next stage."""
        first = self.low[stage + 1] - 1 - self.low[stage]
        windows = _windows(table, first - self.most + 1, self.most, self._width(stage + 1))
        return windows[..., ::-1, :]

    def behind(self, table: Floats, stage: int) -> Floats:
        """Values of `table` behind a stage, by its layers and the layers before it."""
        first = self.low[stage] + 1 - self.low[stage + 1]
        return _windows(table, first, self.most, self._width(stage))

    def traced(self, choices: list[NDArray[np.intp]], layers: int) -> Ints:
        """Layers of every stage, [pipeline, stage], traced back from the choices.

        choices  layers - 1 by stage, [pipeline, layers before the next stage - its low]
        """
        rows = np.arange(len(choices[0]))
        upto = np.full(len(rows), layers)
        counts = np.ones((len(rows), self.stages), np.int64)
        for stage in reversed(range(self.stages)):
            at = np.clip(upto - self.low[stage + 1], 0, choices[stage].shape[1] - 1)
            counts[:, stage] = choices[stage][rows, at] + 1
            upto = upto - counts[:, stage]
        return counts

    def _width(self, edge: int) -> int:
        return self.high[edge] - self.low[edge] + 1


def _windows(table: Floats, first: int, count: int, width: int) -> Floats:
    """`table[..., first + k : first + k + width]` for k = 0..count-1, inf beyond the table."""
    *rows, held = table.shape
    left = max(0, -first)
    right = max(0, first + count + width - 1 - held)
    padded = np.full((*rows, left + held + right), np.inf)
    padded[..., left : left + held] = table
    offset, step = (first + left) * padded.itemsize, padded.itemsize
    # equal to `sliding_window_view`, whose checks take ten times as long
    return np.ndarray((*rows, count, width), float, padded, offset, (*padded.strides, step))


_FIXED_CASES = 24  # combinations of layers of unusual stages per pipeline
_BATCH = 256  # pipelines, limits the memory


def heterogeneous_layers(
    stages: StageCosts,
    layers: int,
    microbatches: Ints,
    within_ms: float,
    **limits: Any,
) -> tuple[Floats, Ints]:
    """Bound like `whole_layers`, never lower, and the layers that attain it.

    The dynamic program combines the least time before a stage with the least time behind it, which
    no single partition may attain if stages differ. With the layers of the unusual stages fixed,
    the others are equal and the bound is attained. So the program is solved for every combination
    of layers of the most unusual stages, up to a limit, and the smallest solution is the bound.
    """
    limited = stages.within(within_ms, microbatches, layers)
    source, least, most = _fixed_cases(limited)
    ends = np.full(len(source), np.inf)
    counts = np.ones(least.shape, np.int64)
    for start in range(0, len(source), _BATCH):
        part = slice(start, start + _BATCH)
        some = limited.pick(source[part])
        ends[part], counts[part] = whole_layers(
            StageCosts(some.forward, some.backward, some.extra, most[part], least[part]),
            layers,
            microbatches[source[part]],
            within_ms,
            **limits,
        )
    order = np.lexsort((ends, source))
    first = order[np.unique(source[order], return_index=True)[1]]
    return ends[first], counts[first]


def _fixed_cases(stages: StageCosts) -> tuple[NDArray[np.intp], Ints, Ints]:
    """Cases with fixed layers of the most unusual stages: pipeline, least and most layers."""
    source, least, most = [], [], []
    each = stages.forward + stages.backward
    for row in range(len(each)):
        usual = np.median(each[row])
        odd, ways = [], 1
        for stage in np.argsort(-np.abs(np.log(each[row] / usual)), kind="stable").tolist():
            count = max(1, int(stages.most[row, stage]))
            if each[row, stage] == usual or ways * count > _FIXED_CASES:
                break
            odd.append(stage)
            ways *= count
        for given in product(*(range(1, max(1, int(stages.most[row, s])) + 1) for s in odd)):
            source.append(row)
            least.append(np.ones(each.shape[1], np.int64))
            most.append(stages.most[row].copy())
            least[-1][odd], most[-1][odd] = given, given
    return np.array(source, np.intp), np.array(least), np.array(most)
