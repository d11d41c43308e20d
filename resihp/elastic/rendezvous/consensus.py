"""What survivors decide after a loss, as a pure function of what each of them reports."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist

from resihp.contracts import StateLostError, from_json

from ..microbatches.ledger import GradientHolding, SurvivingSum, surviving_sums
from .heartbeats import Heartbeats


@dataclass(frozen=True)
class SurvivorReport:
    """What one survivor knows.

    generation      world whose state it holds
    completed  steps whose update it has made
    holdings   what its gradients of step `completed` stand for: in `generation`, and in `doubt`
    norm       last known gradient norm, with its step; None before the first
    doubt      generation whose complete state it also holds; others may have committed it
    rewound    steps completed in `doubt` where that began from a checkpoint; None: as `completed`
    seen       highest generation of which it has heard
    idle       it has no place in its world and so holds no state
    newcomers  ranks that wait to come in and that it lets in now
    """

    generation: int
    completed: int
    holdings: tuple[GradientHolding, ...] = ()
    norm: tuple[int, float] | None = None
    doubt: int | None = None
    rewound: int | None = None
    seen: int = 0
    idle: bool = False
    newcomers: tuple[int, ...] = ()

    def holding(self, generation: int) -> GradientHolding | None:
        """What its gradients stand for in the world of `generation`."""
        return next((held for held in self.holdings if held.generation == generation), None)

    def within(self, generation: int) -> SurvivorReport:
        """The report as it reads if `generation` is the committed one."""
        if generation != self.doubt or self.rewound is None:
            return self
        return replace(self, completed=self.rewound, norm=None)


@dataclass(frozen=True)
class RecoveryDecision:
    """The outcome: adopt `generation`, complete step `completed - 1`, build `next_generation`.

    There they go on with the sums `kept` of step `completed`, and redo what is in none of them.
    `survivors` are all who take part, newcomers among them; `stateless` those who hold no state.
    """

    survivors: tuple[int, ...]
    generation: int
    completed: int
    norm: float | None
    next_generation: int
    kept: tuple[SurvivingSum, ...] = ()
    stateless: tuple[int, ...] = ()


def decide(
    reports: Mapping[int, SurvivorReport], microbatches: int, dead: Collection[int] = ()
) -> RecoveryDecision:
    """The one well-defined state from which the survivors go on.

    A world that anyone has committed holds, because all others have its complete state. A step
    that anyone knows to be whole is completed, because all others hold its gradients; otherwise
    what replicas have of its `microbatches` is kept, and the rest is redone. Raises
    `StateLostError` if the reports contradict that.
    """
    alive = {rank: report for rank, report in reports.items() if rank not in dead}
    generation = max(report.generation for report in alive.values())
    alive = {rank: report.within(generation) for rank, report in alive.items()}
    norms = {report.norm for report in alive.values() if report.norm is not None}
    known = max((step for step, _ in norms), default=-1)
    completed = max([known + 1, *(report.completed for report in alive.values())])
    norm = next((value for step, value in norms if step == completed - 1), None)
    for rank, report in sorted(alive.items()):
        if report.idle and report.doubt != generation:
            continue
        if generation not in (report.generation, report.doubt):
            raise StateLostError(f"rank {rank} holds no state of generation {generation}")
        behind = completed - report.completed
        held = report.holding(generation)
        can_complete = held is not None and held.summed and norm is not None
        if behind > 1 or (behind == 1 and not can_complete):
            raise StateLostError(f"rank {rank} cannot complete step {completed - 1}")
    seen = max(max(report.seen, report.generation) for report in alive.values())
    present = [report for report in alive.values() if report.completed == completed]
    held_now = [held for report in present if (held := report.holding(generation)) is not None]
    kept = surviving_sums(held_now, microbatches)
    newcomers = {rank for report in alive.values() for rank in report.newcomers} - set(reports)
    stateless = newcomers | {rank for rank, report in alive.items() if report.idle}
    survivors = tuple(sorted({*alive, *newcomers}))
    return RecoveryDecision(
        survivors, generation, completed, norm, seen + 1, kept, stateless=tuple(sorted(stateless))
    )


def read_report(raw: bytes) -> SurvivorReport:
    """A report as it stands in the store."""
    document = json.loads(raw)
    if document["norm"] is not None:
        document["norm"] = tuple(document["norm"])
    holdings = tuple(from_json(GradientHolding, held) for held in document["holdings"])
    newcomers = tuple(document["newcomers"])
    return SurvivorReport(**{**document, "holdings": holdings, "newcomers": newcomers})


def read_decision(raw: bytes) -> RecoveryDecision:
    """A decision as it stands in the store."""
    document = json.loads(raw)
    kept = tuple(from_json(SurvivingSum, one) for one in document["kept"])
    ranks = {name: tuple(document[name]) for name in ("survivors", "stateless")}
    return RecoveryDecision(**{**document, **ranks, "kept": kept})


def collect_reports(
    store: dist.Store,
    heartbeats: Heartbeats,
    ranks: Collection[int],
    *,
    prefix: str,
    decided: str,
    bound: Collection[Collection[int]] = (),
) -> dict[int, SurvivorReport]:
    """The reports `prefix/R` of all `ranks` that are alive; the key `decided` ends the wait.

    Of a set of `bound` ranks none can go on without the others: when one of them is lost, the
    others, who may be stuck in an exchange with it, are not waited for either.
    """
    start = next_look = time.monotonic()
    missing, reports = set(ranks), dict[int, SurvivorReport]()
    while missing and not store.check([decided]):
        lost = set[int]()
        for rank in sorted(missing):
            if store.check([f"{prefix}/{rank}"]):
                reports[rank] = read_report(store.get(f"{prefix}/{rank}"))
                missing.discard(rank)
            elif store.check([f"dead/{rank}"]):
                lost.add(rank)
        if missing and (now := time.monotonic()) >= next_look:
            next_look = now + heartbeats.look_s
            lost |= set(heartbeats.silent(missing, now - start))
        missing -= lost.union(*(them for them in bound if lost & set(them)))
        time.sleep(0.005 if missing else 0.0)
    return reports
