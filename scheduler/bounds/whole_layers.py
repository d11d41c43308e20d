"""Lower bounds of pipelines over every way to spread whole layers: a dynamic program.

`relaxed_factors` allows parts of layers. Where a stage holds ten, one more or less
is ten percent; and a schedule that lets stages run far ahead would have layers spread more finely
than that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Schedule

from .in_flight import Floats, InFlightLimits, PassTimes, stage_line

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Pipelines of equally many stages; all arrays are [pipeline, stage], times in milliseconds.

    forward, backward  of one layer
    extra              of the forward beside the layers (embedding, head); the backward's is twice
    most, least        layers that a stage may hold, and must; the latter 1 where none is given
    """

    forward: Floats
    backward: Floats
    extra: Floats
    most: Ints
    least: Ints | None = None

    def within(self, makespan_ms: float, microbatches: Ints, layers: int) -> StageCosts:
        """Without the layers that would keep a stage busy for longer than `makespan_ms`."""
        each = makespan_ms * (1 + 1e-9) / microbatches[:, None]
        room = np.floor((each - 3.0 * self.extra) / (self.forward + self.backward))
        most = np.clip(np.minimum(room, self.most), 0, layers).astype(np.int64)
        return replace(self, most=most)

    def pick(self, rows: Ints) -> StageCosts:
        """Some of the pipelines."""
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
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> tuple[Floats, Ints]:
    """Least span of each pipeline with any whole layers, 1 or more in each stage, and the layers.

    [pipeline] and [pipeline, stage]; inf, and layers that mean nothing, where `within_ms` does not
    suffice. If n layers are before stage s and l are in it, its line of `in_flight_bound` holds
    with the least that n layers can take before it and the rest behind it. The least largest line
    of all stages is found stage by stage: with L_s(n, l) for that line,

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
    table = np.zeros((3, len(microbatches), 1))  # forwards before a stage, trips, the worst line
    choices = []
    for stage in range(bands.stages):
        passes, reach, trip = options.of_stage(stage)
        reached, before, worst = ahead = bands.before(table, stage)
        line = stage_line(
            passes,
            m,
            limits.at(stage),
            reached=reached,
            before=before,
            behind=behind[stage + 1][:, None, :],
        )
        fresh = ahead + np.array([reach, trip, np.zeros_like(trip)])
        np.maximum(worst, line, out=fresh[2])
        fresh = np.where(options.fits[:, stage], fresh, np.inf)
        choices.append(fresh[2].argmin(axis=1))
        table = fresh.min(axis=2)
        table[:2] += [[[p2p]], [[2.0 * p2p]]]
    return table[2, :, 0], bands.traced(choices, layers)


def _behind(options: _Options, bands: _Bands, p2p: float) -> list[Floats]:
    """Least trip through all stages from s on, by the layers before it; for s = 0.. and none."""
    tables = [np.zeros((len(options.fits), 1))]
    for stage in reversed(range(bands.stages)):
        further = bands.behind(tables[0], stage) + options.passes.trip[:, stage]
        least = np.where(options.fits[:, stage], further, np.inf).min(axis=1)
        tables.insert(0, least + 2.0 * p2p)
    return tables


class _Options(NamedTuple):
    """What stages take that hold 1, 2, ... layers, [pipeline, stage, layers - 1, 1]."""

    passes: PassTimes
    fits: NDArray[np.bool_]

    @classmethod
    def of(cls, stages: StageCosts, most: int, schedule: Schedule) -> _Options:
        """With up to `most` layers in a stage."""
        counts = np.arange(1, most + 1)[:, None]
        each = (stages.forward, stages.backward, stages.extra, stages.most)
        forward, backward, extra, fitting = (array[:, :, None, None] for array in each)
        passes = PassTimes.of(forward * counts + extra, backward * counts + 2.0 * extra, schedule)
        fits = counts <= fitting
        if stages.least is not None:
            fits &= counts >= stages.least[:, :, None, None]
        return cls(passes, fits)

    def of_stage(self, stage: int) -> tuple[PassTimes, Floats, Floats]:
        """The passes of a stage; its forward; its trip, with the weight half of the first one."""
        forward, inputs, weight = self.passes
        weight = weight[:, stage] if weight.shape == forward.shape else weight
        passes = PassTimes(forward[:, stage], inputs[:, stage], weight)
        return passes, passes.forward, passes.trip + (weight if stage == 0 else 0.0)


@dataclass(frozen=True)
class _Bands:
    """How many layers may be before every stage (from `low` to `high`), and in one (`most`).

    Tables are [..., pipeline, layers before - low]; options [..., pipeline, layers of a stage - 1,
    layers before the next one - its low].
    """

    low: list[int]
    high: list[int]
    most: int

    @classmethod
    def of(cls, most: Ints, layers: int) -> _Bands | None:
        """The bands of all pipelines that can hold all layers; None if there are none."""
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
        """What `table` says before a stage, for each of its layers and what is before the next."""
        first = self.low[stage + 1] - 1 - self.low[stage]
        windows = _windows(table, first - self.most + 1, self.most, self._width(stage + 1))
        return windows[..., ::-1, :]

    def behind(self, table: Floats, stage: int) -> Floats:
        """What `table` says behind a stage, for each of its layers and what is before it."""
        first = self.low[stage] + 1 - self.low[stage + 1]
        return _windows(table, first, self.most, self._width(stage))

    def traced(self, choices: list[NDArray[np.intp]], layers: int) -> Ints:
        """Layers of every stage, [pipeline, stage], from the choices for what is before the next.

        choices  by stage, [pipeline, layers before the next one - its low], layers - 1
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
    # what `sliding_window_view` gives, which takes ten times as long to say so
    return np.ndarray((*rows, count, width), float, padded, offset, (*padded.strides, step))


