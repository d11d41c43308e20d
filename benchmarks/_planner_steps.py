"""Effect of one slow device on all others, and of each dimension in which a plan adapts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import Any

from benchmarks._planner_cases import Row, faults, job_of, remaining
from benchmarks._report import print_table
from resihp.contracts import Job, Layout, Schedule, Stage, even_quotas
from scheduler import make_plan, policy_outcome, simulate
from scheduler.cost_model import transfer_ms
from scheduler.memory import MemoryFootprint
from scheduler.policies.base import with_layers
from scheduler.policies.resihp_rule import resihp_rule
from scheduler.search.arrangements import initial_chains
from scheduler.search.chains import Chain, SearchSetting
from scheduler.search.quotas import ChainEvaluator, divide
from scheduler.search.tp_groups import GroupTable
from scheduler.step_time import ReplicaTimes

ONE_F_ONE_B = (Schedule.ONE_F_ONE_B,)
FACTORS = (1.2, 1.5, 2.0, 4.0)
ROWS = [Row(m, *bad) for m in (64, 256) for bad in ((1, 0), (16, 0), (0, 8), (16, 8))]
Speeds = dict[int, float]


def print_amplification() -> list[dict[str, Any]]:
    """Print how much time all others lose to one slow device; returns the figures.

    The others have as much to compute as before, so that each of them waits as much longer as the
    step takes longer.
    """
    found = [_amplified(microbatches, factor) for microbatches in (64, 256) for factor in FACTORS]
    columns = ("each other waits", "idle s per s", "devices lost", "with the plan")
    print_table(
        "One slow device of 256 in the initial layout, 1F1B: waiting of each other device, as a "
        "part of the step; of all, per second that the slow one computes longer",
        ("microbatches; slow by", *columns),
        [
            (
                f"{one['microbatches']}; {one['factor']:g}x",
                f"{one['waits']:.1%}",
                f"{one['amplification']:.0f}",
                f"{one['lost']:.1f}",
                f"{one['lost with the plan']:.1f}",
            )
            for one in found
        ],
    )
    return found


def _amplified(microbatches: int, factor: float) -> dict[str, float]:
    job = job_of(microbatches, schedules=ONE_F_ONE_B)
    slow = job.layout.replicas[3].stages[4].ranks[1]
    usual, slowed = (simulate(job, job.layout, speeds=s) for s in ({}, {slow: 1.0 / factor}))
    passes = [p for p in usual.passes if (p.replica, p.stage) == (3, 4)]
    own_ms = (factor - 1.0) * sum(p.end_ms - p.start_ms for p in passes)
    longer_ms, devices = slowed.step_ms - usual.step_ms, len(job.layout.ranks)
    plan_ms = make_plan(job, {slow: 1.0 / factor}).step_ms
    return {
        "microbatches": microbatches,
        "factor": factor,
        "waits": longer_ms / slowed.step_ms,
        "amplification": (devices - 1) * longer_ms / own_ms,
        "lost": devices * longer_ms / slowed.step_ms,
        "lost with the plan": devices * (1.0 - usual.step_ms / plan_ms),
    }


def print_ablation(seeds: int) -> dict[str, Any]:
    """Print what each step of ResiHP's rule and of this scheduler adds; returns the figures."""
    columns: dict[str, Callable[[Job, Speeds], float]] = {
        "nothing": lambda job, speeds: policy_outcome("nothing", job, speeds).step_ms,
        "rule: TP": lambda job, speeds: resihp_rule(job, speeds, 1).step_ms,
        "+ PP": lambda job, speeds: resihp_rule(job, speeds, 2).step_ms,
        "+ DP": lambda job, speeds: resihp_rule(job, speeds, 3).step_ms,
        "ours: shares": lambda job, speeds: _ours(job, speeds)[0],
        "+ layers": lambda job, speeds: _ours(job, speeds)[1],
        "+ quotas": lambda job, speeds: _ours(job, speeds)[2],
        "+ places": lambda job, speeds: make_plan(job, speeds).step_ms,
        "+ order": lambda job, speeds: make_plan(replace(job, schedules=()), speeds).step_ms,
    }
    figures = {}
    for row in ROWS:
        job = job_of(row.microbatches, schedules=ONE_F_ONE_B)
        healthy_ms = policy_outcome("nothing", job, {}).step_ms
        known = [faults(256, row.slow, row.dead, seed) for seed in range(seeds)]
        figures[str(row)] = {
            name: fmean(healthy_ms / step_ms(job, s) / remaining(256, s) for s in known)
            for name, step_ms in columns.items()
        }
    print_table(
        f"Steps one after the other, 1F1B: fraction of the remaining speed (mean of {seeds} seeds)",
        ("microbatches; slow, dead", *columns),
        [(row, *(f"{value:.3f}" for value in found.values())) for row, found in figures.items()],
    )
    return figures


def _ours(job: Job, speeds: Speeds) -> tuple[float, float, float]:
    """Step time with shares by speed, then the best layers, then the best quotas.

    Without new layers a replica that has lost a whole group is left out.
    """
    groups, chains, _ = initial_chains(job, job.layout, speeds, even=False, folds=0)
    shape = [stage.layer_count for stage in job.layout.replicas[0].stages]
    stages = [[Stage(groups[g].ranks, (0, 0), groups[g].shares) for g in c] for c in chains]
    whole = [with_layers(row, shape) for row in stages if len(row) == len(shape)]
    shares_ms = _even_ms(job, Layout(tuple(whole)), speeds) if whole else inf
    evaluator = ChainEvaluator(
        SearchSetting(
            GroupTable.of(groups),
            MemoryFootprint.of(job, len(chains)),
            job.layout.layers,
            job.microbatches,
            transfer_ms(job),
            job.max_in_flight,
            Schedule.ONE_F_ONE_B,
        )
    )
    return shares_ms, _even_layers_ms(evaluator, chains), divide(evaluator, chains).makespan_ms


def _even_ms(job: Job, layout: Layout, speeds: Speeds) -> float:
    quotas = even_quotas(job.microbatches, layout.dp)
    return ReplicaTimes(job, layout.replicas, Schedule.ONE_F_ONE_B, speeds).step_ms(quotas)


def _even_layers_ms(evaluator: ChainEvaluator, chains: Sequence[Chain]) -> float:
    quotas = even_quotas(evaluator.setting.microbatches, len(chains))
    return max(evaluator.best(c, quota)[1] for c, quota in zip(chains, quotas, strict=True))
