"""Peak of a step's memory, predicted by the scheduler and measured, with and without recomputation.

`python -m benchmarks.memory [--json PATH]`

Measured are the bytes of all tensors alive at once (parameters, gradients, moments, activations,
temporaries that operators return) in the second step, on every rank; ranks are threads of this
process, with the runtime's own communication. Predicted is `simulate(...).peak_bytes` from what
`measure_memory` found by running one layer and both ends alone.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._report import machine, print_table, write_json
from resihp.contracts import Job, Layout, ModelShape, Plan, Replica, Schedule, Stage
from resihp.elastic import Gpt2, Llama, Mixture, Optimizer, Packed, Setup, measure_memory
from resihp.elastic.process_groups.abortable import ProcessGroupFactory, WaitClock
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.step import Engine
from resihp.elastic.step.memory import LiveTensors
from resihp.elastic.step.setup import Recompute
from resihp.elastic.step.shard import initial_shard
from scheduler import simulate

SHAPE = ModelShape(layers=6, hidden=128, heads=8, kv_heads=4, ffn=352, vocab=1000)
PLAIN = replace(SHAPE, kv_heads=8, gated=False, tied_embeddings=True)
TOKENS, QUOTA, TIMEOUT = 384, 4, timedelta(seconds=60)
MODELS: dict[str, Llama | Gpt2] = {
    "Llama": Llama(SHAPE),
    "GPT-2": Gpt2(PLAIN, context=TOKENS, dropout=0.1),
    "mixture": Mixture(SHAPE, experts=4, top_k=2),
}
LAYOUTS = {
    "1 rank": Layout.grid(dp=1, pp=1, tp=1, layers=6, units=4),
    "TP2 PP2": Layout.grid(dp=1, pp=2, tp=2, layers=6, units=4),
    "DP2 PP2": Layout.grid(dp=2, pp=2, tp=1, layers=6, units=4),
    "shares 3 + 1, layers 4 + 2": Layout(
        (Replica((Stage((0, 1), (0, 4), (3, 1)), Stage((2,), (4, 6), (4,)))),)
    ),
}
MODES: tuple[Recompute | None, ...] = (None, "attention", "layers")


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    columns = ["model, layout", "recompute", "largest rank", "predicted", "errors", "zero bubble"]
    rows = [
        row(name, layout, recompute) for name in MODELS for layout in LAYOUTS for recompute in MODES
    ]
    print(machine())
    print_table(
        f"Peak of tensor memory, 4 microbatches of {TOKENS} tokens a replica", columns, rows
    )
    if options.json:
        write_json(options.json, {"rows": [dict(zip(columns, r, strict=True)) for r in rows]})


def row(name: str, layout_name: str, recompute: Recompute | None) -> list[Any]:
    """One row; errors are those of all ranks, under 1F1B and under zero bubble."""
    setup = Setup(MODELS[name], Optimizer(torch.optim.AdamW, lr=1e-3), batch, recompute=recompute)
    layout = LAYOUTS[layout_name]
    predicted, found = peaks(setup, layout, Schedule.ONE_F_ONE_B)
    largest = max(found, key=lambda rank: found[rank])
    split = "-"
    if len(layout.replicas[0].stages) > 1:
        split = errors(*peaks(setup, layout, Schedule.ZERO_BUBBLE))
    return [
        f"{name}, {layout_name}",
        recompute or "no",
        f"{found[largest] / 1e6:.1f} MB",
        f"{predicted[largest] / 1e6:.1f} MB",
        errors(predicted, found),
        split,
    ]


def errors(predicted: dict[int, float], found: dict[int, int]) -> str:
    """Least and largest error over the ranks."""
    all_of = [predicted[rank] / found[rank] - 1.0 for rank in found]
    return f"{min(all_of):+.1%} to {max(all_of):+.1%}"


def peaks(
    setup: Setup, layout: Layout, schedule: Schedule
) -> tuple[dict[int, float], dict[int, int]]:
    """Predicted and measured peak bytes of every rank."""
    assert isinstance(setup.model, Llama | Gpt2)
    job = Job(
        name="memory",
        layout=layout,
        microbatches=QUOTA * layout.dp,
        model=setup.model.shape,
        tokens_per_microbatch=TOKENS,
        schedule=schedule,
        recompute=setup.recompute == "layers",
        memory=measure_memory(setup, batch(0, 0)),
    )
    plan = Plan(version=0, layout=layout, quotas=job.quotas, schedule=schedule)
    store = dist.HashStore()
    with ThreadPoolExecutor(len(layout.ranks)) as pool:
        futures = {r: pool.submit(measure, r, setup, plan, store) for r in layout.ranks}
        found = {rank: future.result() for rank, future in futures.items()}
    return dict(simulate(job, layout, job.quotas).peak_bytes), found


def measure(rank: int, setup: Setup, plan: Plan, store: dist.Store) -> int:
    """Peak bytes of one rank's tensors in the second step."""
    torch.set_num_threads(1)
    begun = time.monotonic()

    def broken(ranks: object, waited_s: float) -> str | None:
        return "another rank failed" if time.monotonic() - begun > 300.0 else None

    factory = ProcessGroupFactory(store, rank, broken=broken, timeout=TIMEOUT, waited=WaitClock())
    groups = build_layout_groups(factory, plan.layout, setup.model.parameters, name="memory")
    tensors = LiveTensors()
    with tensors:
        shard = initial_shard(setup.model, setup.optimizer, groups)
        engine = Engine(setup, groups, shard, plan, factory.waited)
        for step in range(2):
            tensors.reset_peak()
            engine.accumulate(step)
            engine.update(engine.reduce(step, 0).norm, step)
        return int(tensors.peak_bytes)


def batch(step: int, index: int) -> Packed:
    """Random text in two documents."""
    chosen = torch.Generator().manual_seed(1000 * step + index)
    ids = torch.randint(SHAPE.vocab, (TOKENS + 1,), generator=chosen)
    return Packed(ids[:-1], ids[1:], (TOKENS // 2, TOKENS - TOKENS // 2))


if __name__ == "__main__":
    main()
