"""Replay of steps from microbatch records, in the order of the job's schedule.

`StepGraph` has the operations of one step and their dependencies, built from the schedule;
`StepReplay` replays it with the recorded times, as they were and with one cause removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Cause, ContractError, Job, Layout, Op, TelemetryBatch
from resihp.pipeline.graph import Graph
from resihp.pipeline.orders import Part, Pass, job_orders

from ..arrays import mean, median, quantile
from .causes import USUAL, in_passes, lost_by_cause, most_of
from .dense_records import DenseRecords
from .effects import Effects, without_stalls
from .operations import Floats
from .places import HeldParts, SlowDevice, known_factor

_PARTS = {Part.WHOLE: 1.0, Part.INPUT: 0.5, Part.WEIGHT: 0.5}
_Key = tuple[int, int, int]  # direction, virtual stage, microbatch


@dataclass(frozen=True)
class _Cells:
    """Row of each operation's time among those that `flat` makes of `DenseRecords`."""

    stages: int
    chunks: int
    microbatches: int

    def flat(self, cubes: DenseRecords) -> NDArray[np.float64]:
        """All times as [cell, D, T]."""
        shape = (-1, *cubes.data.shape[1:])
        last = (cubes.passes, cubes.microbatch_data, cubes.p2p)
        parts = [np.moveaxis(cube, -1, -3).reshape(shape) for cube in last]
        return np.concatenate([*parts, cubes.collective, cubes.optimizer, cubes.data])

    def of_pass(self, direction: int, place: int, microbatch: int) -> int:
        """A forward or backward pass; direction 2 is the loading of the microbatch."""
        places = self.stages * self.chunks
        return (direction * places + place) * self.microbatches + microbatch

    def link(self, stage: int, microbatch: int) -> int:
        """A transfer over the link behind a stage."""
        return self.of_pass(3, 0, 0) + stage * self.microbatches + microbatch

    def of_step(self, kind: int, stage: int) -> int:
        """The collectives (0), the optimizer (1) or the data (2) of a step."""
        return self.link(self.stages, 0) + kind * self.stages + stage

    def place(self, cell: int) -> tuple[int, int, int]:
        """Name (an index into `SPAN_NAMES`), stage and microbatch (-1: none) of a row."""
        virtual, microbatch = divmod(cell, self.microbatches)
        direction, place = divmod(virtual, self.stages * self.chunks)
        if direction < 3:
            return direction, place % self.stages, microbatch
        if cell < self.of_step(0, 0):
            return 3, virtual - 3 * self.stages * self.chunks, microbatch
        kind, stage = divmod(cell - self.of_step(0, 0), self.stages)
        return 4 + kind, stage, -1


SPAN_NAMES = ("forward", "backward", "load", "transfer", "collective", "optimizer", "data")


TRANSFERS = (3, 4)


@dataclass
class _Builder:
    """Operations as columns under construction."""

    cells: _Cells
    loads: bool  # whether any microbatch took time to load
    cell: list[int] = field(default_factory=list)
    replica: list[int] = field(default_factory=list)
    part: list[float] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    synced: dict[int, list[int]] = field(default_factory=dict)  # collectives of a stage

    def add(self, cell: int, replica: int, before: list[int], part: float = 1.0) -> int:
        """Adds an operation; returns its number."""
        self.cell.append(cell)
        self.replica.append(replica)
        self.part.append(part)
        self.before.append(before)
        return len(self.cell) - 1

    def add_replica(self, replica: int, orders: Sequence[Sequence[Pass]]) -> None:
        """Adds all operations of a replica."""
        ends: dict[_Key, int] = {}  # the operation that ends with a pass's result
        stages = len(orders)
        chunks = 1 + max((item.chunk for order in orders for item in order), default=0)
        for stage, order in enumerate(orders):
            last = self.add(self.cells.of_step(2, stage), replica, [])
            for item in order:
                virtual, direction = item.chunk * stages + stage, int(item.op is Op.BACKWARD)
                place = item.chunk * self.cells.stages + stage  # other replicas may have more
                if self.loads and not direction:
                    cell = self.cells.of_pass(2, place, item.microbatch)
                    last = self.add(cell, replica, [last])
                cell = self.cells.of_pass(direction, place, item.microbatch)
                last = self.add(cell, replica, [last], _PARTS[item.part])
                if item.part is not Part.WEIGHT:
                    ends[direction, virtual, item.microbatch] = last
            last = self.add(self.cells.of_step(0, stage), replica, [last])
            self.synced.setdefault(stage, []).append(last)
            self.add(self.cells.of_step(1, stage), replica, [last])
        for (direction, virtual, microbatch), end in ends.items():
            source = virtual + 1 if direction else virtual - 1
            if 0 <= source < stages * chunks:
                cell = self.cells.link(min(source, virtual) % stages, microbatch)
                transfer = self.add(cell, replica, [ends[direction, source, microbatch]])
                self.before[end].append(transfer)


