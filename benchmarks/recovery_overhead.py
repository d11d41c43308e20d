"""What resilience costs a loop while nothing happens: `python -m benchmarks.recovery_overhead`.

Two replicas train: of one process (beside torch's DDP), of two that shard the parameters (beside
HSDP of FSDP2), and of two pipeline stages (beside a pipeline with DDP in its stages). In turn the
processes make one step of the plain loop and one with `Replicas`, in each of its ways, so that
whatever else the machine does hits all of them. The plain loops sum gradients over the replicas
once a step, too. Figures are medians of the ratios within a turn.
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

from benchmarks._overhead_loops import CASES
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
            [name, f"{statistics.median(ms):.1f}", f"{ratio:.3f}x"]
            for (name, ms), ratio in zip(taken.items(), ratios(taken).values(), strict=True)
        ]
        title = f"{case}: step of 2 replicas, {CASES[case][0]} processes"
        print_table(title, ["", "step ms", f"over {next(iter(taken))}"], rows)
        sys.stdout.flush()
    if options.json:
        write_json(
            options.json,
            {
                "ratios": {case: ratios(taken) for case, taken in found.items()},
                "step_ms": found,
            },
        )


def ratios(taken: dict[str, list[float]]) -> dict[str, float]:
    """Median over the turns of the ratio with the first loop, by loop."""
    plain = next(iter(taken.values()))
    return {
        name: statistics.median(a / b for a, b in zip(ms, plain, strict=True))
        for name, ms in taken.items()
    }


def measure(case: str, steps: int) -> dict[str, list[float]]:
    """Milliseconds of the first process's steps, by the way they were made."""
    with tempfile.TemporaryDirectory(prefix="resihp-overhead-") as name:
        folder = Path(name)
        with LocalRanks("overhead", folder) as processes:
            processes.start(range(CASES[case][0]), run_rank, folder, steps, case)
            assert set(processes.wait(600).values()) == {0}, processes.logs()
        told: dict[str, list[float]] = json.loads((folder / "steps-0.json").read_text())
    return told


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
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for turn in zip(*loops.values(), strict=True):
        for name, ms in zip(loops, turn, strict=True):
            taken[name].append(ms)
    told = {name: ms[SKIPPED:] for name, ms in taken.items()}
    (folder / f"steps-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
