"""Optimizer state sharded over replicas (ZeRO stage 1) beside the same training without sharding.

`python -m benchmarks.state_sharding [--json PATH] [--repeats N] [--sizes 30M 100M]`

Four data-parallel ranks (gloo, one host) train the same model three times in the same processes,
turn and turn about: with the optimizer's state on all replicas, with two copies of each range, and
with one. Every turn gives a ratio of two adjacent steps to the unsharded one; the table shows
medians and quartiles, the moments that a rank holds at most (against 1 / 4 of them), and the state
that moves when a rank is lost, against what it held. Losses are compared on the way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._report import machine, print_table, write_json
from benchmarks._resize_live import SHAPES
from resihp.contracts import Layout, ModelShape, Plan, even_quotas
from resihp.elastic.models import Llama, Packed
from resihp.elastic.optim import Optimizer
from resihp.elastic.process_groups.abortable import ProcessGroupFactory, WaitClock
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.step import Engine, Setup
from resihp.elastic.step.shard import initial_shard
from resihp.layout import StateCopies, moves
from resihp.testing.local_ranks import LocalRanks

RANKS, TOKENS, MICROBATCHES, WARM_UP = 4, 256, 8, 2
COPIES = (None, 2, 1)
# At a higher rate sums in another order, which are other bits, lead to another training.
OPTIMIZER = Optimizer(torch.optim.AdamW, lr=1e-4, foreach=True)


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["30M", "100M"])
    options = parser.parse_args()
    columns = [
        "model",
        "copies",
        "step ms",
        "ratio",
        "quartiles",
        "CPU ratio",
        "moments MB",
        "of all",
        "moved after a loss",
    ]
    rows = [row for size in options.sizes for row in measure(size, options.repeats)]
    print(machine())
    print_table(f"{RANKS} replicas, {MICROBATCHES} microbatches of {TOKENS} tokens", columns, rows)
    if options.json:
        write_json(options.json, {"rows": [dict(zip(columns, row, strict=True)) for row in rows]})


def measure(size: str, repeats: int) -> list[list[Any]]:
    """Rows of one model: medians over the turns, as rank 0 saw them."""
    with tempfile.TemporaryDirectory(prefix="resihp-state-") as name:
        folder = Path(name)
        with LocalRanks("state", folder) as processes:
            processes.start(range(RANKS), run_rank, SHAPES[size], repeats, folder)
            codes = processes.wait(1800)
            assert set(codes.values()) == {0}, processes.logs()
        turns = json.loads((folder / "turns.json").read_text())
        held = [json.loads(path.read_text()) for path in folder.glob("held-*.json")]
    parameters = Llama(SHAPES[size]).parameters
    numel = sum(param.size * param.row_numel for param in parameters.all)
    old = layout(SHAPES[size])
    new = Layout(old.replicas[:-1])
    rows = []
    for index, copies in enumerate(COPIES):
        ratios = [turn[index][0] / turn[0][0] for turn in turns]
        low, middle, high = statistics.quantiles(ratios, n=4)
        most = max(one[index] for one in held)
        lost = () if copies == 1 else (RANKS - 1,)  # of the only copy, what would move if it left
        kept = StateCopies(copies) if copies else None
        moved = sum(m.numel for m in moves(old, new, parameters, lost=lost, copies=kept))
        rows.append(
            [
                size,
                copies or "all",
                round(1e3 * statistics.median(turn[index][0] for turn in turns)),
                f"{middle:.3f}",
                f"{low:.3f}-{high:.3f}",
                f"{statistics.median(turn[index][1] / turn[0][1] for turn in turns):.3f}",
                f"{most * 4 / 1e6:.0f}",
                f"{most / (2 * numel):.3f}",
                f"{moved / numel:.3f}",
            ]
        )
    return rows


def layout(shape: ModelShape) -> Layout:
    """Replicas of one rank."""
    return Layout.grid(dp=RANKS, pp=1, tp=1, layers=shape.layers)


def run_rank(
    rank: int, host: str, port: int, shape: ModelShape, repeats: int, folder: Path
) -> None:
    """One rank: all three, turn and turn about."""
    torch.set_num_threads(1)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("turns", store), rank=rank, world_size=RANKS
    )
    engines = [
        make_engine(rank, shape, copies, dist.PrefixStore(f"engine{copies}", store))
        for copies in COPIES
    ]
    turns = []
    for turn in range(WARM_UP + repeats):
        order = [*range(len(engines))][:: 1 if turn % 2 else -1]
        taken = {index: timed(one_step(engines[index]), turn) for index in order}
        losses = [taken[index][2] for index in range(len(engines))]
        assert max(losses) - min(losses) < 1e-3, f"losses differ in step {turn}: {losses}"
        turns.append([taken[index] for index in range(len(engines))])
    held = [
        sum(m.numel() for one in engine.shard.slices for m in engine.shard.state(one)[1:])
        for engine in engines
    ]
    (folder / f"held-{rank}.json").write_text(json.dumps(held))
    if rank == 0:
        (folder / "turns.json").write_text(json.dumps(turns[WARM_UP:]))
    dist.destroy_process_group()


def one_step(engine: Engine) -> Callable[[int], float]:
    """A whole step of an engine; returns its loss."""

    def run(step: int) -> float:
        engine.accumulate(step)
        reduced = engine.reduce(step, 0)
        engine.update(reduced.norm, step)
        engine.gather()
        return reduced.loss

    return run


def timed(work: Callable[[int], float], step: int) -> tuple[float, float, float]:
    """Seconds until all ranks have ended a step, processor seconds of this one, and its loss."""
    dist.barrier()
    begun, processor = time.perf_counter(), time.process_time()
    loss = work(step)
    dist.barrier()
    return time.perf_counter() - begun, time.process_time() - processor, loss


def make_engine(rank: int, shape: ModelShape, copies: int | None, store: dist.Store) -> Engine:
    """The engine of one rank, with the model's initial values."""
    waited = WaitClock()
    factory = ProcessGroupFactory(
        store, rank, broken=lambda *_: None, timeout=timedelta(seconds=120), waited=waited
    )

    def batch(step: int, index: int) -> Packed:
        chosen = torch.Generator().manual_seed(1000 * step + index)
        ids = torch.randint(0, 8, (TOKENS + 1,), generator=chosen).cumsum(0) % shape.vocab
        return Packed(ids[:-1], ids[1:], (100, TOKENS - 100))

    setup = Setup(Llama(shape), OPTIMIZER, batch, optimizer_replicas=copies)
    here = layout(shape)
    groups = build_layout_groups(
        factory, here, setup.model.parameters, name="engine", copies=setup.state_copies
    )
    plan = Plan(version=0, layout=here, quotas=even_quotas(MICROBATCHES, RANKS))
    shard = initial_shard(setup.model, setup.optimizer, groups)
    return Engine(setup, groups, shard, plan, waited)


if __name__ == "__main__":
    main()