@dataclass(frozen=True, eq=False)
class StepGraph:
    """One step of all replicas. Where they are alike, one graph is used for all of them."""

    graph: Graph
    cells: _Cells
    alike: bool
    cell: NDArray[np.intp]
    replica: NDArray[np.intp]
    part: NDArray[np.float64]

    @classmethod
    def of(cls, job: Job, layout: Layout, cubes: DenseRecords) -> StepGraph:
        """The step of the replicas of `layout`, in the order of the job's schedule; without its
        limit of microbatches in flight if that does not fit the numbers that ran."""
        try:
            orders = job_orders(job, cubes.quotas, layout)
        except ContractError:
            orders = job_orders(replace(job, max_in_flight=None), cubes.quotas, layout)
        alike = all(order == orders[0] for order in orders)
        cells = _Cells(layout.pp, job.chunks, cubes.passes.shape[-1])
        built = _Builder(cells, loads=bool(cubes.microbatch_data.any()))
        for replica, order in enumerate(orders[:1] if alike else orders):
            built.add_replica(replica, order)
        groups = list(built.synced.values())
        return cls(
            graph=Graph(built.before, groups, range(len(groups))),
            cells=cells,
            alike=alike,
            cell=np.array(built.cell, np.intp),
            replica=np.array(built.replica, np.intp),
            part=np.array(built.part)[:, None, None],
        )

    def step_ms(self, cubes: DenseRecords) -> NDArray[np.float64]:
        """Duration [T] of every step with the times of `cubes`, which hold no NaN."""
        return np.asarray(self.graph.makespan(self._own(cubes)), np.float64)

    def spans_ms(self, cubes: DenseRecords) -> tuple[Floats, Floats]:
        """Start and end [N, D, T] of all operations; D is 1 where the replicas are not alike."""
        return self.graph.replay(self._own(cubes))

    @property
    def places(self) -> NDArray[np.intp]:
        """Name (an index into `SPAN_NAMES`), stage and microbatch (-1: none) [3, N]."""
        return np.array([self.cells.place(cell) for cell in self.cell.tolist()], np.intp).T

    def _own(self, cubes: DenseRecords) -> Floats:
        flat = self.cells.flat(cubes)
        own: Floats = flat[self.cell] if self.alike else flat[self.cell, self.replica][:, None]
        return own * self.part


