"""The detector on recorded and generated jobs, beside what others would say of the same records.

    python -m benchmarks.detector [--trials N] [--json PATH] [--quick] [--parts PART ...]
                                  [--demo TRACE ...]

Recorded jobs are read from RESIHP_TRACES or ../shared/traces; without them only generated jobs run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import _detector_cases as cases
from benchmarks._detector_alive import COLUMNS as ALIVE
from benchmarks._detector_alive import FIXED, RANKS, alive_rows
from benchmarks._detector_cost import ERRORS, predictor_rows, throughput_rows
from benchmarks._detector_links import LinkTally, group_trials, link_trials
from benchmarks._detector_oracle import COLUMNS as POSSIBLE
from benchmarks._detector_oracle import oracle_rows
from benchmarks._detector_peers import peer_trials
from benchmarks._detector_replicas import replica_rows
from benchmarks._detector_step_times import COSTS, cost_rows
from benchmarks._detector_step_times import ERRORS as STEP_ERRORS
from benchmarks._detector_step_times import error_rows as step_error_rows
from benchmarks._instrument_cells import COLUMNS as LOOPS
from benchmarks._instrument_cells import cells, recorded_cells, row
from benchmarks._report import machine, print_table, write_json
from resihp.testing.scenarios import Noise, Surge

FACTORS = (1.03, 1.05, 1.10, 1.2, 1.5, 2.0)
Figures = dict[str, Any]


def record_table(figures: Figures, title: str, columns: tuple[str, ...], rows: list[Any]) -> None:
    """Prints a table and keeps it for the file."""
    print_table(title, columns, rows)
    figures[title] = [dict(zip(columns, row, strict=True)) for row in rows]


def recorded_jobs(figures: Figures, trials: int, clean_steps: int) -> None:
    """The traces: injections, clean runs, and the peers on the same data."""
    from resihp.offline import read_trace

    for name in ("SE", "ST"):
        path = cases.trace_path(name)
        if path is None:
            print(f"\ntrace {name} is not here: set RESIHP_TRACES to its folder")
            continue
        trace = read_trace(path)
        batches = list(trace.batches())
        rows, peers = [], []
        for factor in FACTORS:
            tally = cases.trace_trials(trace.job, batches, factor, trials)
            rows.append([f"{factor:.2f}x", str(trials), *tally.row()])
            found = peer_trials(trace.job, batches, factor, trials)
            peers += [
                [
                    f"{factor:.2f}x {peer}",
                    f"{told.found / trials:.1%}",
                    f"{told.wrong / trials:.2f}",
                ]
                for peer, told in found.items()
            ]
        clean = cases.clean_trace(trace.job, batches, clean_steps)
        record_table(figures, f"{name}: one device slowed from a random step", cases.COLUMNS, rows)
        record_table(figures, f"{name}: peers", ("case", "found ≤8", "wrong names a trial"), peers)
        row = [name, f"{clean.device_steps:,}", str(clean.wrong), str(clean.inconclusive)]
        columns = ("clean", "device-steps", "wrong names", "inconclusive")
        record_table(figures, f"{name}: nothing injected", columns, [row])


def recorded_limits(figures: Figures, trials: int) -> None:
    """What the best possible test would find in the traces."""
    from resihp.offline import read_trace

    rows = []
    for name in ("SE", "ST"):
        path = cases.trace_path(name)
        if path is not None:
            trace = read_trace(path)
            rows += oracle_rows(name, trace.job, list(trace.batches()), FACTORS[:3], trials)
    record_table(figures, "recorded jobs, over ranks and onsets", POSSIBLE, rows)


def generated_cases(trials: int) -> list[tuple[str, Callable[[], cases.Tally]]]:
    """Every generated case by name."""
    job = cases.job_of
    run = partial(cases.generated_trials, trials=trials)
    found: list[tuple[str, Callable[[], cases.Tally]]] = []
    for dp, pp, tp in ((16, 1, 1), (8, 2, 1), (4, 2, 2)):
        for factor in (1.03, 1.05, 1.10):
            name = f"DP{dp} PP{pp} TP{tp}, {factor:.2f}x"
            found.append((name, partial(run, job(dp, pp, tp), factor)))
    usual = partial(run, job(8, 2, 1))
    pair = partial(run, job(2, 2, 1))
    return [
        *found,
        ("coupled TP2 with waits, 1.10x", partial(run, job(4, 2, 2), 1.1, coupled=True)),
        ("no lengths, DP4 PP4, 1.05x", partial(run, job(4, 4, 1), 1.05, with_lengths=False)),
        ("one microbatch a step, DP16 PP1, 1.10x", partial(run, job(16, 1, 1, per_replica=1), 1.1)),
        ("two devices at once, 1.10x", partial(usual, 1.1, devices=2)),
        ("from the first step, 1.08x", partial(usual, 1.08, make=cases.from_the_start)),
        ("of a pair, from the first step, 1.20x", partial(pair, 1.2, make=cases.from_the_start)),
        ("gradual over 10 steps, 1.10x", partial(usual, 1.1, make=cases.gradual)),
        ("on and off by 4 steps, 1.10x", partial(usual, 1.1, make=cases.on_off)),
        ("every other step, 1.10x", partial(usual, 1.1, make=cases.every_other)),
    ]


def generated_jobs(figures: Figures, trials: int, clean_steps: int) -> None:
    """Jobs with lengths, faults of every kind, links, and clean runs."""
    rows = [[name, str(trials), *run().row()] for name, run in generated_cases(trials)]
    record_table(figures, "generated jobs, lengths of real text", cases.COLUMNS, rows)
    clean = []
    for shape, rate in (((16, 1, 1), 0.0), ((4, 2, 2), 0.0), ((4, 2, 2), 0.005)):
        jobs = max(1, clean_steps // (16 * 60 * 2))
        noise = Noise(hiccups=rate)
        tally = cases.generated_trials(cases.job_of(*shape), 0.0, jobs, steps=60, noise=noise)
        name = f"DP{shape[0]} PP{shape[1]} TP{shape[2]}"
        name += f", hiccups in {rate:.1%} of device-steps" if rate else ""
        clean.append([name, f"{tally.device_steps:,}", str(tally.wrong), str(tally.inconclusive)])
    noisy = Noise(step=0.2)
    for dp in (2, 3, 4):
        job = cases.job_of(dp, 1, 1, per_replica=1)
        jobs = max(1, clean_steps // (dp * 60 * 2))
        tally = cases.generated_trials(job, 0.0, jobs, steps=60, noise=noisy)
        name = f"DP{dp}, one a step, times that differ by 20% from step to step"
        clean.append([name, f"{tally.device_steps:,}", str(tally.wrong), str(tally.inconclusive)])
    for per_replica in (1, 4):
        job = cases.job_of(16, 1, 1, per_replica=per_replica)
        jobs = max(1, clean_steps // (16 * 600))
        tally = cases.generated_trials(job, 0.0, jobs, steps=600, noise=Noise(delays=0.05))
        name = f"DP16, {per_replica} a step, passes delayed by 5% on average, 600 steps"
        clean.append([name, f"{tally.device_steps:,}", str(tally.wrong), str(tally.inconclusive)])
    longer = Surge(replica=1, factor=20.0, from_step=30, longer=True)
    for dp, pp, per_replica in ((4, 2, 8), (2, 2, 8), (4, 1, 1)):
        job = cases.job_of(dp, pp, 1, per_replica=per_replica)
        jobs = max(1, clean_steps // (len(job.layout.ranks) * 60 * 2))
        tally = cases.generated_trials(job, 0.0, jobs, steps=60, surges=[longer])
        name = f"DP{dp} PP{pp} TP1, {per_replica} a step, a replica's documents 20 times as long"
        clean.append([name, f"{tally.device_steps:,}", str(tally.wrong), str(tally.inconclusive)])
    columns = ("clean", "device-steps", "wrong names", "inconclusive")
    record_table(figures, "generated jobs, nothing injected", columns, clean)


def links_and_replicas(figures: Figures, trials: int) -> None:
    """What must be told from a slow device."""
    rows = [link_row(name, run(), trials) for name, run in link_cases(trials)]
    names = ("slow link", "trials", "≤5 steps", "≤8", "ever", "wrong links", "wrong devices")
    record_table(figures, "slow links", names, rows)
    kinds = ("without lengths", "runs", "with a wrong name", "inconclusive in the end")
    record_table(figures, "a whole replica slower by 1.03 to 2", kinds, replica_rows(trials // 10))


def link_cases(trials: int) -> list[tuple[str, Callable[[], LinkTally]]]:
    """Every case of a slow link by name."""
    between = [(f"{f:.1f}x", partial(link_trials, f, trials)) for f in (1.2, 1.5, 3.0)]
    within = [(f"in a TP group, {f:.1f}x", partial(group_trials, f, trials)) for f in (1.5, 2.0)]
    devices = [
        (f"a device between links, {f:.1f}x", partial(link_trials, f, trials, device=True))
        for f in (1.3, 3.0)
    ]
    blocking = partial(link_trials, 1.3, trials, device=True, blocking=True)
    device = ("a device of a TP group, 1.2x", partial(group_trials, 1.2, trials, device=True))
    waits = ("a device between links whose senders wait, 1.3x", blocking)
    return [*between, *within, *devices, waits, device]


def link_row(name: str, tally: LinkTally, trials: int) -> list[str]:
    """A line of the table."""
    within = [
        sum(d is not None and d <= limit for d in tally.delays) / trials for limit in (5, 8, 10**6)
    ]
    wrong = [str(tally.wrong_links), str(tally.wrong_devices)]
    return [name, str(trials), *(f"{w:.1%}" for w in within), *wrong]


def costs(figures: Figures, ranks: int) -> None:
    """The predictor's error, and records per second."""
    record_table(figures, "error on held-out records", ERRORS, predictor_rows())
    names = ("throughput", "ranks", "records/s", "µs a record", "of a core at 64 records in 10 s")
    record_table(figures, "one detector, one core", names, throughput_rows(ranks))


