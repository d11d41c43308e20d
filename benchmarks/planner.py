"""Quality and speed of plans against the policies of other systems.

`python -m benchmarks.planner [--json PATH] [--seeds N] [--quick]`

A figure of 1.0 means that the job lost no more throughput than the fleet lost speed. It can be
above 1 where a plan also shortens the pipeline's filling and draining. Policies with a split
backward (recycle, joint-split) are compared with each other; all are relative to fault-free 1F1B.
joint-eager holds up to twice the activations; fault-free, eager 1F1B takes as long as 1F1B.
Times are those of the processor, so that others on the same machine do not count.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks._planner_cases import HEADS, ROWS, Row, faults, job_of, remaining
from benchmarks._report import machine, print_table, write_json
from resihp.contracts import Job, Layout
from scheduler import make_plan
from scheduler.policies import outcome_of

PEERS = ("nothing", "nvrx", "restart", "greyhound", "recycle", "oobleck", "malleus", "resihp-rule")
VARIANTS = ("joint-eager", "joint-split")  # our plans for other schedules
OURS = {name: "joint-split" if name == "recycle" else "joint" for name in PEERS}
SCALES = ((256, 8, 4, 256), (1024, 8, 4, 1024), (8192, 16, 8, 2048), (65536, 16, 8, 16384))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="every third row, two seeds")
    parser.add_argument(
        "--units", type=int, default=HEADS, help="of a share: heads, or KV groups (a 70B has 8)"
    )
    options = parser.parse_args()
    print(machine())
    rows = ROWS[::3] if options.quick else ROWS
    seeds = 2 if options.quick else options.seeds
    results = [_row(row, seeds, options.units) for row in rows]
    _print_quality(rows, results)
    _print_ratios(rows, results)
    scales = [_scale(*scale) for scale in SCALES]
    _print_scales(scales)
    if options.json:
        named = {str(row): result for row, result in zip(rows, results, strict=True)}
        write_json(options.json, {"rows": named, "scales": scales, "seeds": seeds})


def _row(row: Row, seeds: int, units: int) -> dict[str, Any]:
    """Fractions of the remaining speed and milliseconds, by policy and seed; and our gaps."""
    job = job_of(row.microbatches, units=units)
    healthy = outcome_of("nothing", job, {}).step_ms
    found: dict[str, Any] = {"fraction": {}, "ms": {}, "gap": [], "plan_ms": []}
    for seed in range(seeds):
        speeds = faults(256, row.slow, row.dead, seed)
        left = remaining(256, speeds)
        for name in (*PEERS, "joint-eager", "joint-split"):
            begin = time.process_time()
            step_ms = outcome_of(name, job, speeds).step_ms
            found["ms"].setdefault(name, []).append(1e3 * (time.process_time() - begin))
            found["fraction"].setdefault(name, []).append(healthy / step_ms / left)
        begin = time.process_time()
        plan = make_plan(job, speeds)
        found["ms"].setdefault("joint", []).append(1e3 * (time.process_time() - begin))
        found["fraction"].setdefault("joint", []).append(healthy / plan.step_ms / left)
        found["gap"].append(plan.gap)
    print(f"  {row}: {fmean(found['fraction']['joint']):.4f}", file=sys.stderr)
    return found


def _print_quality(rows: list[Row], results: list[dict[str, Any]]) -> None:
    names = (*PEERS, "joint", "joint-eager", "joint-split")
    table = []
    for row, result in zip(rows, results, strict=True):
        means = [f"{fmean(result['fraction'][name]):.3f}" for name in names]
        gap, took = fmean(result["gap"]), result["ms"]["joint"]
        table.append([row, *means, f"{gap:.2%}", f"{fmean(took):.0f}", f"{max(took):.0f}"])
    title = "Throughput over fault-free, divided by the remaining speed (256 devices, mean)"
    print_table(title, ["microbatches; slow, dead", *names, "gap", "cpu ms", "max"], table)


def _print_ratios(rows: list[Row], results: list[dict[str, Any]]) -> None:
    table = []
    for name in PEERS:
        ratios = [
            fmean(result["fraction"][OURS[name]]) / max(fmean(result["fraction"][name]), 1e-9)
            for result in results
        ]
        finite = [ratio for ratio in ratios if ratio < 1e6]
        mean = f"{float(np.exp(np.mean(np.log(finite)))):.3f}" if finite else "-"
        behind = [str(row) for row, r in zip(rows, ratios, strict=True) if r < 1.0]
        stopped = len(ratios) - len(finite)
        took = fmean(ms for result in results for ms in result["ms"][name])
        table.append(
            [
                name,
                OURS[name],
                mean,
                f"{min(ratios):.3f}",
                stopped,
                f"{took:.0f}",
                ", ".join(behind) or "none",
            ]
        )
    print_table(
        "Ours over each policy (geometric mean over the rows in which it runs)",
        [
            "policy",
            "against",
            "ratio",
            "least row",
            "stopped",
            "its cpu ms",
            "rows where we are behind",
        ],
        table,
    )


def _scale(devices: int, pp: int, tp: int, microbatches: int) -> dict[str, Any]:
    job = job_of(microbatches, dp=devices // (pp * tp), pp=pp, tp=tp)
    bad = round(0.03 * devices)
    speeds = faults(devices, bad - bad // 4, bad // 4, 0)
    took = []
    for _ in range(3):
        begin = time.process_time()
        plan = make_plan(job, speeds)
        took.append(time.process_time() - begin)
    fraction = _throughput(job) / plan.step_ms / remaining(devices, speeds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "devices": devices,
        "faulty": bad,
        "ms": 1e3 * min(took),
        "fraction": fraction,
        "gap": plan.gap,
        "peak_mib": peak,
    }


def _throughput(job: Job) -> float:
    """Fault-free step time of one replica, which all of them share."""
    single = Layout((job.layout.replicas[0],))
    alone = Job(
        name=job.name, layout=single, microbatches=job.quotas[0], cost=job.cost, links=job.links
    )
    return outcome_of("nothing", alone, {}).step_ms


def _print_scales(scales: list[dict[str, Any]]) -> None:
    table = [
        [
            s["devices"],
            s["faulty"],
            f"{s['ms']:.0f}",
            f"{s['fraction']:.3f}",
            f"{s['gap']:.2%}",
            f"{s['peak_mib']:.0f}",
        ]
        for s in scales
    ]
    columns = ["devices", "faulty", "cpu ms (best of 3)", "fraction", "gap", "peak MiB"]
    print_table("Planning time, 3% of the devices faulty (a quarter of them dead)", columns, table)


if __name__ == "__main__":
    main()
