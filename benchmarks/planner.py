"""Quality and speed of plans compared with policies of other systems.

`python -m benchmarks.planner [--json PATH] [--seeds N] [--quick] [--part PART]`

A figure of 1.0 means that the job lost no more throughput than the devices lost speed, relative to
the initial job: fault-free, 1F1B. It exceeds 1 if a plan also shortens warm-up and drain of the
pipelines. `own` is stricter: relative to the best plan without a fault.

The first table is the default: a job that permits no schedules explicitly and describes its memory
gets plans for 1F1B or eager 1F1B, whichever fits and is faster. The others permit 1F1B only, and a
split backward as well. Ratios are given twice: with the same choice of schedules for every policy,
of which it takes the best; and with the published schedule, which is 1F1B for all but ReCycle.
ReCycle splits the backward by definition and is compared where that is permitted. Only this
scheduler respects the memory budget; ResiHP's rule does where it shrinks groups and re-routes.
Adaptra and Greyhound's exchange of nodes matter for slow links only. Times are processor times.

The tables of moved state compare, for the same faults, the quickest plan with the plan of its front
that moves least and gives up 1% of the step at most: gigabytes of all ranks, and seconds over the
link of the rank that receives most.

The part `links` slows one link between stages, in a tensor-parallel group or between hosts of small
jobs, and compares the initial layout, the plan of a planner that does not know the link, the plan
made for it, and the best of all plans; then a link that every plan crosses, with the orders of
passes that hide it.

The part `steps` tells how much time all others lose to one slow device, and what each dimension in
which ResiHP's rule and this scheduler adapt adds.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks._planner_cases import HEADS, PEERS, PERMITTED, ROWS, Row, faults, job_of, remaining
from benchmarks._planner_links import print_links, print_orders
from benchmarks._planner_moves import print_moves
from benchmarks._planner_sequences import print_sequences
from benchmarks._planner_steps import print_ablation, print_amplification
from benchmarks._planner_tables import Result, Scale, print_quality, print_ratios, print_scales
from benchmarks._report import machine, write_json
from resihp.contracts import Job, Layout
from scheduler import make_plan, policy_outcome

SCALES = ((256, 8, 4, 256), (1024, 8, 4, 1024), (8192, 16, 8, 2048), (65536, 16, 8, 16384))


PARTS = ("rows", "scales", "moves", "sequences", "links", "steps")


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="every third row, two seeds")
    parser.add_argument(
        "--units", type=int, default=HEADS, help="of a share: heads, or KV groups (a 70B has 8)"
    )
    parser.add_argument("--part", choices=PARTS, help="run nothing else")
    options = parser.parse_args()
    print(machine())
    rows = ROWS[::3] if options.quick else ROWS
    seeds = 2 if options.quick else options.seeds
    run: dict[str, Callable[[], Any]] = {
        "rows": lambda: _rows(rows, seeds, options.units),
        "scales": _scales,
        "moves": lambda: print_moves(rows, seeds),
        "sequences": lambda: print_sequences(seeds),
        "links": lambda: {"placed": print_links(seeds), "crossed": print_orders()},
        "steps": lambda: {"one slow": print_amplification(), "ablation": print_ablation(seeds)},
    }
    figures = {part: run[part]() for part in ([options.part] if options.part else PARTS)}
    if options.json:
        write_json(options.json, {**figures, "seeds": seeds})


def _rows(rows: Sequence[Row], seeds: int, units: int) -> dict[str, Any]:
    """Print the tables of all policies; return the results by permitted schedules and row."""
    found = {}
    for permitted in PERMITTED:
        found[permitted] = [_row(row, permitted, seeds, units) for row in rows]
        print_quality(permitted, rows, found[permitted])
    for permitted in PERMITTED:
        print_ratios(permitted, rows, found[permitted], found["1F1B alone"])
    return {
        permitted: {str(row): result.json() for row, result in zip(rows, results, strict=True)}
        for permitted, results in found.items()
    }


def _scales() -> list[dict[str, Any]]:
    scales = [_scale(*scale) for scale in SCALES]
    print_scales(scales)
    return [scale.json() for scale in scales]


def _row(row: Row, permitted: str, seeds: int, units: int) -> Result:
    """Results of all policies under the faults of a row, for every seed."""
    job = job_of(row.microbatches, units=units, schedules=PERMITTED[permitted])
    started_ms = policy_outcome("nothing", replace(job, schedules=(job.schedule,)), {}).step_ms
    own_ms = make_plan(job, {}).step_ms
    fractions: dict[str, list[float]] = {name: [] for name in (*PEERS, "joint", "own")}
    took: dict[str, list[float]] = {name: [] for name in (*PEERS, "joint")}
    gaps, schedules = [], Counter[str]()
    for seed in range(seeds):
        speeds = faults(256, row.slow, row.dead, seed)
        left = remaining(256, speeds)
        for name in PEERS:
            begin = time.process_time()
            step_ms = policy_outcome(name, job, speeds).step_ms
            took[name].append(1e3 * (time.process_time() - begin))
            fractions[name].append(started_ms / step_ms / left)
        begin = time.process_time()
        plan = make_plan(job, speeds)
        took["joint"].append(1e3 * (time.process_time() - begin))
        fractions["joint"].append(started_ms / plan.step_ms / left)
        fractions["own"].append(own_ms / plan.step_ms / left)
        gaps.append(plan.gap)
        schedules[plan.schedule.value] += 1
    print(f"  {permitted} {row}: {fmean(fractions['joint']):.4f}", file=sys.stderr)
    return Result(fractions, took, gaps, schedules)


def _scale(devices: int, pp: int, tp: int, microbatches: int) -> Scale:
    job = job_of(microbatches, dp=devices // (pp * tp), pp=pp, tp=tp)
    bad = round(0.03 * devices)
    speeds = faults(devices, bad - bad // 4, bad // 4, 0)
    took = []
    for _ in range(5):
        begin = time.process_time()
        plan = make_plan(job, speeds)
        took.append(1e3 * (time.process_time() - begin))
    fraction = _fault_free_ms(job) / plan.step_ms / remaining(devices, speeds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Scale(devices, bad, min(took), max(took), fraction, plan.gap, peak)


def _fault_free_ms(job: Job) -> float:
    """Fault-free step time, from one replica."""
    single = Layout((job.layout.replicas[0],))
    alone = Job(
        name=job.name, layout=single, microbatches=job.quotas[0], cost=job.cost, links=job.links
    )
    return policy_outcome("nothing", alone, {}).step_ms


if __name__ == "__main__":
    main()
