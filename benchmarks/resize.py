"""What a change of layout costs a running job: live, and by stop and restart.

Live: the pause that training sees, the longest of all ranks: the time beside passes, sums and
update that lies between two steps. What the change costs elsewhere stands beside it: the step
during which the state is copied, and the first in the new layout, against the usual step there.
Restart: save with torch's distributed checkpoint, start new processes,
build their state, load with resharding; the same number of elements, one rank fewer. Both on this
machine, nothing emulated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks._report import machine, print_table, write_json
from resihp.contracts import Layout, ModelShape, Plan, Replica, Stage, even_quotas
from resihp.elastic.engine import Reduced, Setup
from resihp.elastic.events import Hooks, Switch
from resihp.elastic.local import LocalRanks
from resihp.elastic.membership.rendezvous import Rendezvous
from resihp.elastic.membership.store import Timeouts, connect
from resihp.elastic.models import Llama, Packed
from resihp.elastic.optim import Optimizer
from resihp.elastic.trainer import Trainer
from resihp.layout import least_numel

TOKENS, MICROBATCHES, STEPS, LAYERS, UNITS = 128, 4, 9, 8, 8
SHAPES = {
    "30M": ModelShape(layers=LAYERS, hidden=512, heads=8, kv_heads=8, ffn=1536, vocab=4096),
    "100M": ModelShape(layers=LAYERS, hidden=1024, heads=8, kv_heads=8, ffn=2688, vocab=4096),
}
OPTIMIZER = Optimizer(torch.optim.AdamW, foreach=True)
ALONE = Stage((0,), (0, LAYERS), (UNITS,))
GRID = Layout.grid(dp=1, pp=2, tp=2, layers=LAYERS, units=UNITS)
TWO = Layout.grid(dp=2, pp=1, tp=2, layers=LAYERS, units=UNITS)
THREE = Layout((Replica((Stage((0, 1), (0, 4), (4, 4)), Stage((2,), (4, 8), (UNITS,)))),))


@dataclass(frozen=True)
class Change:
    """One change of layout; `quotas` of the new one."""

    name: str
    old: Layout
    new: Layout
    quotas: tuple[int, ...] = ()


CHANGES = (
    Change(
        "TP2 x PP2 -> TP1, layers 5 + 3",
        GRID,
        Layout((Replica((Stage((0,), (0, 5), (UNITS,)), Stage((2,), (5, 8), (UNITS,)))),)),
    ),
    Change(
        "DP2 -> DP1, shares 5 + 3",
        TWO,
        Layout((Replica((Stage((0, 1), (0, LAYERS), (5, 3)),)),)),
    ),
    Change("4 -> 3 ranks", GRID, THREE),
    Change("3 -> 4 ranks", THREE, GRID),
    Change("quotas only", TWO, TWO, (3, 1)),
)


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size", choices=sorted(SHAPES), action="append")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for size in options.size or list(SHAPES):
        rows += measure(size, options.repeats)
    print(machine())
    columns = [
        "model",
        "change",
        "pause ms",
        "restart ms",
        "ratio",
        "moved MB",
        "least MB",
        "gradients MB",
        "extra MB",
        "prepare ms",
        "step ms",
        "copying step ms",
        "first new step ms",
        "new step ms",
    ]
    print_table("Change of layout: live against stop and restart", columns, rows)
    if options.json:
        write_json(options.json, {"rows": [dict(zip(columns, row, strict=True)) for row in rows]})


def measure(size: str, repeats: int) -> list[list[Any]]:
    """One row for each change."""
    model = Llama(SHAPES[size])
    parameters = model.parameters
    every = (*parameters.first, *(p for ps in parameters.layers for p in ps), *parameters.last)
    numel = sum(param.size * param.row_numel for param in every)
    restarts = [restart_ms(numel) for _ in range(repeats)]
    restart = statistics.median(restarts)
    rows = []
    for change in CHANGES:
        seen = [live(size, change) for _ in range(repeats)]
        middle = {key: statistics.median(one[key] for one in seen) for key in seen[0]}
        least = least_numel(change.old, change.new, parameters) * OPTIMIZER.copies * 4
        rows.append(
            [
                f"{numel / 1e6:.0f}M",
                change.name,
                round(middle["pause_ms"], 1),
                round(restart),
                f"{restart / middle['pause_ms']:.0f}x",
                round(middle["received_bytes"] / 1e6, 1),
                round(least / 1e6, 1),
                round(middle["handed_bytes"] / 1e6, 1),
                round(middle["extra_bytes"] / 1e6, 1),
                *(round(middle[key]) for key in ("prepare_ms", "old", "copying", "first", "new")),
            ]
        )
        print(*rows[-1], flush=True)
    return rows


def live(size: str, change: Change) -> dict[str, float]:
    """What one change cost: the longest pause and preparation of a rank, bytes, steps."""
    folder = Path(tempfile.mkdtemp(prefix="resihp-resize-"))
    try:
        with LocalRanks("resize", folder) as ranks:
            ranks.start(range(4), run_rank, size, change, folder)
            codes = ranks.wait(600)
            assert set(codes.values()) == {0}, ranks.logs()
        switches = [json.loads(path.read_text()) for path in folder.glob("switch-*.json")]
        told = [json.loads(path.read_text()) for path in folder.glob("steps-*.json")]
    finally:
        shutil.rmtree(folder)
    assert len(switches) == 4, "every rank sees the switch"
    most = {k: max(s[k] for s in switches) for k in ("pause_ms", "prepare_ms", "extra_bytes")}
    total = {k: sum(s[k] for s in switches) for k in ("received_bytes", "handed_bytes")}
    return {**most, **total, **_step_times(told, switches[0]["step"])}


def _step_times(told: list[list[list[float]]], first: int) -> dict[str, float]:
    """Milliseconds of the usual steps before and after the switch, and of those next to it.

    The pause lies at the end of the copying step and is not part of its time here.
    """
    longest: dict[int, float] = {}
    for step, ms in (pair for steps in told for pair in steps):
        longest[round(step)] = max(longest.get(round(step), 0.0), ms)
    return {
        "old": statistics.median(ms for step, ms in longest.items() if 0 < step < first - 1),
        "copying": longest[first - 1],
        "first": longest[first],
        "new": statistics.median(ms for step, ms in longest.items() if step > first),
    }


def run_rank(rank: int, host: str, port: int, size: str, change: Change, folder: Path) -> None:
    """One rank: a few steps in the old layout, the switch, a few in the new one."""
    torch.set_num_threads(1)
    timeouts = Timeouts(heartbeat=timedelta(seconds=20), connect=timedelta(seconds=120))
    steps: list[tuple[int, float]] = []
    paused_ms = 0.0

    def on_switch(switch: Switch) -> None:
        nonlocal paused_ms
        paused_ms = switch.pause_ms
        names = ("pause_ms", "prepare_ms", "received_bytes", "handed_bytes", "extra_bytes", "step")
        seen = {name: getattr(switch, name) for name in names}
        (folder / f"switch-{rank}.json").write_text(json.dumps(seen))

    def on_step(reduced: Reduced, ms: float, plan: Plan) -> None:
        nonlocal paused_ms
        steps.append((reduced.step, ms - paused_ms))
        paused_ms = 0.0
        _await_switch(trainer)

    trainer = Trainer(
        Setup(Llama(SHAPES[size]), OPTIMIZER, batch),
        _plan(0, change.old),
        Rendezvous(lambda: connect(host, port, "resize", timeouts), rank, range(4), timeouts),
        OnePlan(_plan(1, change.new, change.quotas)),
        hooks=Hooks(on_switch=on_switch, on_step=on_step),
    )
    trainer.run(STEPS)
    (folder / f"steps-{rank}.json").write_text(json.dumps(steps))


class OnePlan:
    """Offers one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def wait(self, after: int, seconds: float) -> Plan | None:
        """The plan, until it is taken on."""
        if after < self._plan.version:
            return self._plan
        time.sleep(seconds)
        return None

    def after_loss(self, current: Plan, survivors: object, step: int) -> Plan:
        """Nothing is lost here."""
        raise AssertionError("no rank dies in this benchmark")

    def joined(self, current: Plan, standbys: object, step: int) -> Plan | None:
        """Nobody joins."""
        return None

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        """Nothing to tell."""