_WAYS = 24  # numbers of layers of odd stages that are tried for one pipeline
_AT_ONCE = 256  # which bounds the memory


def heterogeneous_layers(
    stages: StageCosts,
    layers: int,
    microbatches: Ints,
    within_ms: float,
    *,
    p2p: float = 0.0,
    max_in_flight: int | None = None,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> tuple[Floats, Ints]:
    """As `whole_layers`, never lower, and the layers that attain it; [pipeline].

    The dynamic program takes for every stage the least that the layers before it can take, and the
    least that those behind it can, which no one way to spread them need attain where stages differ.
    With the layers of the odd stages given the rest are alike, and it does. So it is solved for
    every number of layers of the oddest stages, as far as these are not too many, and the least
    solution is the bound.
    """
    limited = stages.within(within_ms, microbatches, layers)
    source, least, most = _ways(limited)
    ends = np.full(len(source), np.inf)
    counts = np.ones(least.shape, np.int64)
    for start in range(0, len(source), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        some = limited.pick(source[part])
        ends[part], counts[part] = whole_layers(
            StageCosts(some.forward, some.backward, some.extra, most[part], least[part]),
            layers,
            microbatches[source[part]],
            within_ms,
            p2p=p2p,
            max_in_flight=max_in_flight,
            schedule=schedule,
        )
    order = np.lexsort((ends, source))
    first = order[np.unique(source[order], return_index=True)[1]]
    return ends[first], counts[first]


def _ways(stages: StageCosts) -> tuple[NDArray[np.intp], Ints, Ints]:
    """Pipelines with the layers of their oddest stages given: which one, least and most layers."""
    source, least, most = [], [], []
    each = stages.forward + stages.backward
    for row in range(len(each)):
        usual = np.median(each[row])
        odd, ways = [], 1
        for stage in np.argsort(-np.abs(np.log(each[row] / usual)), kind="stable").tolist():
            count = max(1, int(stages.most[row, stage]))
            if each[row, stage] == usual or ways * count > _WAYS:
                break
            odd.append(stage)
            ways *= count
        for given in product(*(range(1, max(1, int(stages.most[row, s])) + 1) for s in odd)):
            source.append(row)
            least.append(np.ones(each.shape[1], np.int64))
            most.append(stages.most[row].copy())
            least[-1][odd], most[-1][odd] = given, given
    return np.array(source, np.intp), np.array(least), np.array(most)
