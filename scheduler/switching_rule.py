"""When a dear change pays although nobody knows how long its reason will last: ski rental."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from resihp.contracts import Job, Layout, Plan, Schedule

from .memory import fits, plan_schedules
from .reasons import reasons
from .replica_times import ReplicaTimes
from .search.plan_bounds import layout_bound


@dataclass(frozen=True, kw_only=True)
class SwitchCandidate:
    """A better layout that is dear to get to: what it saves in each step, what its moves cost."""

    plan: Plan
    saved_ms: float
    cost_ms: float

    @property
    def pays_after(self) -> int:
        """Steps in which it saves what its moves cost."""
        return math.ceil(self.cost_ms / self.saved_ms)


@dataclass(frozen=True, kw_only=True)
class SkiRental:
    """What staying has cost since the last dear change, and the offer that it is weighed against.

    The rule of break-even (Karlin, Manasse, Rudolph and Sleator, 1988): stay as long as what
    staying has cost, with the step ahead, is no more than the change costs. Whenever the reason
    goes away, that lost at most twice what a clairvoyant loses who knows how long every situation
    lasts and decides in each whether to change. What was lost in earlier situations counts: a
    device that is slow again and again is acted on as one that stays slow.
    """

    lost_ms: float = 0.0
    offer: SwitchCandidate | None = None

    @property
    def due(self) -> bool:
        """Whether the offer is to be taken before the next step."""
        offer = self.offer
        return offer is not None and self.lost_ms + offer.saved_ms > offer.cost_ms

    @property
    def steps_left(self) -> int | None:
        """Steps until the offer is due if nothing changes; None without one."""
        if self.offer is None:
            return None
        return max(0, int((self.offer.cost_ms - self.lost_ms) // self.offer.saved_ms))

    def stepped(self) -> SkiRental:
        """After one more step in the present layout."""
        return replace(self, lost_ms=self.lost_ms + self.offer.saved_ms) if self.offer else self

    def offered(self, offer: SwitchCandidate | None) -> SkiRental:
        """In a new situation, with what would be better in it."""
        return replace(self, offer=offer)


@dataclass(frozen=True, kw_only=True)
class ReplanDecision:
    """The plan to change to now, None to stay, and the account to decide by from then on.

    `best` is the quickest other layout, also where it saves too little to be offered; None where
    none is quicker.
    """

    plan: Plan | None
    rental: SkiRental = SkiRental()
    best: SwitchCandidate | None = None


_LEAST_GAIN = 0.02  # of the step; less is within what the speeds are known to
_LEAST_GAIN_IN_PLACE = 0.005  # where nothing moves


def decide(
    job: Job,
    current: Plan,
    plan: Plan,
    speeds: Mapping[int, float],
    rental: SkiRental,
    *,
    horizon_steps: int | None,
) -> ReplanDecision:
    """`plan`, or what moves nothing, or None; all ranks of the current layout are alive.

    Other quotas and another schedule cost nothing, so they are taken for a small gain. A new layout
    must gain more than what the speeds are known to, beyond what those alone gain, and must pay for
    its moves: within `horizon_steps`, or by the rule of `SkiRental` where that is not known.
    """
    now_ms, cheap_ms, quotas, schedule = _in_place(job, current, speeds)
    saved_ms, best, offer = cheap_ms - plan.step_ms, None, None
    if plan.layout != current.layout and saved_ms > 0.0:
        cost_ms = migration_ms(job, current.layout, plan.layout)
        best = SwitchCandidate(plan=plan, saved_ms=saved_ms, cost_ms=cost_ms)
    if best is not None and saved_ms > _LEAST_GAIN * cheap_ms:
        offer, known = best, horizon_steps is not None
        if saved_ms * (horizon_steps or 0) > cost_ms or (not known and rental.offered(offer).due):
            return ReplanDecision(plan=plan)
    account = rental.offered(offer)
    if now_ms - cheap_ms <= _LEAST_GAIN_IN_PLACE * now_ms:
        return ReplanDecision(plan=None, rental=account, best=best)
    told = reasons(job, current.layout, current.layout, quotas, speeds, schedule)
    bound_ms = layout_bound(job, current.layout, quotas, schedule, speeds, cheap_ms)
    in_place = replace(
        plan,
        layout=current.layout,
        quotas=quotas,
        schedule=schedule,
        step_ms=cheap_ms,
        bound_ms=min(bound_ms, cheap_ms),
        reason=(*told, *_why_not(account)),
    )
    return ReplanDecision(plan=in_place, rental=account, best=best)


def _why_not(rental: SkiRental) -> Iterator[str]:
    """Why the layout stays as it is."""
    if rental.offer is None:
        yield "a new layout would gain little more"
    else:
        saved_s, cost_s = rental.offer.saved_ms / 1e3, rental.offer.cost_ms / 1e3
        yield (
            f"a new layout would save {saved_s:.3g} s a step and cost {cost_s:.3g} s of moves, "
            f"which it saves in {rental.offer.pays_after} steps"
        )


def _in_place(
    job: Job, current: Plan, speeds: Mapping[int, float]
) -> tuple[float, float, tuple[int, ...], Schedule]:
    """Step time as it is, and the least without a move, with the quotas and schedule for it."""
    chunked = any(replica.chunks > 1 for replica in current.layout.replicas)
    schedules = (Schedule.INTERLEAVED,) if chunked else plan_schedules(job)
    own = current.schedule if current.schedule in schedules else schedules[0]
    now_ms = ReplicaTimes(job, current.layout, own, speeds).step_ms(current.quotas)
    best = now_ms, current.quotas, own
    for schedule in (own, *(other for other in schedules if other is not own)):
        replicas = ReplicaTimes(job, current.layout, schedule, speeds)
        quotas = replicas.best_quotas(current.quotas)
        step_ms = replicas.step_ms(quotas)
        if step_ms < best[0] and fits(job, current.layout, quotas, schedule):
            best = step_ms, quotas, schedule
    return now_ms, *best


def migration_ms(job: Job, old: Layout, new: Layout) -> float:
    """How long the state that must move takes over the links between nodes; 0 without a model.

    Parameters and optimizer state travel; each rank takes in its own, so that the one that takes
    in most decides.
    """
    taken = received_bytes(job, old, new)
    if not taken:
        return 0.0
    return job.links.latency_ms + max(taken.values()) / (job.links.inter_gbytes_per_s * 1e6)


def received_bytes(job: Job, old: Layout, new: Layout) -> dict[int, float]:
    """Bytes of parameters and optimizer state that each rank must receive; empty without a model.

    Every rank holds ranges of layers times a range of each layer, and keeps what it has.
    """
    model = job.model
    if model is None:
        return {}
    each = job.memory.bytes_per_param / 2.0 + job.memory.optimizer_bytes_per_param
    before = dict(_holdings(old))
    received = {}
    for rank, held in _holdings(new):
        had = before.get(rank, _NOTHING)
        width, common = held.part[1] - held.part[0], _overlap(held.part, had.part)
        inner = sum(stop - start for start, stop in held.chunks) * width
        inner -= sum(_overlap(a, b) for a in held.chunks for b in had.chunks) * common
        kept = (held.first and had.first) + (held.last and had.last)
        ends = (held.first + held.last) * width - kept * common
        size = each * (inner * model.layer_params + ends * model.embedding_params)
        if size > 0.0:
            received[rank] = size
    return received


class _Held(NamedTuple):
    """Ranges of layers, the part of each, and whether embedding and head are there too."""

    chunks: tuple[tuple[int, int], ...]
    part: tuple[float, float]
    first: bool = False
    last: bool = False


_NOTHING = _Held((), (0.0, 0.0))


def _holdings(layout: Layout) -> Iterator[tuple[int, _Held]]:
    for replica in layout.replicas:
        for index, stage in enumerate(replica.stages):
            first, last = index == 0, index == len(replica.stages) - 1
            units, edge = sum(stage.shares), 0
            for rank, share in zip(stage.ranks, stage.shares, strict=True):
                part = (edge / units, (edge + share) / units)
                yield rank, _Held(stage.chunks, part, first, last)
                edge += share


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
