"""What resilience costs a loop while nothing happens: `python -m benchmarks.recovery_overhead`.

Two replicas train: of one process (beside torch's DDP), of two that shard the parameters (beside
HSDP of FSDP2), and of two pipeline stages (beside a pipeline with DDP in its stages). In turn the
processes make one step of the plain loop and one with `Replicas`, in each of its ways, so that
whatever else the machine does hits all of them. The plain loops sum gradients over the replicas
once a step, too. Figures are medians of the ratios within a turn: of the time of a step, and of the
processor time of all processes in it, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._overhead_loops import CASES, StepCost
from benchmarks._report import machine, print_table, write_json
from resihp.elastic.rendezvous.environment import Environment
from resihp.testing.local_ranks import LocalRanks

SKIPPED = 3


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    print(machine())
    found = {}
    for case in options.cases:
        taken = found[case] = measure(case, options.steps)
        rows = [
            [
                name,
                f"{statistics.median(step.ms for step in steps):.1f}",
                *(f"{ratio:.3f}x" for ratio in ratios(taken)[name]),
            ]
            for name, steps in taken.items()
        ]
        title = f"{case}: step of 2 replicas, {CASES[case][0]} processes"
        print_table(title, ["", "step ms", f"over {next(iter(taken))}", "processor"], rows)
        sys.stdout.flush()
    if options.json:
        write_json(
            options.json,
            {
                "ratios": {case: ratios(taken) for case, taken in found.items()},
                "step_ms": found,
            },
        )


def ratios(taken: dict[str, list[StepCost]]) -> dict[str, StepCost]:
    """Median over the turns of the ratios with the first loop, by loop."""
    plain = next(iter(taken.values()))
    pairs = {name: list(zip(steps, plain, strict=True)) for name, steps in taken.items()}
    return {
        name: StepCost(
            statistics.median(step.ms / base.ms for step, base in both),
            statistics.median(step.processor_ms / base.processor_ms for step, base in both),
        )
        for name, both in pairs.items()
    }


def measure(case: str, steps: int) -> dict[str, list[StepCost]]:
    """Cost of the steps by the way they were made: time of the first process, work of all."""
    with tempfile.TemporaryDirectory(prefix="resihp-overhead-") as name:
        folder = Path(name)
        with LocalRanks("overhead", folder) as processes:
            processes.start(range(CASES[case][0]), run_rank, folder, steps, case)
            assert set(processes.wait(600).values()) == {0}, processes.logs()
        ranks = range(CASES[case][0])
        told = [json.loads((folder / f"steps-{rank}.json").read_text()) for rank in ranks]
    return {
        name: [
            StepCost(of_ranks[0][0], sum(processor_ms for _, processor_ms in of_ranks))
            for of_ranks in zip(*(of_rank[name] for of_rank in told), strict=True)
        ]
        for name in told[0]
    }


def run_rank(rank: int, host: str, port: int, folder: Path, steps: int, case: str) -> None:
    """One process of both replicas' loops."""
    torch.set_num_threads(1)
    world, loops_of = CASES[case]
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("plain", dist.TCPStore(host, port)),
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=2),
    )

    def environments() -> Iterator[Environment]:
        for number in range(100):
            yield Environment(rank, world, host, port, f"loop{number}", False, False)

    loops = loops_of(rank, steps + SKIPPED, environments())
    taken: dict[str, list[StepCost]] = {name: [] for name in loops}
    for turn in zip(*loops.values(), strict=True):
        for name, step in zip(loops, turn, strict=True):
            taken[name].append(step)
    told = {name: steps[SKIPPED:] for name, steps in taken.items()}
    (folder / f"steps-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
