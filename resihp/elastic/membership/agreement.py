"""What survivors decide after a loss, as a pure function of what each of them reports."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from resihp.contracts import StateLostError, from_json

from ..instep.ledger import Holding, Kept, salvage


@dataclass(frozen=True)
class Report:
    """What one survivor knows.

    epoch      world whose state it holds
    completed  steps whose update it has made
    holdings   what its gradients of step `completed` stand for: in `epoch`, and in `doubt`
    norm       norm of the last step for which it learned one, with that step; None before the first
    doubt      epoch whose complete state it holds as well, not knowing whether others took it on
    rewound    steps completed in `doubt` where that began from a checkpoint; None: as `completed`
    seen       highest epoch of which it has heard
    idle       it has no place in its world and so holds no state
    newcomers  ranks that wait to come in and that it lets in now
    """

    epoch: int
    completed: int
    holdings: tuple[Holding, ...] = ()
    norm: tuple[int, float] | None = None
    doubt: int | None = None
    rewound: int | None = None
    seen: int = 0
    idle: bool = False
    newcomers: tuple[int, ...] = ()

    def holding(self, epoch: int) -> Holding | None:
        """What its gradients stand for in the world of `epoch`."""
        return next((held for held in self.holdings if held.epoch == epoch), None)

    def within(self, epoch: int) -> Report:
        """What it knows of steps if the world of `epoch` holds: none that are still to come."""
        if epoch != self.doubt or self.rewound is None:
            return self
        return replace(self, completed=self.rewound, norm=None)


@dataclass(frozen=True)
class Decision:
    """What all survivors do: take `epoch`, complete step `completed - 1`, build `next_epoch`.

    There they go on with the sums `kept` of step `completed`, and redo what is in none of them.
    `survivors` are all who take part, newcomers among them; `stateless` those who hold no state.
    """

    survivors: tuple[int, ...]
    epoch: int
    completed: int
    norm: float | None
    next_epoch: int
    kept: tuple[Kept, ...] = ()
    stateless: tuple[int, ...] = ()


def decide(
    reports: Mapping[int, Report], microbatches: int, dead: Collection[int] = ()
) -> Decision:
    """The one well-defined state from which the survivors go on.

    A world that anyone has committed holds, because all others have its complete state. A step
    that anyone knows to be whole is completed, because all others hold its gradients; otherwise
    what replicas have of its `microbatches` is kept, and the rest is redone. Raises
    `StateLostError` if the reports contradict that.
    """
    alive = {rank: report for rank, report in reports.items() if rank not in dead}
    epoch = max(report.epoch for report in alive.values())
    alive = {rank: report.within(epoch) for rank, report in alive.items()}
    norms = {report.norm for report in alive.values() if report.norm is not None}
    known = max((step for step, _ in norms), default=-1)
    completed = max([known + 1, *(report.completed for report in alive.values())])
    norm = next((value for step, value in norms if step == completed - 1), None)
    for rank, report in sorted(alive.items()):
        if report.idle and report.doubt != epoch:
            continue
        if epoch not in (report.epoch, report.doubt):
            raise StateLostError(f"rank {rank} holds no state of epoch {epoch}")
        behind = completed - report.completed
        held = report.holding(epoch)
        can_complete = held is not None and held.summed and norm is not None
        if behind > 1 or (behind == 1 and not can_complete):
            raise StateLostError(f"rank {rank} cannot complete step {completed - 1}")
    seen = max(max(report.seen, report.epoch) for report in alive.values())
    present = [report for report in alive.values() if report.completed == completed]
    held_now = [held for report in present if (held := report.holding(epoch)) is not None]
    kept = salvage(held_now, microbatches)
    newcomers = {rank for report in alive.values() for rank in report.newcomers} - set(reports)
    stateless = newcomers | {rank for rank, report in alive.items() if report.idle}
    survivors = tuple(sorted({*alive, *newcomers}))
    return Decision(
        survivors, epoch, completed, norm, seen + 1, kept, stateless=tuple(sorted(stateless))
    )


def read_report(raw: bytes) -> Report:
    """A report as it stands in the store."""
    document = json.loads(raw)
    if document["norm"] is not None:
        document["norm"] = tuple(document["norm"])
    holdings = tuple(from_json(Holding, held) for held in document["holdings"])
    newcomers = tuple(document["newcomers"])
    return Report(**{**document, "holdings": holdings, "newcomers": newcomers})


def read_decision(raw: bytes) -> Decision:
    """A decision as it stands in the store."""
    document = json.loads(raw)
    kept = tuple(from_json(Kept, one) for one in document["kept"])
    ranks = {name: tuple(document[name]) for name in ("survivors", "stateless")}
    return Decision(**{**document, **ranks, "kept": kept})
