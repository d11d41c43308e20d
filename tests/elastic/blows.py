"""Blows to the processes of a user's loop: a signal at a given point of a step."""

from __future__ import annotations

import os
import pkgutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from resihp.elastic.ddp import state_sync as user_state
from resihp.elastic.ddp.replicas import Replicas

# Methods that a process enters at certain points of a step.
INSIDE = {"sum": "_reduce", "vote": "_vote", "commit": "_complete", "recovery": "_apply"}


@dataclass(frozen=True)
class Blow:
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


def strike(blows: list[Blow], folder: Path, at: str, step: int, count: int = 1) -> None:
    """Deal the first of `blows` that is due here, if any."""
    for blow in blows:
        if (blow.at, blow.step) == (at, step) and (at != "microbatch" or blow.count == count):
            blows.remove(blow)
            if blow.resume_s:
                told = folder / f"stops-{blow.rank}"
                told.with_suffix(".new").write_text(str(os.getpid()))
                told.with_suffix(".new").rename(told)
            os.kill(os.getpid(), blow.signal)
            return


def strike_inside(replicas: Replicas, blows: list[Blow], folder: Path) -> None:
    """Deal blows when `replicas` comes to the points that it goes through by itself."""
    for at, name in INSIDE.items():
        original = getattr(replicas, name)

        def entered(*arguments: Any, at: str = at, original: Any = original) -> None:
            strike(blows, folder, at, replicas.completed)
            original(*arguments)

        setattr(replicas, name, entered)
    for blow in blows:
        if blow.at in ("give", "take"):
            _strike_at_state(blow)


def _strike_at_state(blow: Blow) -> None:
    """Kill when state is given, or taken, for the `count`-th time."""
    place = "StateBroadcast._run" if blow.at == "give" else "empties"
    original, left = pkgutil.resolve_name(f"{user_state.__name__}:{place}"), [blow.count]

    def entered(*arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), blow.signal)
        return original(*arguments)

    mock.patch(f"{user_state.__name__}.{place}", entered).start()


def is_stopped(told: Path) -> bool:
    """Whether the process that has said that it will stop has done so."""
    if not told.exists():
        return False
    return Path(f"/proc/{told.read_text()}/stat").read_text().rpartition(")")[2].split()[0] == "T"
