"""Simulation of one training step: start and end of every pass, peak memory of every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import (
    ContractError,
    Job,
    Layout,
    LinkVerdict,
    Op,
    Plan,
    Replica,
    Schedule,
    Stage,
)
from resihp.contracts.layout import LAST_RANK
from resihp.pipeline.orders import Pass, chunks_run, replayed_schedule, replica_orders
from resihp.pipeline.replay import Replay, pass_durations, replay

from .cost_model import GroupCost, group_cost, layer_cost, transfer_ms
from .link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns, boundaries_ms
from .memory import MemoryFootprint, most_between, most_held

Speeds = Mapping[int, float] | Sequence[float]
MOST_SPEED = 1e30  # and the least its inverse, so that no time is infinite
_PASS_LETTERS = {Op.FORWARD: "F", Op.BACKWARD: "B"}


@dataclass(frozen=True)
class TimedPass:
    """Pass of one stage of one replica; times in milliseconds from the start of the step."""

    replica: int
    stage: int
    item: Pass
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """Simulated step: its duration, all passes, and peak memory by rank.

    peak_bytes  by rank: its part of the model state and of the activations of all microbatches in
                flight; 0 if the job does not describe memory
    """

    step_ms: float
    passes: tuple[TimedPass, ...]
    peak_bytes: Mapping[int, float]

    def perfetto(self) -> dict[str, Any]:
        """Trace events of the step for ui.perfetto.dev, one row per stage."""
        events: list[dict[str, Any]] = [
            {
                "ph": "X",
                "name": f"{_PASS_LETTERS[p.item.op]}{p.item.microbatch}",
                "cat": f"{p.item.op.name.lower()}-{p.item.part}",
                "pid": p.replica,
                "tid": p.stage,
                "ts": p.start_ms * 1e3,
                "dur": (p.end_ms - p.start_ms) * 1e3,
                "args": {"chunk": p.item.chunk},
            }
            for p in self.passes
        ]
        for replica, stage in sorted({(p.replica, p.stage) for p in self.passes}):
            row = {"ph": "M", "pid": replica, "tid": stage}
            events.append({**row, "name": "process_name", "args": {"name": f"replica {replica}"}})
            events.append({**row, "name": "thread_name", "args": {"name": f"stage {stage}"}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def simulate(
    job: Job,
    layout: Layout | Plan,
    quotas: Sequence[int] | None = None,
    speeds: Speeds | None = None,
    work: Sequence[Sequence[float]] | Sequence[float] | None = None,
    *,
    schedule: Schedule | None = None,
    links: Iterable[LinkVerdict] = (),
) -> Timeline:
    """Simulate one step of `job` in `layout`, which may be a plan.

    quotas    microbatches of each replica; default: those of the plan, or of the job
    speeds    by rank, default 1.0; must be above 0 for all ranks of the layout
    work      work of each microbatch relative to the mean (cost of its sequence lengths over the
              mean cost): one list per replica, or one list for all replicas in order; default 1
    schedule  of the pipelines; default: that of the plan which the layout belongs to, else that of
              the job
    links     verdicts on links and groups; those that are fail-slow slow transfers and collectives

    A plan, or its layout with its quotas, takes the plan's `step_ms` at the speeds that it was
    made for. Raises `ContractError` with the argument's name for quotas that are not one whole
    number per replica, invalid speeds, dead ranks, work of the wrong shape, a schedule with one
    chunk per stage for a layout with several, and a `max_in_flight` too small for them.
    """
    if isinstance(layout, Plan):
        quotas, layout = layout.quotas if quotas is None else quotas, layout.layout
    quotas = job.quotas if quotas is None else quotas
    known, slow = speed_map(speeds), LinkSlowdowns.of(job, links)
    _check(layout, quotas, known)
    loads = _loads(work, quotas)
    chosen = _schedule(job, layout, schedule)
    chunks = chunks_run(job, layout.replicas, chosen)
    footprint = MemoryFootprint.of(job, layout.dp)
    passes: list[TimedPass] = []
    peak: dict[int, float] = {}
    for index, replica in enumerate(layout.replicas):
        given = loads[index], known, chosen, chunks[index]
        orders, played = play_replica(job, replica, *given, slow)
        rows = zip(replica.stages, orders, played.starts, played.ends, strict=True)
        for s, (stage, order, starts, ends) in enumerate(rows):
            timed = zip(order, starts.tolist(), ends.tolist(), strict=True)
            passes += [TimedPass(index, s, item, start, end) for item, start, end in timed]
            held = footprint.stage_bytes(
                stage,
                first=s == 0,
                last=s == len(orders) - 1,
                in_flight=most_held(order),
                split=most_between(order),
            )
            peak.update(zip(stage.ranks, held, strict=True))
    end = max((item.end_ms for item in passes), default=0.0)
    return Timeline(end + layer_cost(job).step_ms, tuple(passes), peak)


def _schedule(job: Job, layout: Layout, given: Schedule | None) -> Schedule:
    """Schedule of a layout; several model chunks per stage imply the interleaved one."""
    given = None if given is None else Schedule.named(given)
    chunked = any(replica.chunks > 1 for replica in layout.replicas)
    if chunked and given not in (None, Schedule.INTERLEAVED):
        raise ContractError("schedule", f"{given} runs one model chunk in each stage")
    return Schedule.INTERLEAVED if chunked else given or layout.schedule or job.schedule


def play_replica(
    job: Job,
    replica: Replica,
    loads: NDArray[np.float64],
    speeds: Mapping[int, float],
    schedule: Schedule,
    chunks: int,
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
) -> tuple[list[tuple[Pass, ...]], Replay]:
    """Order of passes of every stage and their replay.

    loads   relative work of each microbatch
    chunks  model chunks per stage; of equal size if the replica has only one layer range per stage
    """
    given = len(loads), replayed_schedule(schedule, chunks)
    orders = replica_orders(replica, *given, max_in_flight=job.max_in_flight, chunks=chunks)
    if replica.chunks > 1:
        durations = _chunk_durations(job, replica, orders, loads, speeds, links)
    else:
        forward, backward = (np.outer(t, loads) for t in stage_times(job, replica, speeds, links))
        durations = pass_durations(orders, forward, backward)
    return orders, replay(orders, durations, p2p=_delays(job, replica, links))


def _delays(job: Job, replica: Replica, links: LinkSlowdowns) -> float | NDArray[np.float64]:
    """Times of transfers for `replay`: one for all, or [link, 1] with that from the last stage to
    the first one."""
    if not links:
        return transfer_ms(job)
    stages = replica.stages
    back_ms = transfer_ms(job, links.boundary(stages[-1].ranks, stages[0].ranks))
    return np.array([*boundaries_ms(job, replica, links), back_ms])[:, None]


def replica_makespan(
    job: Job,
    replica: Replica,
    quota: int,
    speeds: Mapping[int, float],
    schedule: Schedule,
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
    chunks: int | None = None,
) -> float:
    """Makespan of a replica in milliseconds, all microbatches of mean work.

    chunks  model chunks per stage; default: as many as it holds

    inf if `max_in_flight` is too small for them.
    """
    chunks = chunks or replica.chunks
    try:
        loads = np.ones(quota)
        return play_replica(job, replica, loads, speeds, schedule, chunks, links)[1].span
    except ContractError:
        if chunks == 1:
            raise
        return math.inf


def _chunk_durations(
    job: Job,
    replica: Replica,
    orders: Sequence[Sequence[Pass]],
    loads: NDArray[np.float64],
    speeds: Mapping[int, float],
    links: LinkSlowdowns,
) -> list[list[float]]:
    """Durations of all passes of an interleaved replica, from the layers of their chunks."""
    work = loads.tolist()
    ends = (0, 0), (len(replica.stages) - 1, replica.chunks - 1)
    durations = []
    for index, (stage, order) in enumerate(zip(replica.stages, orders, strict=True)):
        cost = _stage_cost(job, stage, speeds, links)
        each = [
            cost.stage(
                stop - start, first=(index, chunk) == ends[0], last=(index, chunk) == ends[1]
            )
            for chunk, (start, stop) in enumerate(stage.chunks)
        ]
        durations.append([each[p.chunk][p.op is Op.BACKWARD] * work[p.microbatch] for p in order])
    return durations


def _check(layout: Layout, quotas: Sequence[int], speeds: Mapping[int, float]) -> None:
    if not isinstance(quotas, Iterable):
        raise ContractError("quotas", "must be a list")
    is_whole = _all_are(Integral, quotas) and not any(isinstance(q, bool) for q in quotas)
    if len(quotas) != layout.dp or not is_whole or min(quotas) < 0:
        raise ContractError("quotas", "must have one whole number, 0 or more, for each replica")
    dead = [rank for rank in layout.ranks if speeds.get(rank, 1.0) <= 0.0]
    if dead:
        raise ContractError("speeds", f"ranks {dead[:4]} of the layout are dead")


def _loads(
    work: Sequence[Sequence[float]] | Sequence[float] | None, quotas: Sequence[int]
) -> list[NDArray[np.float64]]:
    """Relative work of each microbatch, one array per replica."""
    if work is None:
        return [np.ones(quota) for quota in quotas]
    try:
        rows = [np.asarray(row, np.float64) for row in work]
    except (TypeError, ValueError):
        raise ContractError("work", "must be numbers") from None
    if all(row.ndim == 0 for row in rows):
        flat = np.asarray(rows, np.float64)
        rows = np.split(flat, np.cumsum(quotas)[:-1]) if len(flat) == sum(quotas) else []
    if [row.shape for row in rows] != [(quota,) for quota in quotas]:
        raise ContractError("work", "must have one entry for each microbatch of each replica")
    if not all(np.isfinite(row).all() and (row >= 0.0).all() for row in rows):
        raise ContractError("work", "must be finite and 0 or more")
    return rows


def speed_map(speeds: Speeds | None) -> Mapping[int, float]:
    """Speeds by rank. Raises `ContractError` for an invalid speed or rank."""
    if speeds is None:
        return {}
    if not isinstance(speeds, Iterable):
        raise ContractError("speeds", "must be by rank, or a list")
    known = speeds if isinstance(speeds, Mapping) else dict(enumerate(speeds))
    if not _all_are(Integral, known) or min(known, default=0) < 0:
        raise ContractError("speeds", "the keys must be ranks, whole numbers from 0 on")
    if max(known, default=0) > LAST_RANK:
        raise ContractError("speeds", f"the keys must be ranks, at most {LAST_RANK}")
    if not _all_are(Real, known.values()):
        raise ContractError("speeds", "must be numbers (0 dead, 1 healthy)")
    for rank, speed in known.items():
        if speed != 0.0 and not 1.0 / MOST_SPEED <= speed <= MOST_SPEED:
            raise ContractError(
                "speeds", f"rank {rank}: {speed} is not a speed (0 dead, 1 healthy)"
            )
    return {int(rank): float(speed) for rank, speed in known.items()}  # from numpy scalars


def _all_are(kind: type, values: Iterable[object]) -> bool:
    return all(issubclass(found, kind) for found in set(map(type, values)))


def stage_times(
    job: Job,
    replica: Replica,
    speeds: Mapping[int, float],
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
) -> tuple[list[float], list[float]]:
    """Forward and backward time of one mean microbatch in each stage, in milliseconds."""
    last = len(replica.stages) - 1
    times = [
        _stage_cost(job, stage, speeds, links).stage(
            stage.layer_count, first=i == 0, last=i == last
        )
        for i, stage in enumerate(replica.stages)
    ]
    return [f for f, _ in times], [b for _, b in times]


def _stage_cost(
    job: Job, stage: Stage, speeds: Mapping[int, float], links: LinkSlowdowns
) -> GroupCost:
    values = [speeds.get(rank, 1.0) for rank in stage.ranks]
    slowdown = links.collective(stage.ranks)
    return group_cost(job, layer_cost(job), stage.shares, values, stage.ranks, slowdown)
