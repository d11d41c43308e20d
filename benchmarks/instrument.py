"""Cost and findings of `resihp.instrument` on ordinary loops: `python -m benchmarks.instrument`.

Part `cost`: what it adds to a step, beside the hooks by hand and beside TraceML in the same run,
each with its receiver in another process. Bursts of steps without a tool and under each tool take
turns in one process; `remove` switches the tool off. Added time is the difference of neighbouring
bursts; TraceML's steps without are taken with its patches in place. Collectives complete at once,
so that the times of a step spread little; those of the cells are real.

Part `cells`: four real processes with a sidecar, one of them slow: which ranks are named, and
after how many steps. The cells of DDP run under TraceML, too, whose verdict comes at the end.
Where whole microbatches run on each rank and the cell without a slow rank is run or recorded too,
each rank of that recording is slowed in turn: the median steps to its name, and those that the best
test needs, which knows what it looks for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ._instrument_cells import (
    COLUMNS,
    Cell,
    Outcome,
    busy_processors,
    cells,
    document,
    recorded_cells,
    row,
    run_cells,
)
from ._report import machine, print_table, write_json
from .hooks import PEER, peer_aggregator, sink

_WORKER = "benchmarks._instrument_worker"
_OURS = "none,again,hooks,callbacks,instrument"
_PARTS = ("cost", "cells")


def main() -> None:
    """Measure, print, write."""
    options = _options()
    results: dict[str, Any] = {}
    if "cost" in options.parts:
        results["cost"] = _cost(15.0 if options.quick else options.seconds, peer=options.peer)
    if "cells" in options.parts:
        results["cells"] = _cells(options)
    print(f"\n{machine()}")
    if options.json:
        write_json(options.json, results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instrument", description=__doc__)
    parser.add_argument("--json", metavar="PATH", help="write the figures there as well")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="measure ours alone")
    parser.add_argument("--parts", type=_parts, default=_PARTS, help="of cost,cells (default both)")
    parser.add_argument("--quick", action="store_true", help="few cells and seconds, one seed")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each cell (default 1)")
    parser.add_argument("--seconds", type=float, default=90.0, help="of the cost (default 90)")
    parser.add_argument("--recordings", metavar="FOLDER", help="keep the cells' telemetry there")
    parser.add_argument("--only", default="*", help="cells of these names, e.g. 'ddp-1-1.2-*'")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside the cells")
    parser.add_argument("--replay", action="store_true", help="take the cells from --recordings")
    options = parser.parse_args()
    if options.replay and not options.recordings:
        parser.error("--replay needs --recordings")
    return options


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if not set(parts) <= set(_PARTS):
        raise argparse.ArgumentTypeError(f"must be of {','.join(_PARTS)}")
    return parts


def _cost(seconds: float, *, peer: bool) -> dict[str, Any]:
    with sink() as address:
        results = {"resihp": _work(sys.executable, _OURS, address, seconds)}
    note = "left out (--no-peer)"
    if peer:
        try:
            with peer_aggregator() as (python, address):
                results["traceml"] = _work(python, "none,traceml", address, seconds / 2)
            note = f"{PEER}, its aggregator running"
        except (subprocess.SubprocessError, OSError, RuntimeError) as error:
            note = f"TraceML could not be measured here: {error}"
    _show_cost(results)
    print(f"Peer: {note}")
    return {**results, "peer": note}


def _work(python: str, tools: str, address: str, seconds: float) -> dict[str, Any]:
    """Run the worker; what it measured."""
    own = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [python, "-m", _WORKER, tools, address, str(seconds)],
        env=own, capture_output=True, text=True, timeout=3 * seconds + 120, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    found = [line for line in lines if line.startswith("RESULT ")]
    if not found:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the worker failed"])[-1])
    result: dict[str, Any] = json.loads(found[-1].removeprefix("RESULT "))
    return result


_CASES = (
    ("plain_1", "plain module, 1 microbatch"),
    ("plain_8", "plain module, 8 microbatches"),
    ("ddp_1", "DDP, 1 microbatch"),
    ("ddp_8", "DDP, 8 microbatches"),
    ("fsdp2_2", "FSDP2 of 2 units, 1 microbatch"),
    ("fsdp2_12", "FSDP2 of 12 units, 1 microbatch"),
    ("ddp_large", "DDP, large, 8 microbatches"),
    ("fsdp2_large", "FSDP2 of 8 units, large, 8 microbatches"),
)
_IN_PARTS = {"callbacks": "of empty callbacks", "beyond": "beyond the hooks"}
_TOOLS = ("instrument", "callbacks", "hooks", "beyond", "again")


def _show_cost(results: dict[str, dict[str, Any]]) -> None:
    ours = results["resihp"]["cases"]
    peer = results.get("traceml", {}).get("cases", {})
    columns = (
        "", "step", "instrument", "empty callbacks", "hooks by hand", "beyond them",
        "nothing, again", "TraceML",
    )  # fmt: skip
    for clock, words in (("wall", "by the wall"), ("cpu", "of the training thread's processor")):
        rows = [
            (
                name, f"{ours[case]['step_us']:.0f}",
                *(_added(ours[case][tool], clock) for tool in _TOOLS),
                _added(peer[case]["traceml"], clock) if case in peer else "-",
            )
            for case, name in _CASES
        ]  # fmt: skip
        print_table(f"Added to a step, µs {words}, median and 95% interval", columns, rows)
    _show_parts(results["resihp"])
    print(f"Records: {results['resihp']['records']}")


def _added(figures: dict[str, float], clock: str) -> str:
    low, high = figures[f"{clock}_low_us"], figures[f"{clock}_high_us"]
    return f"{figures[f'{clock}_us']:.1f} ({low:.1f} to {high:.1f})"


def _show_parts(ours: dict[str, Any]) -> None:
    """What `instrument` adds by what there is of it, from two sizes of a loop."""
    rows = []
    for clock in ("wall", "cpu"):
        for kind in ("plain", "ddp"):
            for tool, words in _IN_PARTS.items():
                few, many = (_middle(ours["cases"][f"{kind}_{count}"][tool], clock)
                             for count in (1, 8))  # fmt: skip
                each, error = (many[0] - few[0]) / 7, (many[1] + few[1]) / 7
                rows.append((f"a microbatch {words}, {kind}, {clock}", each, error))
                rows.append((f"a step {words}, {kind}, {clock}", few[0] - each, few[1]))
        few, many = (_middle(ours["cases"][f"fsdp2_{units}"]["beyond"], clock) for units in (2, 12))
        each, error = (many[0] - few[0]) / 10, (many[1] + few[1]) / 10
        rows.append((f"an FSDP unit, {clock}", each, error))
    shown = [(name, f"{value:.2f}", f"{error:.2f}") for name, value, error in rows]
    shown.append(("a wait within a pass, in a tight loop", f"{ours['wait_us']:.2f}", "-"))
    print_table("Its parts, µs", ("", "added", "±"), shown)


def _middle(figures: dict[str, float], clock: str) -> tuple[float, float]:
    """Median, and half of its interval."""
    half = (figures[f"{clock}_high_us"] - figures[f"{clock}_low_us"]) / 2
    return figures[f"{clock}_us"], half


def _cells(options: argparse.Namespace) -> list[dict[str, Any]]:
    results: list[tuple[Cell, list[Outcome]]] = []
    chosen = [each for each in cells(quick=options.quick) if fnmatch(each.name, options.only)]
    with (
        tempfile.TemporaryDirectory(prefix="resihp-recordings-") as folder,
        busy_processors(options.busy),
    ):
        kept = Path(options.recordings or folder)
        if options.replay:
            found = recorded_cells(chosen, kept)
        else:
            seeds = 1 if options.quick else options.seeds
            found = run_cells(chosen, seeds, kept, peer=options.peer)
        for cell, runs in found:
            results.append((cell, runs))
            shown = " ".join(row(cell, runs, kept))
            print(f"{shown} [{runs[-1].seconds:.0f} s]", file=sys.stderr)
        rows = [row(cell, runs, kept) for cell, runs in results]
    print_table("Ranks named, and steps from the first slow one until they are", COLUMNS, rows)
    return document(results)


if __name__ == "__main__":
    main()