def fail_stop(figures: Figures, trials: int) -> None:
    """Ranks that die, by the silence of their heartbeats."""
    title = f"fail-stop, {RANKS} ranks for half an hour, {trials} times; fixed time-outs of {FIXED}"
    record_table(figures, title, ALIVE, list(alive_rows(trials)))


def ordinary_loops(figures: Figures) -> None:
    """Loops under `resihp.instrument`, as `benchmarks.instrument` recorded them: noisy times."""
    recordings = Path(__file__).parents[1] / "tests" / "detector"
    for name, where in (
        ("ordinary_loops", ""),
        ("ordinary_loops_under_load", ", beside two busy loops on two cores"),
    ):
        found = recorded_cells(cells(quick=False), recordings / name)
        rows = [list(row(cell, runs, recordings / name)) for cell, runs in found]
        record_table(figures, f"ordinary loops of four ranks, recorded{where}", LOOPS, rows)


def step_times(figures: Figures, demos: list[Path]) -> None:
    """Error and cost of the expected time of a step."""
    if not demos:
        print(
            "\nno recording of the demo: make one with `resihp demo --trace PATH`, give --demo PATH"
        )
    title = "expected times of recorded steps, relative error"
    record_table(figures, title, STEP_ERRORS, step_error_rows(demos))
    record_table(figures, "one expected time, one core", COSTS, cost_rows())


