"""Exact spans of many pipelines at once, fast enough to sit inside the search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resihp.contracts import Schedule
from resihp.pipeline.orders import most_ahead, most_in_flight
from resihp.pipeline.replay import WEIGHT_PART

Floats = NDArray[np.float64]
Counts = NDArray[np.integer]


def pipeline_spans(
    forward: ArrayLike,
    backward: ArrayLike,
    microbatches: ArrayLike,
    *,
    p2p: float = 0.0,
    max_in_flight: int | None = None,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    work: Floats | None = None,
) -> Floats:
    """Span of each pipeline, the same as `resihp.pipeline.replay` gives.

    forward, backward  [pipeline, stage], time of one microbatch
    microbatches       [pipeline]
    schedule           any but the interleaved one
    work               [pipeline, microbatch], of each over a mean one; all 1 where none is given

    Round k runs forward k and the backward that follows it in every stage. Forwards of a round
    form a chain over the stages, which is a running maximum after the stages' own times are
    subtracted; backwards wait for those of the round before. So a round costs a few array
    operations, whatever the number of pipelines. Where the backward is split, it is the half for
    the inputs that others wait for; the other one follows in the same round.
    """
    f, b = np.asarray(forward, float), np.asarray(backward, float)
    counts = np.asarray(microbatches)[:, None]
    lead = _Lead.of(schedule, f.shape[1], max_in_flight)
    if work is None:
        rounds = _Rounds(f, b, counts, p2p, lead)
    else:
        rounds = _UnevenRounds(f, b, counts, p2p, lead, work)
    steady = rounds.steady()
    for number in range(int(counts.max(initial=0)) + int(rounds.lead.ahead[0])):
        if number in steady:
            rounds.run_steady()
        else:
            rounds.run(number)
    return rounds.last()


class _Lead(NamedTuple):
    """How far each stage of a schedule runs ahead, in rounds."""

    ahead: NDArray[np.intp]  # forwards before the first backward
    put_off: NDArray[np.intp]  # backwards before the first weight half
    weight_part: float
    lag: NDArray[np.intp]  # since the stage behind ran the same backward

    @classmethod
    def of(cls, schedule: Schedule, stages: int, max_in_flight: int | None) -> _Lead:
        owed = np.array(most_ahead(schedule, stages, max_in_flight))
        put_off = np.array(most_in_flight(schedule, stages, max_in_flight)) - owed
        part = WEIGHT_PART if schedule is Schedule.ZERO_BUBBLE else 0.0
        return cls(owed - 1, put_off, part, owed[:-1] - owed[1:])


class _Rounds:
    """All pipelines after some rounds: when each stage ended its last pass and last backwards."""

    def __init__(
        self, forward: Floats, backward: Floats, counts: Counts, p2p: float, lead: _Lead
    ) -> None:
        self.lead, self._counts, self._p2p = lead, counts, p2p
        self._weight = backward * lead.weight_part
        self._inputs = backward - self._weight
        self._reach = np.cumsum(forward, axis=1) + p2p * np.arange(forward.shape[1])
        self._before = self._reach - forward
        self._free = np.zeros_like(forward)  # end of the last pass of each stage
        self._returned = np.zeros_like(forward)  # end of its last backward
        self._earlier = np.zeros_like(forward)  # end of the one before
        self._most = max(counts.ravel().tolist(), default=0)
        self._same = np.flatnonzero(lead.lag == 0)[::-1]
        self._long_ago = np.flatnonzero(lead.lag == 2)

    def steady(self) -> range:
        """Rounds in which every stage of every pipeline runs all kinds of passes."""
        first = int((self.lead.ahead + self.lead.put_off).max())
        alike = (self.lead.lag == 1).all() or (self.lead.lag == 2).all()
        return range(first, min(self._counts.ravel().tolist(), default=0) if alike else first)

    def run_steady(self) -> None:
        """One of those rounds; the same as `run`, in fewer operations."""
        free = self._reach + np.maximum.accumulate(self._free - self._before, axis=1)
        source = self._earlier if self._long_ago.size else self._returned
        returned = free + self._inputs
        arrival = source[:, 1:] + (self._inputs[:, :-1] + self._p2p)
        np.maximum(returned[:, :-1], arrival, out=returned[:, :-1])
        self._earlier, self._returned = self._returned, returned
        self._free = returned + self._weight

    def run(self, number: int) -> None:
        """Any round."""
        free, counts = self._free, self._counts
        if number < self._most:
            reach, before = self._forwards(number)
            ends = reach + np.maximum.accumulate(free - before, axis=1)
            np.copyto(free, ends, where=number < counts)
        turn = number - self.lead.ahead
        runs = (turn >= 0) & (turn < counts)
        inputs = self._input_halves(turn)
        ends = np.maximum(free, self._arrivals()) + inputs
        for stage in self._same:
            arrived = np.maximum(free[:, stage], ends[:, stage + 1] + self._p2p)
            ends[:, stage] = arrived + inputs[:, stage]
        self._earlier = self._returned
        self._returned = np.where(runs, ends, self._returned)
        if self.lead.weight_part:
            late = turn - self.lead.put_off
            ends += self._weight_halves(late) * (late >= 0)
        np.copyto(free, ends, where=runs)

    def _arrivals(self) -> Floats:
        """When the backwards of the stages behind are there; 0 where none is waited for."""
        arrival = np.zeros_like(self._free)
        arrival[:, :-1] = self._returned[:, 1:] + self._p2p
        if self._long_ago.size:
            arrival[:, self._long_ago] = self._earlier[:, self._long_ago + 1] + self._p2p
        return arrival

    def last(self) -> Floats:
        """When every pipeline ends: with the weight halves that are left."""
        return np.asarray((self._free + self._left()).max(axis=1))

    def _forwards(self, number: int) -> tuple[Floats, Floats]:
        """Ends and starts of the forwards of a microbatch that no stage lets wait."""
        return self._reach, self._before

    def _input_halves(self, turn: NDArray[np.intp]) -> Floats:
        """Of the microbatches whose turn it is in each stage."""
        return self._inputs

    def _weight_halves(self, turn: NDArray[np.intp]) -> Floats:
        return self._weight

    def _left(self) -> Floats:
        return np.asarray(self._weight * np.minimum(self.lead.put_off, self._counts))


class _UnevenRounds(_Rounds):
    """Rounds of microbatches of unequal work."""

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
        done = np.arange(work.shape[1]) < counts
        self._work = np.where(done, work, 0.0)
        self._forward, self._transfers = forward, p2p * np.arange(forward.shape[1])

    def steady(self) -> range:
        return range(0)

    def _forwards(self, number: int) -> tuple[Floats, Floats]:
        forward = self._forward * self._work[:, number, None]
        reach = np.cumsum(forward, axis=1) + self._transfers
        return reach, reach - forward

    def _input_halves(self, turn: NDArray[np.intp]) -> Floats:
        return np.asarray(self._inputs * self._at(turn))

    def _weight_halves(self, turn: NDArray[np.intp]) -> Floats:
        return np.asarray(self._weight * self._at(turn))

    def _at(self, turn: NDArray[np.intp]) -> Floats:
        """Work of the microbatches whose turn it is, [pipeline, stage]."""
        return np.asarray(self._work[:, np.clip(turn, 0, self._work.shape[1] - 1)])

    def _left(self) -> Floats:
        upto = np.cumsum(np.pad(self._work, ((0, 0), (1, 0))), axis=1)
        first = np.maximum(self._counts - self.lead.put_off, 0)
        return np.asarray(self._weight * (upto[:, -1:] - np.take_along_axis(upto, first, axis=1)))
