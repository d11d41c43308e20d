"""Exact makespans of many pipelines at once, vectorised for the search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resihp.contracts import Schedule
from resihp.pipeline.orders import most_ahead, most_in_flight
from resihp.pipeline.replay import WEIGHT_PART

Floats = NDArray[np.float64]
Counts = NDArray[np.integer]
Mask = NDArray[np.bool_]


def pipeline_makespans(
    forward: ArrayLike,
    backward: ArrayLike,
    microbatches: ArrayLike,
    *,
    p2p: float = 0.0,
    max_in_flight: int | None = None,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    work: Floats | None = None,
) -> Floats:
    """Makespan of each pipeline [pipeline], equal to that of `resihp.pipeline.replay`.

    forward, backward  time of one microbatch, [pipeline, stage]
    microbatches       [pipeline]
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
    lead = _Lead.of(schedule, len(f), max_in_flight)
    if work is None:
        rounds = _Rounds(f, b, counts[order], p2p, lead)
    else:
        rounds = _UnevenRounds(f, b, counts[order], p2p, lead, work[order].T)
    ends = np.empty(len(counts))
    ends[order] = rounds.makespans()
    return ends


class _Lead(NamedTuple):
    """Lead of each stage under a schedule, in rounds; arrays are [stage, 1]."""

    ahead: Counts  # forwards before the first backward
    put_off: Counts  # backwards before the first weight half
    weight_part: float
    lag: Counts  # rounds since the next stage ran the same backward

    @classmethod
    def of(cls, schedule: Schedule, stages: int, max_in_flight: int | None) -> _Lead:
        owed = np.array(most_ahead(schedule, stages, max_in_flight))[:, None]
        held = np.array(most_in_flight(schedule, stages, max_in_flight))[:, None]
        part = WEIGHT_PART if schedule is Schedule.ZERO_BUBBLE else 0.0
        return cls(owed - 1, held - owed, part, owed[:-1] - owed[1:])


class _Times(NamedTuple):
    """Times of the passes of one microbatch, [stage, pipeline]."""

    forward: Floats
    inputs: Floats
    weight: Floats
    reach: Floats  # end of a forward without any waiting; `before` is its start
    before: Floats
    arrive: Floats  # from the end of a backward to its end in the previous stage

    @classmethod
    def of(cls, forward: Floats, backward: Floats, p2p: float, weight_part: float) -> _Times:
        weight = backward * weight_part
        inputs = backward - weight
        reach = np.cumsum(forward, axis=0) + p2p * np.arange(len(forward))[:, None]
        return cls(forward, inputs, weight, reach, reach - forward, inputs[:-1] + p2p)


