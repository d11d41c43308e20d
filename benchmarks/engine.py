"""Step time of the runtime's engine beside a plain torch implementation of the same model.

`python -m benchmarks.engine [--json PATH] [--repeats N]`

Both train in the same processes, turn and turn about, on one rank and on two tensor-parallel ones
(gloo), with all activations kept, with recomputed layers (the peer's by torch's own checkpointing),
and with parts of layers compiled (the peer's not). Every turn gives one ratio of two adjacent
steps, so that a load that comes and goes meets both; the table shows their median and quartiles.
Losses are compared on the way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._engine_plain import PlainTrainer
from benchmarks._report import machine, print_table, write_json
from resihp.contracts import Layout, ModelShape, Plan
from resihp.elastic.models import Llama, Packed
from resihp.elastic.optim import Optimizer
from resihp.elastic.process_groups.abortable import ProcessGroupFactory, WaitClock
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.step import Engine, Setup
from resihp.elastic.step.shard import Shard, initial_shard
from resihp.testing.local_ranks import LocalRanks

SHAPE = ModelShape(layers=6, hidden=256, heads=8, kv_heads=4, ffn=704, vocab=4096)
TOKENS, MICROBATCHES, WARM_UP = 256, 4, 3
ADAMW: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.1}
WAYS: dict[str, dict[str, Any]] = {
    "all kept": {},
    "layers recomputed": {"recompute": "layers"},
    "parts compiled": {"compile_backend": "inductor"},
}
"""Of the engine's setup."""


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    columns = ["ranks", "way", "engine ms", "plain ms", "ratio", "quartiles", "CPU ratio"]
    rows = [measure(ranks, way, options.repeats) for way in WAYS for ranks in (1, 2)]
    print(machine())
    print_table("Step of a 6-layer decoder, 4 microbatches of 256 tokens", columns, rows)
    if options.json:
        write_json(options.json, {"rows": [dict(zip(columns, row, strict=True)) for row in rows]})


def measure(ranks: int, way: str, repeats: int) -> list[Any]:
    """One row: medians over the turns, as rank 0 saw them."""
    with tempfile.TemporaryDirectory(prefix="resihp-engine-") as name:
        folder = Path(name)
        with LocalRanks("engine", folder) as processes:
            processes.start(range(ranks), run_rank, ranks, way, repeats, folder)
            codes = processes.wait(900)
            assert set(codes.values()) == {0}, processes.logs()
        turns = json.loads((folder / "turns.json").read_text())
    ratios = [turn["engine"][0] / turn["plain"][0] for turn in turns]
    low, _, high = statistics.quantiles(ratios, n=4)
    cpu = statistics.median(turn["engine"][1] / turn["plain"][1] for turn in turns)
    times = [1e3 * statistics.median(turn[k][0] for turn in turns) for k in ("engine", "plain")]
    label = "1" if ranks == 1 else f"TP{ranks}"
    middle = statistics.median(ratios)
    return [
        label,
        way,
        *map(round, times),
        f"{middle:.3f}",
        f"{low:.3f}-{high:.3f}",
        f"{cpu:.3f}",
    ]


def run_rank(
    rank: int,
    host: str,
    port: int,
    ranks: int,
    way: str,
    repeats: int,
    folder: Path,
) -> None:
    """One rank: both implementations, turn and turn about."""
    torch.set_num_threads(1)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    engine = make_engine(rank, ranks, way, dist.PrefixStore("engine", store))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("plain", store), rank=rank, world_size=ranks
    )
    plain = PlainTrainer(SHAPE, partial(torch.optim.AdamW, **ADAMW), rank, ranks, max_norm=1.0)
    plain.model.recomputes = "recompute" in WAYS[way]
    copy_values(engine.shard, plain)

    def engine_step(step: int) -> float:
        engine.accumulate(step)
        reduced = engine.reduce(step, 0)
        engine.update(reduced.norm, step)
        return reduced.loss

    def plain_step(step: int) -> float:
        return plain.step([batch(step, index) for index in range(MICROBATCHES)])

    turns = []
    for turn in range(WARM_UP + repeats):
        steps = {"engine": engine_step, "plain": plain_step}
        order = list(steps)[:: 1 if turn % 2 else -1]
        taken = {name: timed(steps[name], turn) for name in order}
        gap = abs(taken["engine"][2] - taken["plain"][2])
        assert gap < 1e-3, f"losses differ by {gap} in step {turn}"
        turns.append(taken)
    if rank == 0:
        (folder / "turns.json").write_text(json.dumps(turns[WARM_UP:]))
    dist.destroy_process_group()


def timed(work: Callable[[int], float], step: int) -> tuple[float, float, float]:
    """Seconds, processor seconds, and the loss of a step that all ranks begin together."""
    dist.barrier()
    begun, processor = time.perf_counter(), time.process_time()
    loss = work(step)
    return time.perf_counter() - begun, time.process_time() - processor, loss


def make_engine(rank: int, ranks: int, way: str, store: dist.Store) -> Engine:
    """The engine of one rank, with the model's initial values."""
    waited = WaitClock()
    factory = ProcessGroupFactory(
        store, rank, broken=lambda *_: None, timeout=timedelta(seconds=60), waited=waited
    )
    setup = Setup(Llama(SHAPE), Optimizer(torch.optim.AdamW, **ADAMW), batch, **WAYS[way])
    layout = Layout.grid(dp=1, pp=1, tp=ranks, layers=SHAPE.layers)
    groups = build_layout_groups(factory, layout, setup.model.parameters, name="engine")
    plan = Plan(version=0, layout=layout, quotas=(MICROBATCHES,))
    return Engine(setup, groups, initial_shard(setup.model, setup.optimizer, groups), plan, waited)


def copy_values(shard: Shard, plain: PlainTrainer) -> None:
    """The same initial values on both sides."""
    names = {"first.table": "table.weight", "last.norm": "norm.weight", "last.table": "head.weight"}
    targets = dict(plain.model.named_parameters())
    with torch.no_grad():
        for param, tensor in shard.tensors.items():
            targets[names.get(param.key, f"{param.key}.weight")].copy_(tensor)


def batch(step: int, index: int) -> Packed:
    """Predictable text in two documents."""
    chosen = torch.Generator().manual_seed(1000 * step + index)
    ids = torch.randint(0, 8, (TOKENS + 1,), generator=chosen).cumsum(0) % SHAPE.vocab
    return Packed(ids[:-1], ids[1:], (100, TOKENS - 100))


if __name__ == "__main__":
    main()
