"""Exact makespans of many pipelines at once, vectorised for the search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resihp.contracts import Schedule

from .bounds.in_flight import InFlightLimits, PassTimes, transfers_before

Floats = NDArray[np.float64]
Counts = NDArray[np.integer]
Mask = NDArray[np.bool_]


def pipeline_makespans(
    forward: ArrayLike,
    backward: ArrayLike,
    microbatches: ArrayLike,
    *,
    p2p: ArrayLike = 0.0,
    max_in_flight: int | None = None,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    work: Floats | None = None,
) -> Floats:
    """Makespan of each pipeline [pipeline], equal to that of `resihp.pipeline.replay`.

    forward, backward  time of one microbatch, [pipeline, stage]
    microbatches       [pipeline]
    p2p                time of a transfer between stages s and s + 1: one for all, or
                       [pipeline, s]
    schedule           any but the interleaved one
    work               relative work of each microbatch, [pipeline, microbatch]; default 1

    Round k runs forward k and the backward that follows it in every stage. The forwards of a round
    form a chain over the stages: a running maximum after the stages' own times are subtracted. The
    backwards wait for those of an earlier round. A round therefore takes a few array operations
    for any number of pipelines. With a split backward, other stages wait for the input half; the
    weight half follows in the same round.
    """
    counts = np.asarray(microbatches)
    order = np.argsort(-counts, kind="stable")
    f, b = np.asarray(forward, float)[order].T, np.asarray(backward, float)[order].T
    limits = InFlightLimits.of(schedule, len(f), max_in_flight)
    uneven = None if work is None else work[order].T
    each = np.asarray(p2p, float)
    before = transfers_before(each, len(f))
    each, before = (t[order].T if each.ndim else t.reshape(-1, 1) for t in (each, before))
    rounds = _Rounds(
        PassTimes.of(f, b, schedule), counts[order], _Transfers(each, before), limits, uneven
    )
    ends = np.empty(len(counts))
    ends[order] = rounds.makespans()
    return ends


class _Transfers(NamedTuple):
    """Times of transfers, [., pipeline] or [., 1] if all pipelines have the same.

    each    between stages s and s + 1; a single one holds for all s
    before  sum of those before each stage
    """

    each: Floats
    before: Floats


class _Rounds:
    """State of all pipelines, sorted by descending microbatches; arrays are [stage, pipeline].

    Pipelines with remaining forwards are all in the same round, in which their last stages run a
    backward as well; afterwards all pipelines together run the remaining backwards of the first
    stages. An inactive stage runs a backward of zero length that waits for nothing.

    work  relative work of each microbatch, [microbatch, pipeline]; None: all alike
    """

    def __init__(
        self,
        passes: PassTimes,
        counts: Counts,
        transfers: _Transfers,
        limits: InFlightLimits,
        work: Floats | None,
    ) -> None:
        self._counts, self._transfers, self._split = counts, transfers, limits.split
        self._ahead = limits.owed[:, None] - 1  # forwards before the first backward
        self._put_off = (limits.held - limits.owed)[:, None]  # backwards before a weight half
        self._all = self._passes = passes
        self._work = None
        if work is not None:
            self._work = np.where(np.arange(len(work))[:, None] < counts, work, 0.0)
        self._free = np.zeros(passes.forward.shape)  # end of the last pass of each stage
        self._returned = self._free  # end of its last backward
        self._earlier = self._free  # end of the backward before that
        lag = limits.owed[:-1] - limits.owed[1:]  # rounds since the next stage ran a backward
        self._same = np.flatnonzero(lag == 0)[::-1].tolist()
        self._long_ago = (lag == 2)[:, None]
        self._looks_back = bool(self._long_ago.any()), bool(self._long_ago.all())
        self._reach = self._reached(passes.forward)

    def makespans(self) -> Floats:
        """End of every pipeline, including its remaining weight halves."""
        ahead, counts = self._ahead, self._counts.tolist()
        full = int(ahead[0, 0])
        ended = np.zeros((3, *self._free.shape))
        transfers = self._transfers
        number, width = 0, len(counts)
        while width:
            self._passes = PassTimes(*(times[:, :width] for times in self._all))
            self._free, self._returned = self._free[:, :width], self._returned[:, :width]
            self._earlier, self._reach = self._earlier[:, :width], self._reach[:, :width]
            self._transfers = _Transfers(*(times[:, :width] for times in transfers))
            stop = counts[width - 1]
            for index in range(number, stop):
                self._run_forwards(index)
                self._run_backwards(index, index >= ahead if index < full else None)
            ended[:, :, :width] = self._free, self._returned, self._earlier
            number, width = stop, counts.index(stop)
        self._passes, self._transfers = self._all, transfers
        self._free, self._returned, self._earlier = ended[0], ended[1], ended[2]
        short = bool(counts) and counts[-1] < full
        for more in range(full):
            turns, runs = self._counts + more, more < ahead
            self._run_backwards(turns, runs & (turns >= ahead) if short else runs)
        return np.asarray((self._free + self._weight_left()).max(axis=0))

    def _reached(self, forward: Floats) -> Floats:
        """Ends of a microbatch's forwards without any waiting."""
        return np.cumsum(forward, axis=0) + self._transfers.before

    def _run_forwards(self, number: int) -> None:
        forward, reach = self._passes.forward, self._reach
        if self._work is not None:
            forward = forward * self._work_at(np.asarray(number))
            reach = self._reached(forward)
        self._free = np.maximum.accumulate(self._free - (reach - forward), axis=0) + reach

    def _run_backwards(self, number: int | Counts, runs: Mask | None) -> None:
        """Run the backwards of a round, in all stages or in those of the mask `runs`.

        Weight halves follow from the round on in which the first stage runs a backward.
        """
        inputs = self._passes.inputs
        if self._work is not None:
            inputs = inputs * self._work_at(number - self._ahead)
        # From the end of a backward to that in the stage before.
        arrive = inputs[:-1] + self._transfers.each
        if runs is not None:
            inputs, arrive = inputs * runs, np.where(runs[:-1], arrive, -np.inf)
        ends = self._free + inputs
        np.maximum(ends[:-1], self._source()[1:] + arrive, out=ends[:-1])
        for stage in self._same:
            ends[stage] = np.maximum(ends[stage], ends[stage + 1] + arrive[stage])
        self._free, self._returned, self._earlier = ends, ends, self._returned
        if self._split and (runs is None or isinstance(number, np.ndarray)):
            turn = number - self._ahead[0]
            weight = self._passes.weight
            weight = weight if runs is None else weight * (runs & (turn >= 0))
            self._free = ends + (weight if self._work is None else weight * self._work_at(turn))

    def _source(self) -> Floats:
        """Ends of the backwards that the previous stages wait for."""
        some, every = self._looks_back
        if every or not some:
            return self._earlier if some else self._returned
        source = self._returned.copy()
        np.copyto(source[1:], self._earlier[1:], where=self._long_ago)
        return source

    def _work_at(self, turn: Counts) -> Floats:
        """Relative work of the microbatches of these indices."""
        assert self._work is not None
        columns = np.arange(len(self._free.T))
        return np.asarray(self._work[np.clip(turn, 0, len(self._work) - 1), columns])

    def _weight_left(self) -> Floats:
        """Weight halves that are still to run after the last input half."""
        if not self._split:
            return np.zeros(1)
        if self._work is None:
            return np.asarray(self._all.weight * np.minimum(self._put_off, self._counts))
        upto = np.cumsum(np.pad(self._work, ((1, 0), (0, 0))), axis=0)
        first = np.maximum(self._counts - self._put_off, 0)
        return np.asarray(self._all.weight * (upto[-1] - np.take_along_axis(upto, first, axis=0)))
