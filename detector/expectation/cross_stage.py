"""Expected compute times of records without lengths, predicted from other stages.

The time of a microbatch on one stage is, to about 1%, an affine function of its time on any other
stage. So a rank's time is predicted from a few reference ranks of other stages that computed the
same microbatch, through affine maps shared by all replicas. The median over them is robust against
one slow reference rank. Where few other stages give an even number of them, a member of the rank's
own tensor-parallel group is added, since the median of two is not robust. Where a replica has one
stage only, those members are the reference ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from resihp.contracts import Job, Layout, Op, TelemetryBatch

from ..arrays import Bools, Floats, Ints, group_median
from ..persistence import Persistent
from ..rank_table import RankTable
from ..residuals import FixedShare, StepResidual
from .rank_levels import RankLevels
from .regression import CellRegression

REFERENCES = 5
_UNKNOWN_SHARE = 0.25
"""Spread of the fixed share where all microbatches took equally long, so that it is unknown."""
_MISFIT = 0.06
"""Residual (log) of most ranks of a class from which the maps no longer fit."""
_SETTLED_STEPS = 6
_ODD = 0.25
"""Distance (log) of a microbatch from its rank's usual ones beyond which its weight falls."""


def reference_ranks(layout: Layout, places: RankTable) -> Ints:
    """Positions of each rank's reference ranks, shape (ranks, REFERENCES); -1 where there are
    fewer."""
    table = np.full((places.size, REFERENCES), -1, np.int64)
    for replica in layout.replicas:
        for at, stage in enumerate(replica.stages):
            others = [*replica.stages[at + 1 :], *replica.stages[:at]] or [stage]
            groups = [other.ranks for other in others]
            for place, rank in enumerate(stage.ranks):
                row = int(places.index(np.array([rank]))[0])
                chosen = list(islice(_around(place, groups, rank), REFERENCES))
                if len(chosen) % 2 == 0 and stage not in others:
                    chosen += islice(_around(place, [stage.ranks], rank), 1)
                table[row, : len(chosen)] = places.index(np.array(chosen, np.int64))
    return table


def _around(place: int, groups: list[tuple[int, ...]], rank: int) -> Iterator[int]:
    """Ranks at the same tensor-parallel position of every group first, then their neighbours."""
    for turn in range(max(map(len, groups))):
        for ranks in groups:
            other = ranks[(place + turn) % len(ranks)]
            if turn < len(ranks) and other != rank:
                yield other


