"""State that plans move: the quickest plan next to the one of its front that moves least."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks._planner_cases import HEADS, Row, faults, job_of
from benchmarks._report import print_table
from resihp.contracts import Job, Layout, Memory
from scheduler import make_plan, migration_ms, model_preset, plan_front
from scheduler.migration import NO_STATE, StateBytes, overlap, rank_states, received_bytes

SHAPE = replace(model_preset("llama-2-70b"), kv_heads=HEADS)

# 80 GB, of which 4 GB stay free; otherwise as in `_planner_cases`, with the weights by their number
MEMORY = Memory(
    budget_bytes=76_000_000_000,
    sharded_optimizer=True,
    activation_bytes_per_layer=34 * 4096 * SHAPE.hidden,
)
STARTS = ("initial layout", "layout planned without a fault")


@dataclass
class Moves:
    """Figures of a row, by seed: gigabytes, milliseconds, and the fraction of the step given up.

    scattered_gb  what the front's plans would move at least if shares need not be contiguous
    """

    quickest_gb: list[float] = field(default_factory=list)
    least_gb: list[float] = field(default_factory=list)
    scattered_gb: list[float] = field(default_factory=list)
    quickest_ms: list[float] = field(default_factory=list)
    least_ms: list[float] = field(default_factory=list)
    given_up: list[float] = field(default_factory=list)
    plan_cpu_ms: list[float] = field(default_factory=list)
    front_cpu_ms: list[float] = field(default_factory=list)

    @property
    def fewer(self) -> float:
        """Bytes of the quickest plan over those of the one that moves least."""
        return sum(self.quickest_gb) / max(sum(self.least_gb), 1e-3)

    @property
    def fewer_scattered(self) -> float:
        """The same for shares that need not be contiguous."""
        return sum(self.quickest_gb) / max(sum(self.scattered_gb), 1e-3)

    @property
    def shorter(self) -> float:
        """The same for the times of the migrations."""
        return sum(self.quickest_ms) / max(sum(self.least_ms), 1e-3)


def print_moves(rows: Sequence[Row], seeds: int) -> dict[str, Any]:
    """Print a table for each layout in which the faults find the job; returns its figures."""
    figures: dict[str, Any] = {}
    for start in STARTS:
        found = [_moves(row, seeds, start) for row in rows]
        table = [[row, *_cells(moves)] for row, moves in zip(rows, found, strict=True)]
        columns = ["microbatches; slow, dead", "quickest GB", "least GB", "fewer"]
        columns += ["quickest s", "least s", "step given up", "most", "cpu ms", "front"]
        print_table(f"State moved from the {start} (70B, 14 bytes a parameter)", columns, table)
        fewer, shorter, scattered = (
            geometric_mean(getattr(m, f) for m in found)
            for f in ("fewer", "shorter", "fewer_scattered")
        )
        most = max(up for moves in found for up in moves.given_up)
        cpu = geometric_mean(fmean(m.front_cpu_ms) / fmean(m.plan_cpu_ms) for m in found)
        print(
            f"{fewer:.2f}x fewer bytes, {shorter:.2f}x shorter migration (geometric mean of the "
            f"rows), at most {most:.2%} of a step given up; the front takes {cpu:.1f} times the "
            f"processor time of the quickest plan. If a rank could hold any units of a layer, the "
            f"plans of the fronts would move {scattered:.2f}x fewer bytes"
        )
        figures[start] = {str(row): asdict(m) for row, m in zip(rows, found, strict=True)}
    return figures


def _cells(moves: Moves) -> list[str]:
    means = [fmean(values) for values in (moves.quickest_gb, moves.least_gb)]
    times = [fmean(values) / 1e3 for values in (moves.quickest_ms, moves.least_ms)]
    spent = [fmean(values) for values in (moves.plan_cpu_ms, moves.front_cpu_ms)]
    return [
        *(f"{mean:.0f}" for mean in means),
        f"{moves.fewer:.2f}x",
        *(f"{seconds:.2f}" for seconds in times),
        f"{fmean(moves.given_up):.2%}",
        f"{max(moves.given_up):.2%}",
        *(f"{ms:.0f}" for ms in spent),
    ]


def _moves(row: Row, seeds: int, start: str) -> Moves:
    job = replace(job_of(row.microbatches), model=SHAPE, memory=MEMORY)
    layout = job.layout if start == STARTS[0] else make_plan(job, {}).layout
    moves = Moves()
    for seed in range(seeds):
        _add(moves, job, layout, faults(256, row.slow, row.dead, seed))
    return moves


def _add(moves: Moves, job: Job, layout: Layout, speeds: dict[int, float]) -> None:
    begin = time.process_time()
    quickest = make_plan(job, speeds, layout)
    planned = time.process_time()
    front = plan_front(job, speeds, layout)
    least = front[-1]
    moves.plan_cpu_ms.append(1e3 * (planned - begin))
    moves.front_cpu_ms.append(1e3 * (time.process_time() - planned))
    moves.quickest_gb.append(sum(received_bytes(job, layout, quickest.layout).values()) / 1e9)
    moves.least_gb.append(least.total_bytes / 1e9)
    moves.scattered_gb.append(min(_scattered(job, layout, o.plan.layout) for o in front) / 1e9)
    moves.quickest_ms.append(migration_ms(job, layout, quickest.layout))
    moves.least_ms.append(least.migration_ms)
    moves.given_up.append(max(0.0, least.plan.step_ms / quickest.step_ms - 1.0))


def _scattered(job: Job, old: Layout, new: Layout) -> float:
    """Bytes that all ranks receive if each keeps as many units of a layer as both layouts give it,
    wherever in the layer these lie."""
    sizes, before, total = StateBytes.of(job), dict(rank_states(old)), 0.0
    assert sizes is not None
    for rank, held in rank_states(new):
        had = before.get(rank, NO_STATE)
        width, past = (state.part[1] - state.part[0] for state in (held, had))
        kept = min(width, past)
        layers = sum(stop - start for start, stop in held.chunks)
        same = sum(overlap(a, b) for a in held.chunks for b in had.chunks)
        ends = held.first + held.last
        same_ends = (held.first and had.first) + (held.last and had.last)
        total += sizes.layer * (layers * width - same * kept)
        total += sizes.embedding * (ends * width - same_ends * kept)
    return total
