"""Cost of a change of layout for a running job: live, and by stop and restart.

Live: the pause of training, the longest of all ranks; and the duration of the step during which the
state is copied and of the first step in the new layout, with the usual step of each layout.
Lower bound of the bytes: parameters and moments of the ranges that a rank lacks; and, because they
are copied before the step's update, the gradients of the same ranges.
With `--copying N` only the duration of those steps, in N changes there and back of one job, beside
that of a usual step before, which has no copy, each over the mean of two others, and until the
gradients are summed: the update is that of the new layout; and the processor time of the copy
itself, and of moving the gradients, on all ranks. Once where the cores, which all ranks share, do
nothing but train, and once with emulated devices: a rank is held until its pass has taken twice as
long, so that half of the cores is free, as beside accelerators.
With `--link-mbs N` only the pause where ranks exchange through sockets, from which each takes N MB
a second (emulated: its thread sleeps): with the copy spread over as many steps as it needs, and at
once.
With `--warm-up N` only the duration of the first step with a rank that was idle, over a usual step
of that layout, in N pairs of jobs: one with the warm-up of its stage, and one without; and that
rank's processor time in it beyond that in its later steps.
Restart: save with torch's distributed checkpoint, start new processes, build their state, load with
resharding; the same number of elements, one rank fewer. Both on this machine, nothing emulated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks._report import machine, print_table, write_json
from benchmarks._resize_live import (
    CHANGES,
    LIMIT,
    OPTIMIZER,
    SHAPES,
    Change,
    Way,
    copying_steps,
    live,
    through_link,
)
from resihp.elastic.models import Llama
from resihp.layout import least_numel

COLUMNS = (
    "model",
    "change",
    "pause ms",
    "restart ms",
    "ratio",
    "moved MB",
    "least MB",
    "gradients MB",
    "their least MB",
    "twice MiB",
    "measured MiB",
    "in files MiB",
    "prepare ms",
    "step ms",
    "copying step ms",
    "first new step ms",
    "new step ms",
)
COPYING = (
    *("model", "change", "passes", "changes", "usual ms"),
    *(
        "copying",
        "its quartiles",
        "another",
        "quartiles of that",
        "copy, processor ms",
        "gradients",
    ),
)
LINK = (
    *("model", "change", "MB/s", "MB of one rank", "usual step ms", "steps of the copy"),
    *("longest beside it ms", "pause ms", "at once: pause ms"),
)
WARM_UP = (
    *("model", "pairs", "usual ms", "warmed up", "its quartiles", "cold", "quartiles of that"),
    *("beyond, processor ms", "the same, cold"),
)
USUAL_SIZES = ("30M", "100M")
Seen = dict[str, float]
Round = dict[str, dict[str, Seen]]
"""By size and change."""


def main() -> None:
    """Measure, print, and write JSON where asked."""
    options = _options()
    sizes = options.size or USUAL_SIZES
    changes, moving = options.changes, options.moving
    if options.copying:
        rows = []
        for size, change in product(sizes, moving):
            for row in copying(size, change, options.copying):
                print(*row, flush=True)
                rows.append(row)
        report("Copying steps, and another step, over the usual step", COPYING, rows, options.json)
        return
    if options.link_mbs:
        rows = [link(size, change, options.link_mbs) for size, change in product(sizes, moving)]
        report("Change of layout through slow links", LINK, rows, options.json)
        return
    if options.warm_up:
        rows = [warm_up(size, options.warm_up) for size in sizes]
        report("First step with a new rank, over the usual step", WARM_UP, rows, options.json)
        return

    def one_round() -> Round:
        return {size: seen_once(size, changes, attach=not options.sockets) for size in sizes}

    rounds = measure(one_round, options.repeats, options.minutes * 60)
    rows = [row for s in sizes for row in summary(s, changes, [one[s] for one in rounds])]
    way = "through sockets" if options.sockets else "between ranks of one host"
    title = f"Change of layout: live {way} against stop and restart, medians of {len(rounds)}"
    report(title, COLUMNS, rows, options.json, rounds=len(rounds))
    print(f"held twice at most: {LIMIT.limit_bytes >> 20} MiB allowed")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--size",
        choices=sorted(SHAPES),
        action="append",
        help=f"default {' and '.join(USUAL_SIZES)}; 350M takes 12 GiB and many minutes",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--change", choices=[change.name for change in CHANGES], action="append")
    parser.add_argument(
        "--sockets",
        action="store_true",
        help="exchange as between hosts, without reading another rank's memory",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="no further round after that")
    parser.add_argument(
        "--copying", type=int, metavar="N", help="the copying steps alone, in so many changes"
    )
    parser.add_argument(
        "--link-mbs",
        type=float,
        metavar="N",
        help="through links of N MB/s alone: the copy spread over steps, and at once",
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        metavar="N",
        help="a new rank's first step alone, in so many pairs",
    )
    options = parser.parse_args()
    if options.copying is not None and options.copying < 4:
        parser.error("--copying: at least 4 changes, for quartiles")
    if options.warm_up is not None and options.warm_up < 2:
        parser.error("--warm-up: at least 2 pairs, for quartiles")
    options.changes = [c for c in CHANGES if c.name in (options.change or [c.name])]
    options.moving = [change for change in options.changes if change.old != change.new]
    if (options.copying or options.link_mbs) and not options.moving:
        parser.error("--copying and --link-mbs: the change moves no state")
    return options


def report(
    title: str, columns: Sequence[str], rows: list[list[Any]], path: Path | None, **others: int
) -> None:
    """Print a table, and write it with `others` where asked."""
    print(machine())
    print_table(title, columns, rows)
    if path:
        write_json(path, {**others, "rows": [dict(zip(columns, row, strict=True)) for row in rows]})


def measure(one_round: Callable[[], Round], repeats: int, most_s: float) -> list[Round]:
    """Whole rounds over all sizes and changes, at least one, as far as `most_s` allows."""
    rounds: list[Round] = []
    start = time.monotonic()
    while len(rounds) < repeats:
        rounds.append(one_round())
        spent_s = time.monotonic() - start
        if spent_s * (1 + 1 / len(rounds)) > most_s:
            break
    return rounds


def seen_once(size: str, changes: list[Change], *, attach: bool) -> dict[str, Seen]:
    """Measure the restart and each change, by name, once.

    The files of the restart are synced to the disk before the first change is measured.
    """
    seen: dict[str, Seen] = {"restart": {"ms": restart_ms(_numel(size))}}
    os.sync()
    for change in changes:
        seen[change.name] = live(SHAPES[size], change, Way(attach=attach))
        paused, restart = seen[change.name]["pause_ms"], seen["restart"]["ms"]
        print(size, change.name, f"{paused:.1f} ms, restart {restart:.0f} ms", flush=True)
    return seen


def summary(size: str, changes: list[Change], rounds: list[dict[str, Seen]]) -> list[list[Any]]:
    """One row for each change."""
    restart = statistics.median(one["restart"]["ms"] for one in rounds)
    rows = []
    for change in changes:
        seen = [one[change.name] for one in rounds]
        middle = {key: statistics.median(one[key] for one in seen) for key in seen[0]}
        parameters = Llama(SHAPES[size]).parameters
        once = least_numel(change.old, change.new, parameters) * 4
        state = [middle["received_bytes"], once * OPTIMIZER.copies]
        moved = [*state, middle["gradient_bytes"], once]
        held = [middle[key] for key in ("extra_bytes", "measured_bytes", "spilled_bytes")]
        rows.append(
            [
                f"{_numel(size) / 1e6:.0f}M",
                change.name,
                round(middle["pause_ms"], 1),
                round(restart),
                f"{restart / middle['pause_ms']:.0f}x",
                *(round(count / 1e6, 1) for count in moved),
                *(round(count / 2**20, 1) for count in held),
                *(round(middle[key]) for key in ("prepare_ms", "old", "copying", "first", "new")),
            ]
        )
    return rows


def copying(size: str, change: Change, changes: int) -> Iterator[list[Any]]:
    """Rows of the copying steps of one change and of the way back: medians and quartiles.

    Made by the cores, which all ranks share, and by emulated devices that leave half of them free.
    """
    seen, flops_per_ms = copying_steps(SHAPES[size], change, changes)
    paced, _ = copying_steps(SHAPES[size], change, changes, flops_per_ms / 2)
    ways = ((change.name, slice(0, None, 2)), ("and back", slice(1, None, 2)))
    both = product((("on all cores", seen), ("of a device", paced)), ways)
    for (passes, steps), (way, chosen) in both:
        some = steps[chosen]
        usual = statistics.median(one["usual"] for one in some)
        row: list[Any] = [f"{_numel(size) / 1e6:.0f}M", way, passes, len(some), round(usual)]
        for step in ("copying", "another"):
            row += _quartiles([one[step] / one["usual"] for one in some])
        yield [
            *row,
            *(round(statistics.median(one[k] for one in some)) for k in ("copy", "gradients")),
        ]


def link(size: str, change: Change, mbs: float) -> list[Any]:
    """Row of a change through slow links."""
    way = Way(attach=False, link_mbs=mbs)
    spread, at_once = (
        through_link(SHAPES[size], change, one) for one in (way, replace(way, at_once=True))
    )
    shown = (spread[key] for key in ("usual", "steps", "beside", "pause"))
    return [
        f"{_numel(size) / 1e6:.0f}M",
        change.name,
        round(mbs),
        round(spread["received"] / 1e6),
        *map(round, shown),
        round(at_once["pause"]),
    ]


def warm_up(size: str, pairs: int) -> list[Any]:
    """Row of the first step of a rank that was idle, with its warm-up and without."""
    (change,) = (one for one in CHANGES if one.name == "3 -> 4 ranks")
    both = (True, False)
    seen = [
        {warmed: live(SHAPES[size], change, Way(warmed=warmed)) for warmed in both}
        for _ in range(pairs)
    ]
    usual = statistics.median(one[warmed]["new"] for one in seen for warmed in both)
    row: list[Any] = [f"{_numel(size) / 1e6:.0f}M", pairs, round(usual)]
    for warmed in both:
        row += _quartiles([one[warmed]["first"] / one[warmed]["new"] for one in seen])
    beyond = (statistics.median(one[warmed]["first_beyond_ms"] for one in seen) for warmed in both)
    return [*row, *map(round, beyond)]


def _quartiles(ratios: list[float]) -> list[str]:
    """The median, and the other two."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return [f"{middle:.3f}", f"{low:.3f} to {high:.3f}"]


def _numel(size: str) -> int:
    parameters = Llama(SHAPES[size]).parameters
    return sum(param.size * param.row_numel for param in parameters.all)


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


def _launch(what: str, ranks: int, folder: Path, numel: int) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(part) for part in (ranks, port, folder, numel)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks._resize_restart", what, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    timing: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return timing


if __name__ == "__main__":
    main()