@dataclass(frozen=True, eq=False)
class StepReplay:
    """Some steps of a job, ready to be replayed with one cause removed. Milliseconds."""

    cubes: DenseRecords
    graph: StepGraph
    effects: Effects

    @classmethod
    def of(
        cls,
        job: Job,
        layout: Layout,
        batches: Iterable[TelemetryBatch],
        slow: Sequence[SlowDevice] = (),
    ) -> StepReplay | None:
        """Prepares records; None if there is no compute record. `slow` are devices of the layout
        that are known to be slow."""
        cubes = DenseRecords.of(job, layout, batches)
        if cubes is None:
            return None
        whole = replace(
            cubes,
            passes=np.where(cubes.absent, 0.0, _complete(cubes.passes)),
            **{name: np.nan_to_num(getattr(cubes, name)) for name in _OTHERS},
        )
        graph = StepGraph.of(job, layout, whole)

        def factor(devices: Sequence[SlowDevice]) -> NDArray[np.float64]:
            replicas = np.arange(layout.dp)
            return known_factor(devices, cubes.steps, replicas, stages=layout.pp, chunks=job.chunks)

        held_back = [device for device in slow if device.by_host]
        effects = Effects(
            without_stalls(_measured(cubes.passes)),
            cubes.work,
            None if cubes.mates is None else _measured(cubes.mates),
            factor(slow),
            factor(held_back) if held_back else None,
            HeldParts.of(layout, job.chunks),
        )
        return cls(whole, graph, effects)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return int(self.cubes.passes.shape[3])

    @cached_property
    def step_ms(self) -> float:
        """Mean step as it was."""
        return self._mean_ms(self.cubes)

    @cached_property
    def lost_ms(self) -> dict[Cause, float]:
        """Mean milliseconds per step that each cause costs; 0 or more."""
        lost = dict(self._lost_ms)
        lost[Cause.DEVICE] -= self.by_host_ms
        lost[Cause.HOST] += self.by_host_ms
        return lost

    @cached_property
    def by_host_ms(self) -> float:
        """Milliseconds per step that ranks cost which are slow because of their hosts."""
        return self._lost_ms[Cause.DEVICE] * self.effects.host_share(self._step_with)

    @cached_property
    def _lost_ms(self) -> dict[Cause, float]:
        """Cost of each cause, with that of all slow ranks as their devices'."""
        cubes, ideal = self.cubes, self._ideal
        silent = replace(
            ideal, p2p=np.zeros_like(ideal.p2p), collective=np.zeros_like(ideal.collective)
        )
        no_host = replace(
            cubes,
            passes=self._passes(self.effects.times),
            data=ideal.data,
            microbatch_data=ideal.microbatch_data,
        )
        return lost_by_cause(
            self.effects,
            self._step_with,
            communication=[self._mean_ms(c) for c in (cubes, self._quick, ideal, silent)],
            host=self.step_ms - self._mean_ms(no_host),
        )

    @cached_property
    def _ideal(self) -> DenseRecords:
        """Passes and optimizer at their mean, communication at its median, the host at nothing."""
        cubes = self.cubes
        return replace(
            cubes,
            passes=self._equal(cubes.passes),
            p2p=_level(cubes.p2p, 0.5),
            collective=_level(cubes.collective, 0.5),
            optimizer=_in_cells(cubes.optimizer, mean(_measured(cubes.optimizer), (0, 1, 2))),
            data=np.zeros_like(cubes.data),
            microbatch_data=np.zeros_like(cubes.microbatch_data),
        )

    @cached_property
    def ideal_ms(self) -> float:
        """The step with every operation at its average, and no time of the host."""
        return self._mean_ms(self._ideal)

    def spans_ms(self, *, ideal: bool) -> tuple[Floats, Floats]:
        """Start and end [N, D, T] of all operations, as recorded or ideal.

        With few devices, the mean contains the excess of a slow one; the ideal is then that of
        equally fast devices. Where a layout gives slower devices less work, equally fast ones would
        take longer than it does: the ideal has the mean of each place then.
        """
        if not ideal:
            return self.graph.spans_ms(self.cubes)
        best = self._ideal
        if self.step_ms - self._lost_ms[Cause.DEVICE] < self.ideal_ms:
            best = replace(best, passes=self._equal(self.effects.without([Cause.DEVICE])))
        if self.step_ms < self._mean_ms(best):
            passes = self.cubes.passes
            best = replace(best, passes=_in_cells(passes, mean(_measured(passes), axis=(3, 4))))
        return self.graph.spans_ms(best)

    @cached_property
    def where(self) -> dict[Cause, str]:
        """Sentence on the place at which each cause is largest."""
        cubes, quick = self.cubes, self._quick
        found = in_passes(self.effects, cubes.p2p.shape[0])
        waste = {
            "transfers between stages": (cubes.p2p - quick.p2p).sum(axis=(2, 3)),
            "collectives": (cubes.collective - quick.collective).sum(axis=2),
        }
        kind, place = most_of(waste)
        if kind:
            found[Cause.COMMUNICATION] = f"most is in {kind}{place}"
        data = cubes.data.sum(axis=2)
        held_up = (cubes.passes - self._passes(self.effects.times)).sum(axis=0)
        for inner in (cubes.microbatch_data, held_up):
            data = data + inner.sum(axis=(2, 3)).reshape(-1, *data.shape).sum(axis=0)
        if place := most_of({"host": data})[1]:
            found[Cause.HOST] = f"most is on the ranks{place}"
        return found

    @cached_property
    def _quick(self) -> DenseRecords:
        """Communication as fast as in its best cases."""
        cubes = self.cubes
        return replace(
            cubes,
            p2p=np.minimum(cubes.p2p, _level(cubes.p2p, USUAL)),
            collective=np.minimum(cubes.collective, _level(cubes.collective, USUAL)),
        )

    def _step_with(self, passes: Floats) -> float:
        """Mean step with these times of the passes."""
        return self._mean_ms(replace(self.cubes, passes=self._passes(passes)))

    def _mean_ms(self, cubes: DenseRecords) -> float:
        return float(self.graph.step_ms(cubes).mean())

    def _equal(self, passes: Floats) -> NDArray[np.float64]:
        """The mean of these passes in place of each; 0 for those that did not run, or of which
        nothing is known."""
        return _in_cells(self.cubes.passes, mean(_measured(passes), axis=(1, 2, 3, 4)))

    def _passes(self, passes: Floats) -> NDArray[np.float64]:
        """These passes; where none was recorded, as they were filled in."""
        return np.where(np.isnan(passes), self.cubes.passes, passes)


_OTHERS = ("p2p", "collective", "optimizer", "data", "microbatch_data")


def _level(times: Floats, q: float) -> NDArray[np.float64]:
    """Quantile over the cells with a time above 0; 0 in the others."""
    return _in_cells(times, quantile(_measured(times), q, tuple(range(times.ndim))))


def _in_cells(times: Floats, usual: Floats) -> NDArray[np.float64]:
    """A usual time in place of each above 0."""
    return np.where(times > 0, usual, 0.0)


def _measured(times: Floats) -> NDArray[np.float64]:
    """Times with NaN for 0, which is not a measurement."""
    return np.where(times > 0, times, np.nan)


def _complete(passes: Floats) -> NDArray[np.float64]:
    """Passes with missing ones as their peers' in the same step, else as usual for the stage, else
    0."""
    for axes in ((2,), (2, 4), (2, 3, 4)):
        if not np.isnan(passes).any():
            break
        passes = np.where(np.isnan(passes), median(passes, axes), passes)
    return np.asarray(np.nan_to_num(passes), np.float64)
