"""Blows to the processes of a user's loop: a signal at a given point of a step."""

from __future__ import annotations

import os
import pkgutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn

from resihp.contracts import PeerLostError
from resihp.elastic.ddp import state_sync
from resihp.elastic.ddp.replicas import Replicas
from resihp.elastic.process_groups.bucketed_allreduce import _Bucket

# Methods that a process enters at certain points of a step.
INSIDE = {
    "start": "_enter_job",
    "sum": "_reduce",
    "vote": "_vote",
    "commit": "_complete",
    "recovery": "_apply",
}
# Methods whose success a process does not hear of, as if a peer had died meanwhile.
UNHEARD = {"unheard vote": "_vote", "unheard connection": "_connect"}
COUNTED = ("microbatch", "forward", "backward", "exchange")


@dataclass(frozen=True)
class LoopFault:
    """Process `rank` gets a signal in step `step`.

    at        `microbatch` (behind its `count`-th one), `forward` and `backward` (within its
              `count`-th one), `exchange` (before its `count`-th bucket, when its peers have the
              sums of those before), those of `INSIDE`, those of `UNHEARD` (no signal), `optimizer`
              (within its update), `after` (the update), `give` and `take` (the `count`-th time that
              it gives or takes state; in any step)
    resume_s  so long after a SIGSTOP it is let go on; at the latest when all others have ended
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
        if (fault.at, fault.step) == (at, step) and (at not in COUNTED or fault.count == count):
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

        def entered(*arguments: Any, at: str = at, original: Any = original) -> Any:
            inject(faults, folder, at, replicas.completed)
            return original(*arguments)

        setattr(replicas, name, entered)
    for at, name in UNHEARD.items():
        original = getattr(replicas, name)

        def left(*arguments: Any, at: str = at, original: Any = original, **named: Any) -> Any:
            result = original(*arguments, **named)
            for fault in [one for one in faults if (one.at, one.step) == (at, replicas.completed)]:
                faults.remove(fault)
                raise PeerLostError(at)
            return result

        setattr(replicas, name, left)
    for fault in faults:
        if fault.at in ("give", "take"):
            _inject_at_state(fault)


def inject_in_passes(
    replicas: Replicas, model: nn.Module, faults: list[LoopFault], folder: Path
) -> None:
    """Inject faults in the middle of forward, of backward, and of the update."""
    inner = list(model.children())[len(list(model.children())) // 2]
    passes = {"forward": 0, "backward": 0}
    present = [-1]

    def counted(at: str) -> None:
        if present[0] != replicas.completed:
            present[0] = replicas.completed
            passes.update(forward=0, backward=0)
        passes[at] += 1
        inject(faults, folder, at, replicas.completed, passes[at])

    inner.register_forward_pre_hook(lambda *_: counted("forward"))
    inner.register_full_backward_pre_hook(lambda *_: counted("backward"))
    for optimizer in replicas._optimizers:
        optimizer.register_step_pre_hook(
            lambda *_: inject(faults, folder, "optimizer", replicas.completed - 1)
        )


def inject_in_exchange(
    replicas: Replicas, faults: list[LoopFault], folder: Path, tell: Callable[[], None]
) -> None:
    """Inject faults between two buckets; `tell` is called for each that starts to travel."""
    start, wait = _Bucket.start, _Bucket.wait
    counts = {"started": 0, "summed": 0}
    present: list[tuple[int, int]] = [(-1, -1)]
    members = replicas.coordinates.members

    def renew() -> None:
        attempt = (replicas.completed, replicas._rendezvous.recovery)
        if present[0] != attempt:
            present[0] = attempt
            counts.update(started=0, summed=0)

    def started(bucket: _Bucket) -> None:
        renew()
        counts["started"] += 1
        for fault in faults:
            if (fault.at, fault.step) == ("exchange", replicas.completed):
                index = replicas.coordinates.rank % members
                peers = {r * members + index for r in replicas.alive} - {replicas.coordinates.rank}
                if fault.count == counts["started"]:
                    _await_sums(folder, peers, replicas.completed, fault.count - 1)
        inject(faults, folder, "exchange", replicas.completed, counts["started"])
        tell()
        start(bucket)

    def waited(bucket: _Bucket) -> None:
        wait(bucket)
        if bucket.work is not None:
            renew()
            counts["summed"] += 1
            rank = replicas.coordinates.rank
            (folder / f"summed-{rank}-{replicas.completed}-{counts['summed']}").touch()

    mock.patch.object(_Bucket, "start", started).start()
    mock.patch.object(_Bucket, "wait", waited).start()


def _await_sums(folder: Path, peers: set[int], step: int, buckets: int) -> None:
    """Wait until all `peers` have the sums of so many buckets."""
    deadline = time.monotonic() + 60
    while not all((folder / f"summed-{peer}-{step}-{buckets}").exists() for peer in peers):
        assert time.monotonic() < deadline, "no sums of the peers"
        time.sleep(0.005)


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
