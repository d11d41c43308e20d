"""Step time of a DDP job with one slow rank: even, without that rank, and with `Quotas`.

Four processes train a small model on real text, 16 microbatches a step; their devices are emulated
(`_quotas_loop`). Times are over the least that the devices could take: all work divided by the sum
of their speeds ("fluid"), and where all microbatches are equal also over the best assignment of
whole microbatches, which no loop that keeps them whole can beat. "assigned" is what the assignment
itself leaves of that, without any cost of the machine that emulates the devices.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from json import loads
from pathlib import Path
from typing import Any

from benchmarks._quotas_loop import (
    MICROBATCHES,
    Case,
    run_rank,
    tokens_of,
    undisturbed_losses,
    work_of,
)
from benchmarks._report import machine, print_table, write_json
from resihp.elastic.microbatches.balancing import at_least_one, last_end, quotas_by_speed
from resihp.testing.local_ranks import LocalRanks
from service import Sidecar

_SETTLED = 5
"""Steps at the begin that are not counted, and after the onset or the plan."""
_ONSET = 15
COLUMNS = (
    *("", "quotas", "step ms", "of fluid", "assigned", "of best whole", "loss differs by"),
    "plan in force",
)


@dataclass(frozen=True)
class Outcome:
    """Result of one job.

    step_ms  median
    fluid    median over the steps of the time, over all work divided by all speeds
    assigned  the same of the end that the assignments imply
    whole    the same over the best assignment of whole microbatches; None where they are unequal
    loss     largest relative difference of a step's loss from that of one undisturbed process
    waited   steps from the onset to the first step with the plan; None without a plan
    """

    name: str
    quotas: tuple[int, ...]
    step_ms: float
    fluid: float
    assigned: float
    whole: float | None
    loss: float
    waited: int | None


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--factors", type=float, nargs="+", default=[1.5, 2.0])
    parser.add_argument("--steps", type=int, default=24, help="of a job without sidecar")
    parser.add_argument("--sidecar-steps", type=int, default=110)
    parser.add_argument("--no-sidecar", dest="sidecar", action="store_false")
    parser.add_argument("--no-scripted", dest="scripted", action="store_false")
    parser.add_argument("--ms", type=float, default=100.0, help="of a microbatch of 192 tokens")
    parser.add_argument("--only", choices=("equal", "unequal"))
    options = parser.parse_args()
    figures = {}
    for unequal in (False, True):
        kind = "unequal" if unequal else "equal"
        if options.only not in (None, kind):
            continue
        healthy = Case("all healthy, plain DDP", options.steps, unequal=unequal, ms=options.ms)
        most = options.sidecar_steps if options.sidecar else options.steps
        losses = undisturbed_losses(replace(healthy, steps=most))
        found = []
        if options.scripted:
            found = [_measured(case, losses) for case in _cases(healthy, options.factors)]
        if options.sidecar:
            watched = replace(healthy, steps=options.sidecar_steps)
            found += _with_sidecar(watched, options.factors, losses)
        text = "documents of 48 to 512 bytes" if unequal else "192 bytes"
        print_table(f"DDP x4, {MICROBATCHES} microbatches of {text}", COLUMNS, map(_row, found))
        figures[kind] = [asdict(one) for one in found]
    print(f"\n{machine()}")
    if options.json:
        write_json(options.json, figures)


def _cases(healthy: Case, factors: list[float]) -> Iterator[Case]:
    yield healthy
    hows = ("count", "work") if healthy.unequal else ("count",)
    for how in hows:
        yield replace(healthy, name=f"all healthy, quotas by {how}", quotas=how)
    for factor in factors:
        slow = replace(healthy, name=f"x{factor:g}: nothing done", factor=factor)
        yield slow
        without = replace(healthy, ranks=3, left_out=factor, quotas="count")
        yield replace(without, name=f"x{factor:g}: without that rank")
        planned = at_least_one(quotas_by_speed(MICROBATCHES, slow.speeds(0)))
        for how in hows:
            yield replace(slow, name=f"x{factor:g}: quotas, by {how}", quotas=how, planned=planned)


def _with_sidecar(healthy: Case, factors: list[float], losses: list[float]) -> Iterator[Outcome]:
    how = "work" if healthy.unequal else "count"
    folder = tempfile.TemporaryDirectory(prefix="resihp-quotas-")
    with folder as data, Sidecar(Path(data)) as sidecar:
        slow = replace(healthy, since=_ONSET, quotas=how, url=sidecar.url)
        for factor in factors:
            name = f"x{factor:g} from step {_ONSET} on: quotas of the sidecar, by {how}"
            yield _measured(replace(slow, name=name, factor=factor), losses)


def _measured(case: Case, losses: list[float]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="resihp-quotas-") as folder:
        name = f"quotas-{abs(hash(case))}"
        with LocalRanks(name, Path(folder)) as ranks:
            ranks.start(range(case.ranks), run_rank, replace(case, name=name), Path(folder))
            if any(ranks.wait(400.0).values()):
                raise RuntimeError(ranks.logs())
        files = [Path(folder) / f"rank-{rank}.json" for rank in range(case.ranks)]
        kept = [loads(file.read_text()) for file in files]
    planned = [number for number, line in enumerate(kept[0]) if line["version"]]
    has_source = bool(case.planned or case.url)
    begin = (planned[0] if planned else case.since) + _SETTLED
    counted = range(begin, case.steps)
    fluid, assigned, whole, times = [], [], [], []
    for step in counted:
        speeds, work = case.speeds(step), work_of(case, step)
        own = [list(map(int, of_rank[step]["losses"])) for of_rank in kept]
        end = last_end(own, work, speeds)
        if case.left_out:
            speeds = [*speeds, 1.0 / case.left_out]  # it counts in what the devices could do
        ms, least_ms = kept[0][step]["ms"], case.ms * sum(work) / sum(speeds)
        times.append(ms)
        fluid.append(ms / least_ms)
        assigned.append(case.ms * end / least_ms)
        best = quotas_by_speed(MICROBATCHES, speeds)
        end = max(quota / speed for quota, speed in zip(best, speeds, strict=True))
        whole.append(ms / (case.ms * end))
    outcome = Outcome(
        case.name,
        tuple(kept[0][-1]["quotas"]),
        statistics.median(times),
        statistics.median(fluid),
        statistics.median(assigned),
        None if case.unequal else statistics.median(whole),
        max(_difference(case, kept, step, losses) for step in range(case.steps)),
        planned[0] - case.since if has_source and planned else None,
    )
    print(outcome, flush=True)
    return outcome


def _difference(
    case: Case, kept: list[list[dict[str, Any]]], step: int, losses: list[float]
) -> float:
    parts: list[float] = [loss for of_rank in kept for loss in of_rank[step]["losses"].values()]
    assert len(parts) == MICROBATCHES, "each microbatch once"
    return abs(sum(parts) / tokens_of(case, step) / losses[step] - 1.0)


def _row(one: Outcome) -> list[str]:
    return [
        one.name,
        " ".join(map(str, one.quotas)),
        f"{one.step_ms:.0f}",
        f"{one.fluid:.3f}",
        f"{one.assigned:.3f}",
        "" if one.whole is None else f"{one.whole:.3f}",
        f"{one.loss:.1e}",
        "" if one.waited is None else f"after {one.waited} steps",
    ]


if __name__ == "__main__":
    main()
