"""Step time with microbatches that replicas take from each other within a step.

`python -m benchmarks.stealing [--json PATH] [--steps N]`

Four replicas of one process train a small model on real text in ResiHP's engine; their devices are
emulated: each pass lasts as long as its microbatch's work would take. Devices stall for a second in
one of 200 passes, at the same passes in all runs. Times are over those of an assignment that knows
all work and all stalls before the step ("clairvoyant"), and over the least of one that learns of a
stall when it begins ("no foresight", for replicas that begin with their longest microbatches). All
runs sum in the fixed order, so that their losses can be compared to the bit. "simulated": the same
steps in virtual time with the product's own claims, where nothing but passes costs anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._report import machine, print_table, write_json
from benchmarks._stealing_job import (
    LAYOUT,
    Case,
    clairvoyant_ms,
    run_rank,
    run_turns,
    simulated_ms,
    unforeseen_ms,
)
from resihp.testing.local_ranks import LocalRanks

_SKIPPED = 2
_RATIOS = ("of clairvoyant", "of no foresight")
_COLUMNS = ("", "mean step ms", "simulated ms", *_RATIOS, "stolen a step", "same bits")
_PARTS: dict[str, dict[str, Any]] = {
    "uneven": {"stalls": False},
    "stalls": {"uneven": False},
    "uneven and stalls": {},
}
_HOWS: dict[str, dict[str, Any]] = {
    "fixed quotas": {},
    "assigned by work": {"by_work": True},
    "fixed quotas, stealing": {"steals": True},
    "assigned by work, stealing": {"by_work": True, "steals": True},
}


@dataclass(frozen=True)
class Outcome:
    """Result of one job: means over its steps; `losses` in hexadecimal."""

    name: str
    step_ms: float
    simulated_ms: float
    of_clairvoyant: float
    of_unforeseen: float
    stolen: float
    losses: tuple[str, ...]


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=20, help="of a job with stalls")
    parser.add_argument("--turns", type=int, default=80, help="steps for the cost")
    parser.add_argument("--simulated", type=int, default=200, help="steps in virtual time")
    parser.add_argument("--only", choices=(*_PARTS, "cost", "simulated"))
    options = parser.parse_args()
    figures: dict[str, object] = {}
    for name, more in _PARTS.items():
        if options.only in (None, name):
            figures[name] = _table(name, Case("", options.steps, **more))
    if options.only in (None, "simulated"):
        figures["simulated"] = _simulate(options.simulated)
    if options.only in (None, "cost"):
        figures["cost"] = _cost(options.turns)
    print(f"\n{machine()}")
    if options.json:
        write_json(options.json, figures)


def _table(name: str, case: Case) -> list[dict[str, object]]:
    found = [_measured(replace(case, name=how, **more)) for how, more in _hows(case).items()]
    if case.stalls and case.uneven:
        last = replace(case, name="the same, sums in any order", by_work=True, steals=True)
        found.append(_measured(replace(last, deterministic=False)))
    rows = [
        [
            one.name,
            f"{one.step_ms:.0f}",
            f"{one.simulated_ms:.0f}",
            f"{one.of_clairvoyant:.3f}",
            f"{one.of_unforeseen:.3f}",
            f"{one.stolen:.1f}",
            "yes" if one.losses == found[0].losses else "no",
        ]
        for one in found
    ]
    print_table(f"Four replicas, 16 microbatches of about 100 ms each: {name}", _COLUMNS, rows)
    return [asdict(one) for one in found]


def _hows(case: Case) -> dict[str, dict[str, Any]]:
    return {how: more for how, more in _HOWS.items() if case.uneven or not more.get("by_work")}


def _simulate(steps: int) -> list[list[str]]:
    rows = []
    for name, part in _PARTS.items():
        case = Case("", steps, **part)
        known = sum(clairvoyant_ms(case, step) for step in range(steps))
        unforeseen = sum(unforeseen_ms(case, step) for step in range(steps))
        for how, more in _hows(case).items():
            total = sum(simulated_ms(replace(case, **more), step) for step in range(steps))
            ratios = (f"{total / known:.3f}", f"{total / unforeseen:.3f}")
            rows.append([f"{name}: {how}", f"{total / steps:.0f}", *ratios])
    print_table(f"Simulated, {steps} steps each", ("", "mean step ms", *_RATIOS), rows)
    return rows


def _measured(case: Case) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="resihp-stealing-") as name:
        folder = Path(name)
        with LocalRanks("stealing", folder) as ranks:
            ranks.start(LAYOUT.ranks, run_rank, case, folder)
            if any(ranks.wait(400.0).values()):
                raise RuntimeError(ranks.logs())
        steps = json.loads((folder / "steps.json").read_text())
    counted = range(_SKIPPED, case.steps)
    total = sum(steps[step]["ms"] for step in counted)
    return Outcome(
        case.name,
        total / len(counted),
        statistics.mean(simulated_ms(case, step) for step in counted),
        total / sum(clairvoyant_ms(case, step) for step in counted),
        total / sum(unforeseen_ms(case, step) for step in counted),
        statistics.mean(steps[step]["stolen"] for step in counted),
        tuple(step["loss"] for step in steps),
    )


def _cost(turns: int) -> dict[str, float]:
    """Compare steps of equal microbatches with claims and without, in one run."""
    case = Case("", turns, uneven=False, stalls=False, steals=True, ms=25.0, deterministic=False)
    with tempfile.TemporaryDirectory(prefix="resihp-stealing-") as name:
        folder = Path(name)
        with LocalRanks("stealing", folder) as ranks:
            ranks.start(LAYOUT.ranks, run_turns, case, folder)
            if any(ranks.wait(400.0).values()):
                raise RuntimeError(ranks.logs())
        lines = json.loads((folder / "turns.json").read_text())[4:]
    with_ms = statistics.median(ms for has, ms, _, _ in lines if has)
    without_ms = statistics.median(ms for has, ms, _, _ in lines if not has)
    waited_ms = statistics.median(waited for has, _, waited, _ in lines if has)
    stolen = statistics.mean(stolen for has, _, _, stolen in lines if has)
    row = [
        f"{with_ms:.1f}",
        f"{without_ms:.1f}",
        f"{with_ms / without_ms - 1.0:+.2%}",
        f"{waited_ms:.2f}",
        f"{waited_ms / without_ms:.2%}",
        f"{stolen:.2f}",
    ]
    columns = ("with claims ms", "without ms", "cost", "waiting for claims ms", "share", "stolen")
    print_table("While nothing happens: 16 microbatches of 25 ms on each replica", columns, [row])
    return {"with_ms": with_ms, "without_ms": without_ms, "waited_ms": waited_ms, "stolen": stolen}


if __name__ == "__main__":
    main()
