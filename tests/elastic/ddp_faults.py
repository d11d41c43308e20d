"""Blows to the processes of a user's loop: a signal at a given point of a step."""

from __future__ import annotations

import os
import pkgutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from resihp.elastic.ddp import state_sync
from resihp.elastic.ddp.replicas import Replicas

# Methods that a process enters at certain points of a step.
INSIDE = {"sum": "_reduce", "vote": "_vote", "commit": "_complete", "recovery": "_apply"}


@dataclass(frozen=True)
class LoopFault:
    """Process `rank` gets a signal in step `step`.

    at        `microbatch` (behind its `count`-th one), those of `INSIDE`, `after` (the update),
              `give` and `take` (the `count`-th time that it gives or takes state; in any step)
    resume_s  so long after a SIGSTOP it is let go on; at the latest when the other replicas have
              ended
    life      how often it has come back before
    """

    rank: int
    step: int
    count: int = 1
    at: str = "microbatch"
    signal: int = signal.SIGKILL
    resume_s: float = 0.0
    life: int = 0


def inject(faults: list[LoopFault], folder: Path, at: str, step: int, count: int = 1) -> None:
    """Inject the first of `faults` that is due here, if any."""
    for fault in faults:
        if (fault.at, fault.step) == (at, step) and (at != "microbatch" or fault.count == count):
            faults.remove(fault)
            if fault.resume_s:
                told = folder / f"stops-{fault.rank}"
                told.with_suffix(".new").write_text(str(os.getpid()))
                told.with_suffix(".new").rename(told)
            os.kill(os.getpid(), fault.signal)
            return


def inject_inside(replicas: Replicas, faults: list[LoopFault], folder: Path) -> None:
    """Inject faults when `replicas` comes to the points that it goes through by itself."""
    for at, name in INSIDE.items():
        original = getattr(replicas, name)

        def entered(*arguments: Any, at: str = at, original: Any = original) -> None:
            inject(faults, folder, at, replicas.completed)
            original(*arguments)

        setattr(replicas, name, entered)
    for fault in faults:
        if fault.at in ("give", "take"):
            _inject_at_state(fault)


def _inject_at_state(fault: LoopFault) -> None:
    """Kill when state is given, or taken, for the `count`-th time."""
    place = "StateBroadcast._run" if fault.at == "give" else "empties"
    original, left = pkgutil.resolve_name(f"{state_sync.__name__}:{place}"), [fault.count]

    def entered(*arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), fault.signal)
        return original(*arguments)

    mock.patch(f"{state_sync.__name__}.{place}", entered).start()


def is_stopped(told: Path) -> bool:
    """Whether the process that has said that it will stop has done so."""
    if not told.exists():
        return False
    return Path(f"/proc/{told.read_text()}/stat").read_text().rpartition(")")[2].split()[0] == "T"
