"""What being elastic costs while nothing happens: steps with the runtime's watching, and without.

Two replicas train in two processes. An engine makes blocks of steps inside `Trainer.run`
(heartbeats, the agent's long poll, a look for a plan in each step), and one by itself in a bare
loop, in the same processes and run; blocks of several runs are compared by their medians. On a
machine that others load, too, the processor time of all threads tells more than the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch

from benchmarks._report import machine, print_table, write_json
from resihp.contracts import Layout, ModelShape, Plan
from resihp.elastic.models import Llama, Packed
from resihp.elastic.optim import Optimizer
from resihp.elastic.planning.sources import NoPlans
from resihp.elastic.process_groups.abortable import ProcessGroupFactory, WaitClock
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, connect
from resihp.elastic.state.events import Callbacks
from resihp.elastic.step import Engine, ReducedStep, Setup
from resihp.elastic.step.shard import initial_shard
from resihp.elastic.trainer import Trainer
from resihp.testing.local_ranks import LocalRanks

SHAPE = ModelShape(layers=4, hidden=256, heads=4, kv_heads=4, ffn=768, vocab=1024)
LAYOUT = Layout.grid(dp=2, pp=1, tp=1, layers=4, units=4)
KINDS = ("elastic", "bare")
TOKENS, MICROBATCHES, STEPS, SKIPPED = 128, 4, 40, 5


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    runs = [measure() for _ in range(options.repeats)]
    elastic = statistics.median(ms for run in runs for ms in run["elastic"])
    bare = statistics.median(ms for run in runs for ms in run["bare"])
    cost = statistics.median(
        statistics.median(run["elastic"]) / statistics.median(run["bare"]) - 1.0 for run in runs
    )
    cpu = {kind: statistics.median(run[f"{kind}_cpu"][0] for run in runs) for kind in KINDS}
    cpu_cost = statistics.median(run["elastic_cpu"][0] / run["bare_cpu"][0] - 1.0 for run in runs)
    rows = [
        ["clock", round(elastic, 2), round(bare, 2), f"{cost:+.1%}"],
        ["processor", round(cpu["elastic"], 2), round(cpu["bare"], 2), f"{cpu_cost:+.1%}"],
    ]
    print(machine())
    print_table("Step of 2 processes", ["time", "elastic ms", "bare ms", "cost"], rows)
    if options.json:
        told = {"elastic_ms": elastic, "bare_ms": bare, "cost": cost, "cpu_cost": cpu_cost}
        write_json(options.json, told)


def measure(steps: int = STEPS) -> dict[str, list[float]]:
    """Milliseconds of the first rank's steps, elastic and bare, without the first ones of each."""
    with tempfile.TemporaryDirectory(prefix="resihp-cost-") as name:
        folder = Path(name)
        with LocalRanks("cost", folder) as ranks:
            ranks.start(range(2), run_rank, folder, steps)
            assert set(ranks.wait(300).values()) == {0}, ranks.logs()
        told: dict[str, list[float]] = json.loads((folder / "steps-0.json").read_text())
    return told


def run_rank(rank: int, host: str, port: int, folder: Path, steps: int) -> None:
    """A block of steps in the trainer, and one without it."""
    torch.set_num_threads(1)
    patient = timedelta(minutes=10)  # nobody beats in the bare loop
    timeouts = Timeouts(heartbeat=patient, connect=patient, exchange=patient)
    elastic: list[float] = []
    used: list[float] = []
    last = time.perf_counter()

    def on_step(reduced: ReducedStep, ms: float, plan: Plan) -> None:
        nonlocal last
        now = time.perf_counter()
        elastic.append((now - last) * 1e3)
        last = now
        used.append(time.process_time() * 1e3)

    setup = Setup(Llama(SHAPE), Optimizer(torch.optim.AdamW), batch)
    plan = Plan(version=0, layout=LAYOUT, quotas=(2, 2))
    trainer = Trainer(
        setup,
        plan,
        Rendezvous(lambda: connect(host, port, "cost", timeouts), rank, range(2), timeouts),
        NoPlans(),
        callbacks=Callbacks(on_step=on_step),
    )
    trainer.run(steps)
    waited = WaitClock()
    factory = ProcessGroupFactory(
        connect(host, port, "cost", timeouts),
        rank,
        broken=lambda ranks, waited_s: None,
        timeout=patient,
        waited=waited,
    )
    groups = build_layout_groups(factory, LAYOUT, setup.model.parameters, name="bare")
    shard = initial_shard(setup.model, setup.optimizer, groups)
    engine = Engine(setup, groups, shard, plan, waited)
    bare = []
    for step in range(steps):
        start = time.perf_counter()
        engine.accumulate(step)
        engine.update(engine.reduce(step, 0).norm, step)
        bare.append((time.perf_counter() - start) * 1e3)
        used.append(time.process_time() * 1e3)
    told = {
        "elastic": elastic[SKIPPED:],
        "bare": bare[SKIPPED:],
        "elastic_cpu": [(used[steps - 1] - used[SKIPPED]) / (steps - 1 - SKIPPED)],
        "bare_cpu": [(used[-1] - used[steps + SKIPPED]) / (steps - 1 - SKIPPED)],
    }
    (folder / f"steps-{rank}.json").write_text(json.dumps(told))


def batch(step: int, index: int) -> Packed:
    """Random tokens."""
    chosen = torch.Generator().manual_seed(100 * step + index)
    ids = torch.randint(0, SHAPE.vocab, (TOKENS + 1,), generator=chosen)
    return Packed(ids[:-1], ids[1:], (TOKENS,))


if __name__ == "__main__":
    main()
