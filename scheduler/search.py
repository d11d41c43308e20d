"""The joint search: arrangements of groups into replicas, each with its best layers and quotas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from resihp.contracts import InfeasibleError, Job, Layout, Schedule

from .costs import transfer_ms
from .exhaustive import exhaustive
from .fleet import Fleet, Group, GroupMaker, chains_bound, muster, share_units
from .layers import Setting, most_layers
from .memory import Footprint
from .quotas import Chain, Division, Evaluator, divide
from .slots import gathered, inserted, settled, thinned, traded

_CLOSE = 2e-3  # a gap that is not worth a further search
_AIMS = (1.0, 0.99, 0.998, 0.98)
_FEW_REPLICAS = 12  # up to which two trades are tried even where the gap is small
_WORTH = 1e-3  # an arrangement must be better than a tidier one by this much


@dataclass(frozen=True)
class Found:
    """An arrangement: chains of groups with their layers and quotas."""

    evaluator: Evaluator
    chains: tuple[Chain, ...]
    division: Division


def bound_ms(found: Found) -> float:
    """Certified bound of an arrangement; see `chains_bound`."""
    setting = found.evaluator.setting
    return chains_bound(
        setting.fleet, found.chains, found.division.quotas, setting.layers, setting.schedule
    )


def search(
    job: Job, layout: Layout, speeds: Mapping[int, float], expired: Callable[[], bool]
) -> Found:
    """The best arrangement that is found before `expired`. Raises `InfeasibleError`.

    Of the schedules that plans may choose from, the first unless another one is clearly better.
    """
    best: Found | None = None
    failure: InfeasibleError | None = None
    for schedule in plan_schedules(job):
        if best is not None and expired():
            break
        try:
            found = _for_schedule(job, layout, speeds, expired, schedule)
        except InfeasibleError as error:
            failure = failure or error
            continue
        best = _better(best, found)
    if best is None:
        assert failure is not None
        raise failure
    return best


def _for_schedule(
    job: Job,
    layout: Layout,
    speeds: Mapping[int, float],
    expired: Callable[[], bool],
    schedule: Schedule,
) -> Found:
    """The best arrangement for one schedule.

    Starts from `layout`, and from the job's first one in case that has become better. Shares by
    speed first; equal shares where only those fit into memory.
    """
    best: Found | None = None
    failure: InfeasibleError | None = None
    starts = [layout] if layout == job.layout else [layout, job.layout]
    for even in (False, True):
        for start in starts:
            if best is not None and expired():
                return best
            try:
                found = _search(job, start, speeds, expired, schedule, even=even)
            except InfeasibleError as error:
                failure = failure or error
                continue
            best = _better(best, found)
        if best is not None:
            return best
        if failure is not None and failure.constraint != "memory":
            break
    assert failure is not None
    raise failure


def _better(best: Found | None, found: Found) -> Found:
    """The first one, which disturbs less, unless the second is clearly better."""
    if best is None or found.division.span_ms < best.division.span_ms * (1 - _WORTH):
        return found
    return best


def plan_schedules(job: Job) -> tuple[Schedule, ...]:
    """What plans may choose from; an interleaved job gets plans for 1F1B."""
    if job.schedules:
        return job.schedules
    interleaved = job.schedule is Schedule.INTERLEAVED
    return (Schedule.ONE_F_ONE_B if interleaved else job.schedule,)


def _search(
    job: Job,
    layout: Layout,
    speeds: Mapping[int, float],
    expired: Callable[[], bool],
    schedule: Schedule,
    *,
    even: bool,
) -> Found:
    groups, chains, spare = _arrange(job, layout, speeds, even=even)
    if not chains:
        raise InfeasibleError("ranks", "no replica has a living rank")
    setting = Setting(
        Fleet.of(groups),
        Footprint.of(job, len(chains)),
        job.layout.layers,
        transfer_ms(job),
        job.max_in_flight,
        schedule,
    )
    evaluator = Evaluator(setting)
    starts = [(chains, spare), (gathered(evaluator, chains), spare)]
    if spare and len(chains) < min(job.microbatches, job.layout.dp):
        starts.append(([*chains, tuple(spare)], []))
    best = _best_start(evaluator, starts, job.microbatches, expired)
    best = _refined(best, job.microbatches, expired)
    best = _without_hopeless(best, job.microbatches, expired)
    exact = exhaustive(evaluator, len(chains), job.microbatches)
    if exact and exact[1].span_ms < best.division.span_ms * (1 - 1e-9):
        best = Found(evaluator, *exact)
    return replace(best, chains=tuple(settled(evaluator, chains, best.chains)))


def _best_start(
    evaluator: Evaluator,
    starts: Sequence[tuple[Sequence[Chain], Sequence[int]]],
    microbatches: int,
    expired: Callable[[], bool],
) -> Found:
    """The best of arrangements of chains and groups without a replica."""
    best: Found | None = None
    failure: InfeasibleError | None = None
    for chains, spare in starts:
        if best is not None and (expired() or _gap(best) < _CLOSE):
            break
        try:
            found = _started(evaluator, chains, spare, microbatches, expired)
        except InfeasibleError as error:
            failure = failure or error
            continue
        best = _better(best, found)
    if best is None:
        assert failure is not None
        raise failure
    return best


def _arrange(
    job: Job, layout: Layout, speeds: Mapping[int, float], *, even: bool
) -> tuple[list[Group], list[Chain], list[int]]:
    """All groups, the chains of replicas as they stand, and the groups without a replica."""
    staff = muster(job, layout, speeds)
    make = GroupMaker(job, speeds, share_units(job, layout), even=even)
    groups: list[Group] = []

    def numbered(stages: Sequence[tuple[int, tuple[int, ...]]]) -> list[int]:
        first = len(groups)
        made = [make(ranks, column) for column, ranks in stages]
        groups.extend(group for group in made if group is not None)
        return list(range(first, len(groups)))

    chains = [tuple(numbered(replica)) for replica in staff.replicas]
    spare = numbered(staff.spare)
    return groups, [chain for chain in chains if chain], spare


def _started(
    evaluator: Evaluator,
    chains: Sequence[Chain],
    spare: Sequence[int],
    microbatches: int,
    expired: Callable[[], bool],
) -> Found:
    """An arrangement without replicas that do not fit and stages that hurt; all groups placed."""
    chains, left = _feasible(evaluator, chains, microbatches)
    if microbatches < len(chains):
        raise InfeasibleError(
            "microbatches", f"{microbatches} microbatches are fewer than {len(chains)} replicas"
        )
    chains = thinned(evaluator, chains, microbatches)
    division = divide(evaluator, chains, microbatches, expired)
    if spare or left:
        chains = inserted(evaluator, chains, [*spare, *left], microbatches, division.span_ms)
        division = divide(evaluator, chains, microbatches, expired)
    return Found(evaluator, tuple(chains), division)


def _gap(found: Found) -> float:
    return found.division.span_ms / bound_ms(found) - 1.0


def _refined(found: Found, microbatches: int, expired: Callable[[], bool]) -> Found:
    """Trades that aim at a little less time than was reached, then counting whole microbatches.

    Where groups cannot be used better in place, the bound says so, and nothing is tried.
    """
    for index, aim in enumerate(_AIMS):
        few = len(found.chains) <= _FEW_REPLICAS and index < 2
        if expired() or len(found.chains) == 1 or (not few and _gap(found) < _CLOSE):
            break
        evaluator, aim_ms = found.evaluator, aim * found.division.span_ms
        whole = aim < 1.0
        chains = traded(evaluator, found.chains, microbatches, aim_ms, expired, whole=whole)
        if chains == list(found.chains):
            continue
        division = divide(evaluator, chains, microbatches, expired, near=found.division.quotas)
        if division.span_ms < found.division.span_ms:
            found = Found(evaluator, tuple(chains), division)
    return found


def _feasible(
    evaluator: Evaluator, chains: Sequence[Chain], microbatches: int
) -> tuple[list[Chain], list[int]]:
    """The chains whose memory holds all layers, and the groups of the others."""
    typical = max(1, microbatches // len(chains))
    total = evaluator.setting.layers
    trimmed, left = [], []
    for chain in chains:
        kept = sorted(chain, key=lambda g: (-evaluator.speed((g,)), g))[:total]
        trimmed.append(tuple(g for g in chain if g in kept))
        left += [g for g in chain if g not in kept]
    fits = evaluator.fits(trimmed, typical)
    if not any(fits):
        raise _out_of_memory(evaluator, trimmed[0], typical)
    for chain, fit in zip(trimmed, fits, strict=True):
        left += [] if fit else list(chain)
    return [chain for chain, fit in zip(trimmed, fits, strict=True) if fit], left


def _out_of_memory(evaluator: Evaluator, chain: Chain, microbatches: int) -> InfeasibleError:
    setting = evaluator.setting
    rows = np.array([chain], np.int64)
    most = np.maximum(most_layers(setting, rows, np.array([microbatches])), 0)[0]
    group = setting.fleet.groups[chain[int(most.argmin())]]
    rank = group.ranks[group.shares.index(max(group.shares))]
    return InfeasibleError(
        "memory",
        f"the {len(chain)} stages of a replica hold {int(most.sum())} of {setting.layers} layers; "
        f"rank {rank} has memory for {int(most.min())}",
    )


def _without_hopeless(found: Found, microbatches: int, expired: Callable[[], bool]) -> Found:
    """Drops replicas that make the others wait although they run a single microbatch."""
    while len(found.chains) > 1 and not expired():
        evaluator = found.evaluator
        quotas = found.division.quotas
        single = [i for i, quota in enumerate(quotas) if quota == 1]
        if not single:
            break
        ends = {i: evaluator.best(found.chains[i], 1)[1] for i in single}
        worst = max(single, key=lambda i: (ends[i], -i))
        rest = [chain for i, chain in enumerate(found.chains) if i != worst]
        spare = list(found.chains[worst])
        smaller = divide(evaluator, rest, microbatches, expired)
        longer = inserted(evaluator, rest, spare, microbatches, smaller.span_ms)
        options = [
            Found(evaluator, tuple(rest), smaller),
            Found(evaluator, tuple(longer), divide(evaluator, longer, microbatches, expired)),
            found,
        ]
        best = min(options, key=lambda option: option.division.span_ms)
        if best is found:
            break
        found = best
    return found
