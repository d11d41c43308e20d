"""What survivors decide after a loss, as a pure function of what each of them reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from resihp.contracts import StateLostError


@dataclass(frozen=True)
class Report:
    """What one survivor knows.

    epoch      world whose state it holds
    completed  steps whose update it has made
    reduced    it holds the whole summed gradient of step `completed`
    norm       norm of the last step for which it learned one, with that step; None before the first
    doubt      epoch whose complete state it holds as well, not knowing whether others took it on
    seen       highest epoch of which it has heard
    idle       it has no place in its world and so holds no state
    """

    epoch: int
    completed: int
    reduced: bool = False
    norm: tuple[int, float] | None = None
    doubt: int | None = None
    seen: int = 0
    idle: bool = False


@dataclass(frozen=True)
class Decision:
    """What all survivors do: take `epoch`, complete step `completed - 1`, build `next_epoch`."""

    survivors: tuple[int, ...]
    epoch: int
    completed: int
    norm: float | None
    next_epoch: int


def decide(reports: Mapping[int, Report], dead: Collection[int] = ()) -> Decision:
    """The one well-defined state from which the survivors go on.

    A world that anyone has committed holds, because all others have its complete state. A step
    that anyone knows to be whole is completed, because all others hold its gradients; otherwise
    it is given up everywhere. Raises `StateLostError` if the reports contradict that.
    """
    alive = {rank: report for rank, report in reports.items() if rank not in dead}
    epoch = max(report.epoch for report in alive.values())
    norms = {report.norm for report in alive.values() if report.norm is not None}
    known = max((step for step, _ in norms), default=-1)
    completed = max([known + 1, *(report.completed for report in alive.values())])
    norm = next((value for step, value in norms if step == completed - 1), None)
    for rank, report in sorted(alive.items()):
        if report.idle and report.doubt is None:
            continue
        if epoch not in (report.epoch, report.doubt):
            raise StateLostError(f"rank {rank} holds no state of epoch {epoch}")
        behind = completed - report.completed
        if behind > 1 or (behind == 1 and not (report.reduced and norm is not None)):
            raise StateLostError(f"rank {rank} cannot complete step {completed - 1}")
    seen = max(max(report.seen, report.epoch) for report in alive.values())
    return Decision(tuple(sorted(alive)), epoch, completed, norm, seen + 1)