class _Rounds:
    """State of all pipelines, sorted by descending microbatches; arrays are [stage, pipeline].

    Pipelines with remaining forwards are all in the same round, in which their last stages run a
    backward as well; afterwards all pipelines together run the remaining backwards of the first
    stages. An inactive stage runs a backward of zero length that waits for nothing.
    """

    def __init__(
        self, forward: Floats, backward: Floats, counts: Counts, p2p: float, lead: _Lead
    ) -> None:
        self._lead, self._counts, self._p2p = lead, counts, p2p
        self._all = _Times.of(forward, backward, p2p, lead.weight_part)
        self._times = self._all
        self._free = np.zeros(forward.shape)  # end of the last pass of each stage
        self._returned = self._free  # end of its last backward
        self._earlier = self._free  # end of the backward before that
        self._same = np.flatnonzero(lead.lag == 0)[::-1].tolist()
        self._long_ago = lead.lag == 2
        self._looks_back = bool(self._long_ago.any()), bool(self._long_ago.all())

    def makespans(self) -> Floats:
        """End of every pipeline, including its remaining weight halves."""
        ahead, counts = self._lead.ahead, self._counts.tolist()
        full = int(ahead[0, 0])
        ended = np.zeros((3, *self._free.shape))
        number, width = 0, len(counts)
        while width:
            self._keep(width)
            stop = counts[width - 1]
            for index in range(number, stop):
                self._run_forwards(index)
                self._run_backwards(index, index >= ahead if index < full else None)
            ended[:, :, :width] = self._free, self._returned, self._earlier
            number, width = stop, counts.index(stop)
        self._times = self._all
        self._free, self._returned, self._earlier = ended[0], ended[1], ended[2]
        short = bool(counts) and counts[-1] < full
        for more in range(full):
            turns, runs = self._counts + more, more < ahead
            self._run_backwards(turns, runs & (turns >= ahead) if short else runs)
        return np.asarray((self._free + self._left()).max(axis=0))

    def _keep(self, width: int) -> None:
        """Restrict the state to the first pipelines."""
        self._times = _Times(*(times[:, :width] for times in self._all))
        self._free, self._returned = self._free[:, :width], self._returned[:, :width]
        self._earlier = self._earlier[:, :width]

    def _run_forwards(self, number: int) -> None:
        reach, before = self._forwards(number)
        self._free = np.maximum.accumulate(self._free - before, axis=0) + reach

    def _run_backwards(self, number: int | Counts, runs: Mask | None) -> None:
        """Run the backwards of a round, in all stages or in those of the mask `runs`.

        Weight halves follow from the round on in which the first stage runs a backward.
        """
        inputs, arrive = self._backwards(number)
        if runs is not None:
            inputs, arrive = inputs * runs, np.where(runs[:-1], arrive, -np.inf)
        ends = self._free + inputs
        np.maximum(ends[:-1], self._source()[1:] + arrive, out=ends[:-1])
        for stage in self._same:
            ends[stage] = np.maximum(ends[stage], ends[stage + 1] + arrive[stage])
        self._free, self._returned, self._earlier = ends, ends, self._returned
        if self._lead.weight_part and (runs is None or isinstance(number, np.ndarray)):
            self._free = ends + self._weight_halves(number - self._lead.ahead[0], runs)

    def _source(self) -> Floats:
        """Ends of the backwards that the previous stages wait for."""
        some, every = self._looks_back
        if every or not some:
            return self._earlier if some else self._returned
        source = self._returned.copy()
        np.copyto(source[1:], self._earlier[1:], where=self._long_ago)
        return source

    def _forwards(self, number: int) -> tuple[Floats, Floats]:
        """Ends and starts of a microbatch's forwards without any waiting."""
        return self._times.reach, self._times.before

    def _backwards(self, number: int | Counts) -> tuple[Floats, Floats]:
        """Durations of the input halves of a round, and `arrive` for them."""
        return self._times.inputs, self._times.arrive

    def _weight_halves(self, turn: Counts, runs: Mask | None) -> Floats:
        """Weight halves of the microbatch of that index in all stages; 0 for negative indices."""
        return self._times.weight if runs is None else self._times.weight * (runs & (turn >= 0))

    def _left(self) -> Floats:
        return np.asarray(self._all.weight * np.minimum(self._lead.put_off, self._counts))


class _UnevenRounds(_Rounds):
    """Rounds with microbatches of unequal work."""

    def __init__(
        self,
        forward: Floats,
        backward: Floats,
        counts: Counts,
        p2p: float,
        lead: _Lead,
        work: Floats,
    ) -> None:
        super().__init__(forward, backward, counts, p2p, lead)
        self._work = np.where(np.arange(len(work))[:, None] < counts, work, 0.0)
        self._transfers = p2p * np.arange(len(forward))[:, None]

    def _forwards(self, number: int) -> tuple[Floats, Floats]:
        forward = self._times.forward * self._at(np.asarray(number))
        reach = np.cumsum(forward, axis=0) + self._transfers
        return reach, reach - forward

    def _backwards(self, number: int | Counts) -> tuple[Floats, Floats]:
        inputs = self._times.inputs * self._at(number - self._lead.ahead)
        return inputs, inputs[:-1] + self._p2p

    def _weight_halves(self, turn: Counts, runs: Mask | None) -> Floats:
        return super()._weight_halves(turn, runs) * self._at(turn)

    def _at(self, turn: Counts) -> Floats:
        """Relative work of the microbatches of these indices."""
        columns = np.arange(len(self._free.T))
        return np.asarray(self._work[np.clip(turn, 0, len(self._work) - 1), columns])

    def _left(self) -> Floats:
        upto = np.cumsum(np.pad(self._work, ((1, 0), (0, 0))), axis=0)
        first = np.maximum(self._counts - self._lead.put_off, 0)
        return np.asarray(self._all.weight * (upto[-1] - np.take_along_axis(upto, first, axis=0)))