def batch(step: int, index: int) -> Packed:
    """Random tokens."""
    chosen = torch.Generator().manual_seed(100 * step + index)
    ids = torch.randint(0, 4096, (TOKENS + 1,), generator=chosen)
    return Packed(ids[:-1], ids[1:], (TOKENS,))


def restart_ms(numel: int) -> float:
    """Save on 4 processes, start 3 new ones, load with resharding: milliseconds of downtime."""
    folder = Path(tempfile.mkdtemp(prefix="resihp-restart-"))
    try:
        saved = _launch("save", 4, folder, numel)
        begun = time.time()
        loaded = _launch("load", 3, folder, numel)
        return float(saved["state_ms"] + (loaded["end"] - begun) * 1e3)
    finally:
        shutil.rmtree(folder)


def _launch(what: str, world: int, folder: Path, numel: int) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(part) for part in (world, port, folder, numel)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks._resize_restart", what, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(world)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    timing: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return timing


def _plan(version: int, layout: Layout, quotas: tuple[int, ...] = ()) -> Plan:
    quotas = quotas or even_quotas(MICROBATCHES, layout.dp)
    return Plan(version=version, layout=layout, quotas=quotas, from_step=5 * version)


def _await_switch(trainer: Trainer) -> None:
    """Hold the third step until the next world is ready, so that every run switches there."""
    deadline = time.monotonic() + 60
    while trainer.completed == 3 and not trainer.is_prepared and time.monotonic() < deadline:
        trainer.look_for_plan()
        time.sleep(0.01)


if __name__ == "__main__":
    main()
