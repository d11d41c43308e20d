"""What only a CUDA device can show, in four parts of at most nine minutes: `make gpu`.

1  hooks and `instrument` on a device, CUDA graphs, and checkpoints through pinned memory
2  four ranks on one device: the elastic engine, over the host and over NCCL, and ordinary loops
   with a slow rank
3  NCCL, one to three ranks on one device, and hand-over by CUDA IPC
4  every kind of ordinary loop with a rank that is slow in some of its passes, or has more work

Each part ends with one table. Every row runs in processes of its own with a deadline, so that a row
that fails or hangs costs no other; a row for which no time is left says so. Where there is no
device, no part runs. `--device cpu` runs the rows on the host, for a machine with a core for each
rank: gloo, and shared memory in the place of CUDA IPC. `--rehearse` runs tiny sizes there: it shows
that rows run, and its figures mean nothing. Needs torch 2.11, numpy, msgpack and urllib3, and
nothing of a service.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._gpu_rows import COLUMNS, Row
from benchmarks._gpu_runner import Measurement, measure
from benchmarks._report import machine, print_table, write_json

MINUTES = 9.0
OLDEST_TORCH = (2, 11)
CHANGES = (
    "TP2 x PP2 -> TP1, layers 5 + 3",
    "DP2 -> DP1, shares 5 + 3",
    "4 -> 3 ranks",
    "3 -> 4 ranks",
    "quotas only",
)
ALL_CHANGES = ("31M", "1B")
"""Models of which every change is made."""
_HOOKS, _CHECKPOINT, _ENGINE, _NCCL, _IPC, _LOOPS = (
    f"benchmarks._gpu_{name}" for name in ("hooks", "checkpoint", "engine", "nccl", "ipc", "loops")
)
KINDS = ("ddp", "fsdp2", "tensor_parallel", "1f1b")
ALL_KINDS = (*KINDS, "hsdp", "interleaved", "zero_bubble")
SLOW_PASSES: tuple[tuple[float, tuple[str, ...]], ...] = (
    (1.2, ("forward", "backward")),
    (1.5, ("forward",)),
    (1.5, ("backward",)),
    (1.5, ("forward", "backward")),
)
MODES = (
    "ResiHP",
    "dcp.async_save, thread",
    "dcp.async_save, async stager",
    "torch's experimental checkpointer",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, print their tables, and write JSON where asked."""
    options = _options(arguments)
    device = "cpu" if options.rehearse else options.device
    why = None if device == "cpu" else refusal()
    if why is not None:
        print(f"{why}\n0 parts run")
    document: dict[str, Any] = {"device": device, "why": why, "parts": {}}
    for number in () if why else sorted(set(options.part or PARTS)):
        title, measurements = PARTS[number]
        title = f"Part {number}: {title}" + (" (rehearsal, CPU)" if options.rehearse else "")
        print(f"{title}, at most {options.minutes:g} minutes", flush=True)
        chosen = [one for one in measurements(device, options.rehearse) if options.only in one.name]
        rows = measure(chosen, options.minutes * 60, _tell)
        print(f"\n{machine()}")
        print_table(title, COLUMNS, [row.cells() for row in rows])
        document["parts"][number] = {"title": title, "rows": [row.to_json() for row in rows]}
        _write(options.json, document)
    _write(options.json, document)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", type=int, choices=sorted(PARTS), action="append")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for each part (default 9)")
    parser.add_argument("--only", default="", metavar="WORDS", help="rows with them in their name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    return parser.parse_args(arguments)


def refusal() -> str | None:
    """Reason for which no part can run in this Python, or None."""
    if importlib.util.find_spec("torch") is None:
        return "This Python has no torch: make gpu PYTHON=... takes one that has."
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        return f"torch {torch.__version__} is too old: 2.11 is needed."
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device."
    return None


def _hooks_and_checkpoints(device: str, small: bool) -> list[Measurement]:
    common = {"device": device, "small": small}
    sizes = (0.01,) if small else (1.0, 4.0, 16.0)
    return [
        Measurement("hooks", f"{_HOOKS}:hooks", common, 90),
        Measurement("instrument", f"{_HOOKS}:instrument", common, 90),
        Measurement("steps without a synchronize", f"{_HOOKS}:synchronizing", common, 60),
        Measurement("CUDA graphs", f"{_HOOKS}:graphs", common, 60),
        Measurement("DDP's backward: waits", f"{_HOOKS}:ddp_waits", common, 100),
        *(
            Measurement(
                f"checkpoint of {gib:g} GiB: copy to the host",
                f"{_CHECKPOINT}:copies",
                {**common, "gib": gib},
                _checkpoint_s(gib),
            )
            for gib in sizes
        ),
        *(
            Measurement(
                f"checkpoint of {gib:g} GiB, {mode}",
                f"{_CHECKPOINT}:slowdown",
                {**common, "gib": gib, "mode": mode},
                _checkpoint_s(gib),
            )
            for mode in MODES
            for gib in sizes
        ),
    ]


def _checkpoint_s(gib: float) -> float:
    """Deadline of one mode: peers write a GiB in a second or two, four times."""
    return 40 + 6 * gib


def _engine(device: str, small: bool) -> list[Measurement]:
    common = {"device": device, "small": small}
    sizes = {"31M": 60.0} if small else {"31M": 60.0, "108M": 60.0, "350M": 90.0, "1B": 120.0}
    makers = ("gloo",) if device == "cpu" else ("staged", "nccl")
    times = 6 if small else 50
    return [
        *(one for maker in makers for one in _faults(maker, common)),
        *(
            Measurement(
                f"{size}, {name}: pause",
                f"{_ENGINE}:change",
                {**common, "size": size, "name": name},
                seconds,
            )
            for size, seconds in sizes.items()
            for name in (CHANGES if size in ALL_CHANGES else CHANGES[:2])
        ),
        *(
            Measurement(
                f"{size}, {CHANGES[0]}, through {maker} groups: pause",
                f"{_ENGINE}:change",
                {**common, "size": size, "name": CHANGES[0], "attach": False, "maker": maker},
                seconds,
            )
            for size, seconds in sizes.items()
            if size in ALL_CHANGES
            for maker in makers
        ),
        Measurement(
            f"{times} changes of layout", f"{_ENGINE}:changes_in_a_row",
            {**common, "count": times}, 110,
        ),
        *(
            Measurement(f"{kind} over NCCL: {what}", f"{_LOOPS}:{what}", {**common, "kind": kind})
            for kind in KINDS
            for what in ("named", "profiled")
        ),
    ]  # fmt: skip


def _faults(maker: str, common: dict[str, Any]) -> list[Measurement]:
    common = {**common, "maker": maker}
    return [
        Measurement(f"{maker}: loss of 5 steps, from the CPU's", f"{_ENGINE}:losses", common, 60),
        *(
            Measurement(
                f"{maker}: SIGKILL in {point}", f"{_ENGINE}:kill", {**common, "point": point}
            )
            for point in ("forward", "backward", "the pause")
        ),
        Measurement(f"{maker}: sharded optimizer state", f"{_ENGINE}:sharded_state", common, 90),
    ]


def _groups(device: str, small: bool) -> list[Measurement]:
    common, times = {"device": device, "small": small}, 6 if small else 50
    makers = ("gloo",) if device == "cpu" else ("nccl", "reconfigure")
    return [
        Measurement("hand-over by CUDA IPC", f"{_IPC}:hand_over", common, 60),
        *(one for maker in makers for one in _groups_of(maker, common, times)),
    ]


def _groups_of(maker: str, common: dict[str, Any], times: int) -> list[Measurement]:
    common = {**common, "maker": maker, "times": times}
    return [
        *(
            Measurement(
                f"{maker}, {world} ranks", f"{_NCCL}:cycles", {**common, "world": world}, 100
            )
            for world in (1, 2, 3)
        ),
        Measurement(f"{maker}, 1 of 3 killed", f"{_NCCL}:kills", common, 60 + 3 * times),
    ]


def _loops(device: str, small: bool) -> list[Measurement]:
    common = {"device": device, "small": small}
    return [
        one
        for kind in ALL_KINDS
        for one in (
            Measurement(f"{kind}, twice the tokens", f"{_LOOPS}:healthy", {**common, "kind": kind}),
            *(
                Measurement(
                    f"{kind}, {factor}x in {' and '.join(passes)}",
                    f"{_LOOPS}:named",
                    {**common, "kind": kind, "factor": factor, "passes": passes},
                )
                for factor, passes in SLOW_PASSES
            ),
        )
    ]


PARTS: dict[int, tuple[str, Callable[[str, bool], list[Measurement]]]] = {
    1: ("hooks, instrument and checkpoints on a device", _hooks_and_checkpoints),
    2: ("four ranks on one device: the elastic engine, and ordinary loops", _engine),
    3: ("NCCL with several ranks on one device, and CUDA IPC", _groups),
    4: ("ordinary loops over NCCL, slow in some of their passes", _loops),
}


def _tell(row: Row) -> None:
    name, *cells = row.cells()
    print(f"{name}: {' | '.join(cells)}", flush=True)


def _write(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, document)


if __name__ == "__main__":
    main()
