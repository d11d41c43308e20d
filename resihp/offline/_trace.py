"""A recorded job in memory, whatever file it came from, and its records.

Recorded operations become microbatch records:

| operation                                   | record     | compute_ms       | wait_ms   |
|---------------------------------------------|------------|------------------|-----------|
| forward-compute, backward-compute           | FORWARD, … | duration         | NaN       |
| forward-send, … backward-recv               | P2P        | transfer         | the rest  |
| grads-reduce-scatter, params-all-gather, …  | COLLECTIVE | transfer         | the rest  |
| optimizer                                   | OPTIMIZER  | duration         | NaN       |
| gc                                          | DATA       | duration         | NaN       |

A transfer lasts from the moment when the last of its ranks has started it. Garbage collection
stops the host and not the device, as DATA records do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from detector.detector import moved_job
from detector.whatif.dependencies import Dependencies, dependencies, transfer_seconds
from detector.whatif.operations import COLLECTIVE, P2P, Floats, OpGrid, OpKind, OpTable
from resihp.contracts import COLUMNS, Job, Layout, Op, Plan, TelemetryBatch, TraceError

if TYPE_CHECKING:
    import pandas as pd

Columns = Mapping[str, NDArray[Any]]

_OP = {
    OpKind.FORWARD: Op.FORWARD,
    OpKind.BACKWARD: Op.BACKWARD,
    OpKind.OPTIMIZER: Op.OPTIMIZER,
    OpKind.GC: Op.DATA,
    **dict.fromkeys(P2P, Op.P2P),
    **dict.fromkeys(COLLECTIVE, Op.COLLECTIVE),
}
_CODES = np.array([_OP[kind] for kind in OpKind], np.uint8)


@dataclass(frozen=True, eq=False)
class Rows:
    """Columns of a table that its `OpGrid` does not hold.

    ranks       global ranks that were recorded, in ascending order
    rank        of every row; None where one rank was recorded at each place
    duration_s  of every row; None where each cell was recorded once
    """

    ranks: tuple[int, ...]
    rank: NDArray[np.integer] | None
    duration_s: Floats | None

    @classmethod
    def of(cls, ops: OpTable, recording: OpGrid) -> Rows:
        """Of the table that the recording was made of."""
        ranks = tuple(np.unique(ops.rank).tolist())
        places = int(np.count_nonzero(recording.rank >= 0))
        alone = len(ranks) == places == np.unique(recording.rank[recording.rank >= 0]).size
        once = np.count_nonzero(~np.isnan(recording.duration_s)) == len(ops)
        return cls(ranks, None if alone else ops.rank, None if once else ops.duration_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """A recorded job.

    format   "whatif-parquet", "resihp-parquet" or "kineto-json"
    job      shape of the job; ranks that were not recorded may be missing from its layout
    tp       tensor-parallel degree of the job, of which perhaps one rank in a group was recorded
    grid     every operation with its start, where the format has them; else None
    rows     what the grid does not hold of its rows
    columns  microbatch records by the names of `TelemetryBatch`, and `plan_version`, where the
             format holds records; else None
    plans    plans that took effect while the job was recorded
    untimed_ms
             time of a usual step of a rank that is in no record; NaN where that is not known
    """

    path: Path
    format: str
    job: Job
    tp: int = 1
    grid: OpGrid | None = None
    rows: Rows | None = None
    columns: Columns | None = None
    plans: tuple[Plan, ...] = ()
    untimed_ms: float = math.nan

    @property
    def recording(self) -> OpGrid:
        """The operations on a dense grid, of a trace that has one."""
        assert self.grid is not None
        return self.grid

    @cached_property
    def layouts(self) -> dict[int, Layout]:
        """The layouts of the job by plan version."""
        return {0: self.job.layout} | {plan.version: plan.layout for plan in self.plans}

    def job_under(self, version: int) -> Job:
        """The job as it ran under a plan version: with the plan's layout, quotas and schedule.
        Raises `ContractError` for a plan that the job cannot run."""
        for plan in self.plans:
            if plan.version == version:
                return moved_job(self.job, plan.layout, plan.quotas, plan.schedule)
        return self.job

    @cached_property
    def dependencies(self) -> Dependencies:
        """Dependencies between the operations. Requires `grid`."""
        return dependencies(self.recording)

    @cached_property
    def own_s(self) -> Floats:
        """Durations [N, D, T] of the recording without the waiting. Requires `grid`."""
        return transfer_seconds(self.recording, self.dependencies)

    @cached_property
    def records(self) -> Columns:
        """All microbatch records as columns, in the order of `batches`; times in milliseconds."""
        parts = list(self._parts())
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that were recorded, in ascending order."""
        if self.rows is not None:
            return self.rows.ranks
        return tuple(int(rank) for rank in np.unique(self.records["rank"]))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Steps that were recorded, in ascending order."""
        steps = self.grid.steps if self.grid is not None else self.records["step"]
        return tuple(int(step) for step in np.unique(steps))

    def batches(self) -> Iterator[TelemetryBatch]:
        """One batch for each step of each plan, in the order of the plans and their steps."""
        for part in self._parts():
            columns: dict[str, Any] = dict(part)
            version = columns.pop("plan_version")
            yield TelemetryBatch(**columns, plan_version=int(version[0]))

    def _parts(self) -> Iterator[Columns]:
        """The records of one plan version and step after the other: a job that went back to an
        earlier step under a new plan took that step again."""
        if self.columns is not None:
            columns = self.columns
            for rows in _runs(columns["plan_version"], columns["step"]):
                yield {name: column[rows] for name, column in columns.items()}
            return
        for rows in _runs(self.recording.cell % self.recording.steps.size):
            yield self._recorded(rows)

    def _recorded(self, rows: NDArray[np.intp] | slice) -> Columns:
        """The records of some recorded operations."""
        recording, found, given = self.recording, self.dependencies, self.rows
        assert given is not None
        cell = recording.cell[rows]
        op, replica, step = np.unravel_index(cell, recording.start_s.shape)
        whole = recording.duration_s.reshape(-1)[cell]
        if given.duration_s is not None:
            whole = given.duration_s[rows]
        own = self.own_s.reshape(-1)[cell]
        known = found.waits()[op] & np.isfinite(own)
        own = np.where(known, np.clip(own, 0.0, whole), whole)
        served, peer = found.serves[op], found.peer[op]
        at_peer = recording.rank[replica, recording.stage[peer]]
        rank = recording.rank[replica, recording.stage[op]]
        columns = {
            "rank": rank if given.rank is None else given.rank[rows],
            "step": recording.steps[step],
            "microbatch": recording.microbatch[np.where(served >= 0, served, op)],
            "chunk": np.maximum(recording.chunk[op], 0),
            "op": _CODES[recording.kind[op]],
            "compute_ms": own * 1e3,
            "wait_ms": np.where(known, (whole - own) * 1e3, np.nan),
            "peer": np.where(peer >= 0, at_peer, -1),
        }
        real = ~(found.idle | found.lone)[op]
        return filled({name: column[real] for name, column in columns.items()})

    def frame(self) -> pd.DataFrame:
        """The microbatch records as a pandas frame; `op` as words, unknown work as NA."""
        import pandas as pd

        frame = pd.DataFrame(dict(self.records))
        for name in ("tokens", "sequences", "sum_sq_len", "max_len"):
            frame[name] = frame[name].astype("Int64").mask(frame[name] < 0)
        frame["op"] = pd.Categorical.from_codes(
            self.records["op"].astype(np.int8), pd.Index([op.name.lower() for op in Op])
        )
        return frame


def _runs(*keys: NDArray[Any]) -> Iterator[NDArray[np.intp] | slice]:
    """Rows with equal keys, in the order of the keys; their own order stays."""
    if len(keys) == 1 and (keys[0][1:] >= keys[0][:-1]).all():
        edges = [0, *(np.flatnonzero(np.diff(keys[0])) + 1).tolist(), keys[0].size]
        yield from (slice(start, stop) for start, stop in pairwise(edges))
        return
    order = np.lexsort(keys[::-1])
    change = np.zeros(max(order.size - 1, 0), bool)
    for key in keys:
        change |= np.diff(key[order]) != 0
    edges = [0, *(np.flatnonzero(change) + 1).tolist(), order.size]
    for start, stop in pairwise(edges):
        yield order[start:stop]


def filled(columns: Columns) -> Columns:
    """The columns of records of no plan, with those that are missing."""
    size = columns["rank"].size
    found: dict[str, NDArray[Any]] = {
        name: np.asarray(columns.get(name, np.broadcast_to(default or 0, size)), dtype)
        for name, (dtype, default) in COLUMNS.items()
    }
    return {**found, "plan_version": np.zeros(size, np.int64)}


def absolute(path: Path) -> Path:
    """A path without `.` and `..`, which name no file or folder."""
    return Path(os.path.abspath(path))


def read_meta(trace: Path) -> dict[str, str]:
    """The `name: value` lines of the YAML file that belongs to a trace; empty if there is none.

    `trace-X.parquet` belongs to `meta-X.yaml`; else `<stem>.yaml` or `meta.yaml` in its folder.
    """
    trace = absolute(trace)
    names = (trace.stem.replace("trace", "meta", 1), trace.stem, "meta")
    for name in names:
        for suffix in (".yaml", ".yml"):
            path = trace.with_name(name + suffix)
            if path.is_file():
                return _parse(path)
    return {}


def tensor_parallel(meta: dict[str, str], recorded: int) -> int:
    """The tensor-parallel degree in the facts, if it is above the recorded one."""
    given = meta.get("tp_size", "1")
    if not given.isdecimal() or int(given) < 1:
        raise TraceError(f"meta: tp_size must be a whole number above 0, not {given!r}")
    return max(int(given), recorded)


def _parse(path: Path) -> dict[str, str]:
    facts = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    for line in lines:
        name, colon, value = line.split("#", 1)[0].partition(":")
        if colon:
            facts[name.strip()] = value.strip().strip("'\"")
    return facts
