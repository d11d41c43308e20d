"""What resilience costs a DDP loop while nothing happens: `python -m benchmarks.recovery_overhead`.

Two processes train a replica each. In turn they make one step with torch's DDP (which sums once a
step: `no_sync` but for the last microbatch) and one with `Replicas`, in its three ways, so that
whatever else the machine does hits all of them. Figures are medians of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks._report import machine, print_table, write_json
from resihp.elastic.ddp.replicas import Replicas
from resihp.elastic.ddp.step import Step
from resihp.elastic.rendezvous.environment import Environment
from resihp.testing.local_ranks import LocalRanks

WORLD, WIDTH, LAYERS, ROWS, SHARE = 2, 768, 12, 96, 2
"""Processes, then the model (7 million parameters), rows of a microbatch, microbatches of each."""

SKIPPED = 3
WAYS: dict[str, dict[str, Any]] = {
    "resilient": {},
    "no overlap": {"overlap": False},
    "fixed order": {"deterministic": True},
}


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    taken = measure(options.steps)
    plain = taken["DDP"]
    ratios = {
        name: statistics.median(a / b for a, b in zip(ms, plain, strict=True))
        for name, ms in taken.items()
    }
    rows = [
        [name, f"{statistics.median(ms):.1f}", f"{ratios[name]:.3f}x"] for name, ms in taken.items()
    ]
    print(machine())
    print_table("Step of 2 replicas, one process each", ["", "step ms", "over DDP"], rows)
    if options.json:
        write_json(options.json, {"ratios": ratios, "step_ms": taken})


def measure(steps: int) -> dict[str, list[float]]:
    """Milliseconds of the first process's steps, by the way they were made."""
    with tempfile.TemporaryDirectory(prefix="resihp-overhead-") as name:
        folder = Path(name)
        with LocalRanks("overhead", folder) as processes:
            processes.start(range(WORLD), run_rank, folder, steps)
            assert set(processes.wait(600).values()) == {0}, processes.logs()
        told: dict[str, list[float]] = json.loads((folder / "steps-0.json").read_text())
    return told


def run_rank(rank: int, host: str, port: int, folder: Path, steps: int) -> None:
    """One replica."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("ddp", dist.TCPStore(host, port)),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(minutes=2),
    )
    loops: dict[str, Iterator[float]] = {"DDP": _plain(rank, steps + SKIPPED)}
    for name, options in WAYS.items():
        environment = Environment(rank, WORLD, host, port, name, False, False)
        loops[name] = _resilient(environment, steps + SKIPPED, options)
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for turn in zip(*loops.values(), strict=True):
        for name, ms in zip(loops, turn, strict=True):
            taken[name].append(ms)
    told = {name: ms[SKIPPED:] for name, ms in taken.items()}
    (folder / f"steps-{rank}.json").write_text(json.dumps(told))


def _plain(rank: int, steps: int) -> Iterator[float]:
    """DDP as its documentation shows it for gradient accumulation."""
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        with _Timer() as timer:
            for done in range(SHARE):
                with model.no_sync() if done + 1 < SHARE else nullcontext():
                    loss_of(model, step, rank * SHARE + done).backward()
            optimizer.step()
            optimizer.zero_grad()
        yield timer.ms


def _resilient(environment: Environment, steps: int, options: dict[str, Any]) -> Iterator[float]:
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    microbatches = WORLD * SHARE
    replicas = Replicas(
        model, optimizer, microbatches=microbatches, environment=environment, **options
    )
    for step in replicas.steps(steps):
        with _Timer() as timer:
            _compute(model, step)
            optimizer.step()
        yield timer.ms


def _compute(model: nn.Module, step: Step) -> None:
    for index in step:
        loss = loss_of(model, step.number, index)
        loss.backward()
        step.report(loss)


def build_model() -> nn.Module:
    """The same in every process."""
    torch.manual_seed(0)
    layers = (module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, step: int, index: int) -> torch.Tensor:
    """Forward of one microbatch."""
    chosen = torch.Generator().manual_seed(1000 * step + index)
    x = torch.randn(ROWS, WIDTH, generator=chosen)
    return functional.mse_loss(model(x), x.roll(1, dims=1)) / (WORLD * SHARE)


class _Timer:
    """Milliseconds of a block."""

    ms = 0.0

    def __enter__(self) -> _Timer:
        self._begun = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.ms = (time.perf_counter() - self._begun) * 1e3


if __name__ == "__main__":
    main()
