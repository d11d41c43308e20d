"""The operations of one step and their dependencies, built from a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Job, Op
from resihp.pipeline.graph import Graph
from resihp.pipeline.orders import Part, Pass, job_orders

from .dense_records import DenseRecords
from .operations import Floats

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

    def of_pass(self, direction: int, virtual: int, microbatch: int) -> int:
        """A forward or backward pass; direction 2 is the loading of the microbatch."""
        places = self.stages * self.chunks
        return (direction * places + virtual) * self.microbatches + microbatch

    def link(self, stage: int, microbatch: int) -> int:
        """A transfer over the link behind a stage."""
        return self.of_pass(3, 0, 0) + stage * self.microbatches + microbatch

    def collective(self, stage: int) -> int:
        """The step's collectives; its optimizer and its data follow."""
        return self.link(self.stages, 0) + stage

    def optimizer(self, stage: int) -> int:
        """The step's optimizer."""
        return self.collective(self.stages) + stage

    def data(self, stage: int) -> int:
        """The step's data loading."""
        return self.optimizer(self.stages) + stage

    def place(self, cell: int) -> tuple[int, int, int]:
        """Name (an index into `SPAN_NAMES`), stage and microbatch (-1: none) of a row."""
        virtual, microbatch = divmod(cell, self.microbatches)
        direction, place = divmod(virtual, self.stages * self.chunks)
        if direction < 3:
            return direction, place % self.stages, microbatch
        if cell < self.collective(0):
            return 3, virtual - 3 * self.stages * self.chunks, microbatch
        kind, stage = divmod(cell - self.collective(0), self.stages)
        return 4 + kind, stage, -1


SPAN_NAMES = ("forward", "backward", "load", "transfer", "collective", "optimizer", "data")


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSpans:
    """Intervals of operations, as columns [N] and times [N, D, T]; D is 1 where `replica` is not
    -1."""

    name: NDArray[np.intp]
    stage: NDArray[np.intp]
    microbatch: NDArray[np.intp]
    replica: NDArray[np.intp]
    start_ms: Floats
    duration_ms: Floats

    @property
    def names(self) -> tuple[str, ...]:
        """The names that `name` indexes."""
        return SPAN_NAMES

    @property
    def transfer(self) -> NDArray[np.bool_]:
        """Mask of the transfers and collectives."""
        return np.isin(self.name, (3, 4))


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
        passes: dict[_Key, int] = {}
        for stage, order in enumerate(orders):
            self._add_stage(replica, stage, len(orders), order, ends, passes)
        chunks = 1 + max((item.chunk for order in orders for item in order), default=0)
        for key in passes:
            self._receive(replica, key, len(orders), chunks, ends, passes)

    def _add_stage(
        self,
        replica: int,
        stage: int,
        stages: int,
        order: Sequence[Pass],
        ends: dict[_Key, int],
        passes: dict[_Key, int],
    ) -> None:
        last = self.add(self.cells.data(stage), replica, [])
        for item in order:
            virtual = item.chunk * stages + stage
            direction = int(item.op is Op.BACKWARD)
            if self.loads and not direction:
                cell = self.cells.of_pass(2, virtual, item.microbatch)
                last = self.add(cell, replica, [last])
            cell = self.cells.of_pass(direction, virtual, item.microbatch)
            last = self.add(cell, replica, [last], _PARTS[item.part])
            if item.part is not Part.WEIGHT:
                key = (direction, virtual, item.microbatch)
                ends[key] = passes[key] = last
        last = self.add(self.cells.collective(stage), replica, [last])
        self.synced.setdefault(stage, []).append(last)
        self.add(self.cells.optimizer(stage), replica, [last])

    def _receive(
        self,
        replica: int,
        key: _Key,
        stages: int,
        chunks: int,
        ends: dict[_Key, int],
        passes: dict[_Key, int],
    ) -> None:
        """Makes a pass depend on the transfer of its input."""
        direction, virtual, microbatch = key
        source = virtual + 1 if direction else virtual - 1
        if not 0 <= source < stages * chunks:
            return
        link = min(source, virtual) % stages
        cell = self.cells.link(link, microbatch)
        transfer = self.add(cell, replica, [ends[direction, source, microbatch]])
        self.before[passes[key]].append(transfer)


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
    def of(cls, job: Job, cubes: DenseRecords) -> StepGraph:
        """The step of the replicas in `cubes`, in the order of the job's schedule."""
        stages, quotas = cubes.stages, cubes.quotas
        alike = len(set(stages)) == 1 and len(set(quotas)) == 1
        cells = _Cells(max(stages), job.chunks, cubes.passes.shape[-1])
        layout = _Builder(cells, loads=bool(cubes.microbatch_data.any()))
        for replica in range(1 if alike else len(stages)):
            layout.add_replica(replica, job_orders(job, stages[replica], quotas[replica]))
        groups = list(layout.synced.values())
        return cls(
            graph=Graph(layout.before, groups, range(len(groups))),
            cells=cells,
            alike=alike,
            cell=np.array(layout.cell, np.intp),
            replica=np.array(layout.replica, np.intp),
            part=np.array(layout.part)[:, None, None],
        )

    def step_ms(self, cubes: DenseRecords) -> NDArray[np.float64]:
        """Duration [T] of every step with the times of `cubes`, which hold no NaN."""
        return np.asarray(self.graph.makespan(self._own(cubes)), np.float64)

    def spans(self, cubes: DenseRecords) -> StepSpans:
        """Intervals of all operations."""
        start, end = self.graph.replay(self._own(cubes))
        places = [self.cells.place(cell) for cell in self.cell.tolist()]
        name, stage, microbatch = np.array(places, np.intp).T
        return StepSpans(
            name=name,
            stage=stage,
            microbatch=microbatch,
            replica=np.full(name.size, -1) if self.alike else self.replica,
            start_ms=start,
            duration_ms=end - start,
        )

    def _own(self, cubes: DenseRecords) -> Floats:
        flat = self.cells.flat(cubes)
        own: Floats = flat[self.cell] if self.alike else flat[self.cell, self.replica][:, None]
        return own * self.part
