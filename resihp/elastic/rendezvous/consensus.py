"""Consensus of the survivors of a failure.

Every survivor publishes a `SurvivorReport` in the store. `decide` is a pure function of all
reports; the first survivor to apply it publishes the `RecoveryDecision`, which holds for all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace

from resihp.contracts import FencedOutError, StateLostError, from_json

from ..microbatches.ledger import GradientHolding, SurvivingSum, surviving_sums
from . import keys
from .membership import Rendezvous

_DECISION_S = 1.0  # after which others than the first rank alive may decide


@dataclass(frozen=True)
class SurvivorReport:
    """State of one survivor.

    generation  committed generation
    completed   steps whose update it has made
    holdings    contents of its gradients of step `completed`: in `generation`, and in `in_doubt`
    norm        (step, gradient norm) of the last step whose norm is known; None before the first
    in_doubt    generation whose complete state it also holds; others may have committed it
    rewound     steps completed in `in_doubt` if that starts from a checkpoint; None: `completed`
    seen        highest generation known to it
    idle        it has no place in the layout and so holds no state
    joiners     ranks that become members in this recovery
    """

    generation: int
    completed: int
    holdings: tuple[GradientHolding, ...] = ()
    norm: tuple[int, float] | None = None
    in_doubt: int | None = None
    rewound: int | None = None
    seen: int = 0
    idle: bool = False
    joiners: tuple[int, ...] = ()

    def holding(self, generation: int) -> GradientHolding | None:
        """Contents of its gradients in `generation`, or None."""
        return next((held for held in self.holdings if held.generation == generation), None)

    def within(self, generation: int) -> SurvivorReport:
        """The report under the assumption that `generation` is committed."""
        if generation != self.in_doubt or self.rewound is None:
            return self
        return replace(self, completed=self.rewound, norm=None)


@dataclass(frozen=True)
class RecoveryDecision:
    """Outcome of a recovery: commit `generation`, complete step `completed - 1`.

    survivors        members from now on, joiners included
    norm             gradient norm of step `completed - 1`; None if no report has it
    next_generation  generation to build
    kept             gradient sums of step `completed` that it continues with; microbatches in none
                     of them are computed again
    stateless        survivors that hold no state
    buckets          for each of `survivors`: leading gradient buckets of step `completed` of which
                     it holds the sum over all replicas
    """

    survivors: tuple[int, ...]
    generation: int
    completed: int
    norm: float | None
    next_generation: int
    kept: tuple[SurvivingSum, ...] = ()
    stateless: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()


def decide(
    reports: Mapping[int, SurvivorReport], microbatches: int, dead: Collection[int] = ()
) -> RecoveryDecision:
    """The state from which all survivors continue.

    A generation that one rank has committed is committed by all: they hold its complete state. A
    step whose gradient norm one rank knows is completed by all: they hold its gradients. Otherwise
    the gradient sums that replicas hold of its `microbatches` are kept, and the rest is computed
    again. Raises `StateLostError` if the reports contradict that.
    """
    alive = {rank: report for rank, report in reports.items() if rank not in dead}
    generation = max(report.generation for report in alive.values())
    alive = {rank: report.within(generation) for rank, report in alive.items()}
    norms = {report.norm for report in alive.values() if report.norm is not None}
    known = max((step for step, _ in norms), default=-1)
    completed = max([known + 1, *(report.completed for report in alive.values())])
    norm = next((value for step, value in norms if step == completed - 1), None)
    for rank, report in sorted(alive.items()):
        if report.idle and report.in_doubt != generation:
            continue
        if generation not in (report.generation, report.in_doubt):
            raise StateLostError(f"rank {rank} holds no state of generation {generation}")
        behind = completed - report.completed
        held = report.holding(generation)
        can_complete = held is not None and held.summed and norm is not None
        if behind > 1 or (behind == 1 and not can_complete):
            raise StateLostError(f"rank {rank} cannot complete step {completed - 1}")
    seen = max(max(report.seen, report.generation) for report in alive.values())
    held_now = {
        rank: held
        for rank, report in alive.items()
        if report.completed == completed and (held := report.holding(generation)) is not None
    }
    kept = surviving_sums(held_now.values(), microbatches)
    joiners = {rank for report in alive.values() for rank in report.joiners} - set(reports)
    stateless = joiners | {rank for rank, report in alive.items() if report.idle}
    survivors = tuple(sorted({*alive, *joiners}))
    buckets = tuple(held_now[rank].buckets if rank in held_now else 0 for rank in survivors)
    return RecoveryDecision(
        survivors, generation, completed, norm, seen + 1, kept, tuple(sorted(stateless)), buckets
    )


def agree(
    rendezvous: Rendezvous,
    report: SurvivorReport,
    microbatches: int,
    *,
    bound: Collection[Collection[int]] = (),
) -> RecoveryDecision:
    """Agree with all survivors on a decision. Raises `FencedOutError` if it excludes this rank,
    and `JobStoppedError` if the store is gone.

    Every rank that is alive calls this once for a recovery, possibly late, when its replica has
    finished its share. Ranks that are dead or silent are not waited for, nor are the other ranks
    of their set in `bound`, which cannot continue without them. A rank that is still joining does
    not decide, because the members may not count it: it waits for their decision.
    """
    recovery = rendezvous.recovery
    key = keys.decision(recovery)
    with rendezvous.stores.required("survivors cannot agree") as store:
        store.set(keys.report(recovery, rendezvous.rank), json.dumps(asdict(report)))
        store.append(keys.reported(recovery), f"{rendezvous.rank},")  # type: ignore[attr-defined]
        if rendezvous.is_joining:
            _await_decision(rendezvous)
        else:
            reports = _collect_reports(rendezvous, bound)
            if reports is not None:
                store.compare_set(key, "", json.dumps(asdict(decide(reports, microbatches))))
        decision = past_decision(rendezvous, recovery)
    if rendezvous.rank not in decision.survivors:
        raise FencedOutError(f"rank {rendezvous.rank} was given up by the other ranks")
    rendezvous.enter(recovery + 1, decision.survivors)
    return decision


def past_decision(rendezvous: Rendezvous, recovery: int) -> RecoveryDecision:
    """Decision of a recovery that is over."""
    document = json.loads(rendezvous.stores.store.get(keys.decision(recovery)))
    kept = tuple(from_json(SurvivingSum, one) for one in document["kept"])
    ranks = {name: tuple(document[name]) for name in ("survivors", "stateless", "buckets")}
    return RecoveryDecision(**{**document, **ranks, "kept": kept})


def read_report(raw: bytes) -> SurvivorReport:
    """Decode a report."""
    document = json.loads(raw)
    if document["norm"] is not None:
        document["norm"] = tuple(document["norm"])
    holdings = tuple(from_json(GradientHolding, held) for held in document["holdings"])
    joiners = tuple(document["joiners"])
    return SurvivorReport(**{**document, "holdings": holdings, "joiners": joiners})


def _collect_reports(
    rendezvous: Rendezvous, bound: Collection[Collection[int]]
) -> dict[int, SurvivorReport] | None:
    """Reports of all ranks that are alive; None once there is a decision.

    Only the first rank alive looks for reports; the others do so if it has not decided in time,
    because it has stopped, or is a joiner in the eyes of some and does not decide.
    """
    store, recovery, start = rendezvous.stores.store, rendezvous.recovery, time.monotonic()
    while not store.check([keys.decision(recovery)]):
        waited_s = time.monotonic() - start
        lost = set(rendezvous.lost(rendezvous.alive, waited_s))
        lost = lost.union(*(them for them in bound if lost & set(them)))
        expected = [rank for rank in rendezvous.alive if rank not in lost]
        if expected[:1] == [rendezvous.rank] or waited_s > _DECISION_S:
            listed = store.get(keys.reported(recovery)).decode().rstrip(",").split(",")
            reported = sorted(set(map(int, listed)) & set(rendezvous.alive))
            if set(expected) <= set(reported):
                raw = store.multi_get([keys.report(recovery, rank) for rank in reported])
                return dict(zip(reported, map(read_report, raw), strict=True))
        time.sleep(rendezvous.pause_s)
    return None


def _await_decision(rendezvous: Rendezvous) -> None:
    """Wait for the decision of the members. Raises `FencedOutError` if all of them are lost."""
    store, key, start = (
        rendezvous.stores.store,
        keys.decision(rendezvous.recovery),
        time.monotonic(),
    )
    members = set(rendezvous.alive) - {rendezvous.rank}
    while not store.check([key]):
        if members <= set(rendezvous.lost(members, time.monotonic() - start)):
            raise FencedOutError(f"rank {rendezvous.rank} joined a job without living members")
        time.sleep(rendezvous.pause_s)