class CrossStageModel(Persistent):
    """Affine maps between ranks of a replica, learned as the steps come in.

    misfits   consecutive steps in which whole classes were off, as when the model changes or
              documents become much longer; no single device causes that
    """

    _saved = ("regression", "_levels", "misfits")

    def __init__(self, job: Job, places: RankTable) -> None:
        self._job, self._places = job, places
        self.references = reference_ranks(job.layout, places)
        kinds = int(places.peers.max()) + 1
        pair = places.peers[:, None] * kinds + places.peers[np.maximum(self.references, 0)]
        pair = np.where(self.references >= 0, pair, kinds * kinds)
        _, code = np.unique(pair, return_inverse=True)
        self._pair = code.reshape(pair.shape).astype(np.int64)
        self._planes = 2 * job.chunks
        self.regression = CellRegression(
            (int(self._pair.max()) + 1) * self._planes,
            prior=np.array([0.0, 1.0]),
            ridge=np.array([0.05, 0.001]),
            non_negative=np.array([False, True]),
        )
        few = max(float(np.median((self.references >= 0).sum(axis=1))), 1.0)
        self._wider = float(np.sqrt(1.0 + 1.0 / few))
        self._levels = RankLevels(places.peers)
        self.misfits = 0

    def residuals(self, batch: TelemetryBatch, index: Ints, trusted: Bools) -> StepResidual:
        """Scores one step of compute records, then learns from the ranks in `trusted`."""
        times = self._table(batch, index)
        if not self._levels.steps:
            for _ in range(3):
                self.regression.forget()
                self._learn(times, self._score(times)[0], trusted)
            self.regression.forget()
        result, expected = self._score(times)
        expected_ms = np.full(len(batch), np.nan)
        known = batch.microbatch >= 0
        expected_ms[known] = expected[self._cells(batch, index)]
        result = replace(result, expected_ms=expected_ms)
        if self._levels.steps >= _SETTLED_STEPS and self._whole_class_is_off(result.value):
            self.misfits += 1
            return result
        self.misfits = 0
        self._learn(times, result, trusted)
        self._levels.observe(result.value, trusted)
        return result

    def _whole_class_is_off(self, value: Floats) -> bool:
        """Returns whether most ranks of a class, at least two, are off to one side by more than
        `_MISFIT`, and none has stayed where it was: a change of the model affects all."""
        peers, seen = self._places.peers, np.isfinite(value)
        size = int(peers.max()) + 1
        value, usual = np.nan_to_num(value), self._levels.usual
        for side in (1.0, -1.0):
            off = np.bincount(peers[seen & (side * value > _MISFIT)], minlength=size)
            way = np.maximum(side * value, side * (value - usual))
            stay = np.bincount(peers[seen & (way < 0.5 * _MISFIT)], minlength=size)
            most = 2 * off > np.bincount(peers[seen], minlength=size)
            if ((off >= 2) & most & (stay == 0)).any():
                return True
        return False

    def verifiable(self, trusted: Bools) -> Bools:
        """Mask of the ranks most of whose reference ranks are trusted: residuals of the others may
        come from their reference ranks. Half are not enough: either moves the median of two."""
        there = self.references >= 0
        sound = there & trusted[np.maximum(self.references, 0)]
        result: Bools = 2 * sound.sum(axis=1) > there.sum(axis=1)
        return result

    def _table(self, batch: TelemetryBatch, index: Ints) -> Floats:
        """Times in ms, shape (planes, ranks, microbatches); NaN where there is no record."""
        width = max(int(batch.microbatch.max()), 0) + 1
        table = np.full((self._planes, self._places.size, width), np.nan)
        usable = batch.microbatch >= 0
        table[self._cells(batch, index)] = np.maximum(batch.compute_ms[usable], 1e-6)
        return table

    def _cells(self, batch: TelemetryBatch, index: Ints) -> tuple[Ints, Ints, Ints]:
        """Places in the table of the records that tell their microbatch."""
        chunk = np.minimum(batch.chunk, self._job.chunks - 1).astype(np.int64)
        plane, microbatch = 2 * chunk + (batch.op == Op.BACKWARD), batch.microbatch.astype(np.int64)
        known = microbatch >= 0
        return plane[known], index[known], microbatch[known]

    def _rows(self, times: Floats, slot: int) -> tuple[tuple[Ints, Ints, Ints], Ints, Floats]:
        """Records with a reference rank in a slot: their places, their cells and their terms."""
        reference = self.references[:, slot]
        seen = np.isfinite(times) & np.isfinite(times[:, np.maximum(reference, 0)])
        seen &= (reference >= 0)[None, :, None]
        plane, rank, microbatch = np.nonzero(seen)
        cell = self._pair[rank, slot] * self._planes + plane
        other = times[plane, reference[rank], microbatch]
        return (plane, rank, microbatch), cell, np.stack([np.ones(other.size), other], axis=1)

    def _score(self, times: Floats) -> tuple[StepResidual, Floats]:
        """Residuals of the ranks, and predicted times of all passes in the form of `times`."""
        size = self._places.size
        logs = np.full((REFERENCES, *times.shape), np.nan)
        fixed, unsure = np.full(logs.shape, np.nan), np.full(logs.shape, np.nan)
        doubt = self.regression.fixed_error(max(self._levels.spread, 1e-4), _UNKNOWN_SHARE)
        for slot in range(REFERENCES):
            where, cell, terms = self._rows(times, slot)
            if not cell.size:
                continue
            self.regression.open(cell, terms, times[where])
            expected = self.regression.times(cell, terms)
            at = (slot, *where)
            logs[at] = np.log(np.maximum(expected, 0.05 * times[where]))
            fixed[at], unsure[at] = self.regression.theta[:, 0][cell] / expected, doubt[cell]
        middle, shares, doubts = _median_of_few(logs, fixed, unsure)
        plane, rank, microbatch = np.nonzero(np.isfinite(middle))
        residual = np.log(times[plane, rank, microbatch]) - middle[plane, rank, microbatch]
        logged, row = np.log(times[plane, rank, microbatch]), rank * self._planes + plane
        odd = group_median(logged, row, size * self._planes)[row] - logged
        weights = 1.0 / (1.0 + (np.maximum(odd, 0.0) / _ODD) ** 4)
        value, left, records, _ = self._levels.locate(
            residual, np.exp(logged - residual), rank, plane % 2 == 1, weights
        )
        spread = max(self._levels.spread, 1e-4)
        where = plane, rank, microbatch
        usual = np.abs(residual - value[rank]) < 5.0 * spread
        share = np.clip(shares[where], -2.0, 2.0)
        count = np.maximum(records, 1)
        mean = np.bincount(rank, share, size) / count
        off, owner = (share - mean[rank])[usual], rank[usual]
        fixed_share = FixedShare(
            mean=mean,
            unsure=np.bincount(rank, doubts[where], size) / count,
            both=np.bincount(owner, off * (residual - value[rank])[usual], size).astype(np.float64),
            square=np.bincount(owner, off**2, size).astype(np.float64),
            noise=spread,
        )
        error = spread / np.sqrt(np.maximum(left, 1e-2))
        return StepResidual(value, error, records, spread, self._wider, fixed_share), np.exp(middle)

    def _learn(self, times: Floats, result: StepResidual, trusted: Bools) -> None:
        value, microbatches = result.value, result.records / self._planes
        own = self._levels.of(value, microbatches)
        shift = np.exp(-self._levels.beyond_class(own, trusted & np.isfinite(value)))
        for slot in range(REFERENCES):
            where, cell, terms = self._rows(times, slot)
            if not cell.size:
                continue
            self.regression.open(cell, terms, times[where])
            rank = where[1]
            target = times[where] * shift[rank]
            expected = self.regression.times(cell, terms)
            left = np.log(target / expected)
            scatter = max(self._levels.spread, self._levels.scatter(left, microbatches), 2e-3)
            usual = np.abs(left) < 5.0 * scatter + (0.2 if not self._levels.steps else 0.0)
            use_row = usual & trusted[rank] & trusted[self.references[rank, slot]]
            self.regression.learn(cell, terms, target, use_row.astype(np.float64))


def _median_of_few(values: Floats, *others: Floats) -> tuple[Floats, ...]:
    """Median over the first axis without NaN, and the values of `others` at the same places;
    for few rows far faster than `nanmedian`."""
    order = np.argsort(values, axis=0)  # NaN sorts last
    counts = np.isfinite(values).sum(axis=0)
    low = np.maximum((counts - 1) // 2, 0)[None]
    high = np.minimum(np.maximum(counts // 2, 0)[None], values.shape[0] - 1)
    low, high = np.take_along_axis(order, low, 0), np.take_along_axis(order, high, 0)
    return tuple(
        0.5 * (np.take_along_axis(v, low, 0) + np.take_along_axis(v, high, 0))[0]
        for v in (values, *others)
    )