PARTS = ("recorded", "limits", "generated", "loops", "links", "alive", "steps", "costs")


def main() -> None:
    """Runs everything and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=60, help="of every case")
    parser.add_argument("--clean-steps", type=int, default=80_000, help="clean device-steps")
    parser.add_argument("--quick", action="store_true", help="few trials and a smaller job")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--demo", metavar="TRACE", nargs="+", type=Path, default=[], help="recordings of the demo"
    )
    parser.add_argument("--json", metavar="PATH")
    options = parser.parse_args()
    trials = 5 if options.quick else options.trials
    clean_steps = 5_000 if options.quick else options.clean_steps
    figures: Figures = {}
    print(machine())
    run: dict[str, Callable[[], None]] = {
        "recorded": partial(recorded_jobs, figures, trials, clean_steps),
        "limits": partial(recorded_limits, figures, trials),
        "generated": partial(generated_jobs, figures, trials, clean_steps),
        "loops": partial(ordinary_loops, figures),
        "links": partial(links_and_replicas, figures, trials),
        "alive": partial(fail_stop, figures, max(1, trials // 10)),
        "steps": partial(step_times, figures, options.demo),
        "costs": partial(costs, figures, 1_024 if options.quick else 16_384),
    }
    for part in options.parts:
        run[part]()
    if options.json:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
