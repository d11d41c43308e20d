"""Joint search over placements of groups, schedules, layers and quotas."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from math import isinf

from resihp.contracts import InfeasibleError, Job, Layout, Schedule

from ..cost_model import transfer_ms
from ..link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns
from ..memory import MemoryFootprint, plan_schedules
from .arrangements import (
    exhaustive,
    feasible_chains,
    initial_chains,
    out_of_memory,
    within_memory,
)
from .chains import Chain, SearchSetting
from .link_placement import link_orders
from .placement import (
    drop_slow_stages,
    exchange_groups,
    insert_spare,
    restore_positions,
    sort_by_speed,
)
from .quotas import Arrangement, ChainEvaluator, divide
from .rank_orders import RankOrder, gathered_orders
from .tp_groups import GroupTable

_CLOSE = 2e-3  # gap up to which the search stops
_TARGETS = (0.99, 0.998)  # of the makespan reached, for exchanges of groups
_WIDE = 5e-3  # certified gap beyond which groups are exchanged under another schedule
_FAR = 1e-2  # gap beyond which layers are refined
_REFINE_CELLS = 1_000  # chains x stages^2 up to which layers are refined
_FEW_GROUPS = 48  # up to which a search is repeated from its own result
_FEW_REPLICAS = 12  # up to which more is tried: exchanges at a small gap, groups in place
_LEAST_GAIN = 1e-3  # an arrangement that moves more must be better by this fraction

_Start = tuple[Sequence[Chain], Sequence[int]]  # chains, and groups without a replica


@dataclass(frozen=True)
class _Request:
    """Input of a search with the permitted schedules."""

    job: Job
    speeds: Mapping[int, float]
    schedules: tuple[Schedule, ...]
    expired: Callable[[], bool]
    even: bool
    keep: bool
    shorter: bool
    links: LinkSlowdowns


def search(
    job: Job,
    layout: Layout,
    speeds: Mapping[int, float],
    expired: Callable[[], bool],
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
) -> list[Arrangement]:
    """Arrangements found before `expired`: the best one, then others that may move less.

    Starts from `layout` and from the job's initial layout. If memory is insufficient, the search
    is repeated without the first schedules, with equal shares, with fewer replicas of more stages,
    with the shares of `layout` and all living members, however slow, and finally with pipelines
    that leave their slowest groups out; of a small job that memory limits, the other shares are
    searched in any case. It is repeated from layouts in which ranks have changed places: dead and
    slow ones are gathered (`rank_orders`; these are the others), and slow links carry less
    (`link_placement`). Raises `InfeasibleError`.
    """
    schedules = plan_schedules(job)
    layouts = [layout] if layout == job.layout else [layout, job.layout]
    tails = [schedules[index:] for index in range(len(schedules))]
    failure: InfeasibleError | None = None
    halvings, either = range((layout.dp - 1).bit_length() + 1), (False, True)
    for shorter, keep, folds, tail, even in product(either, either, halvings, tails, either):
        if keep and even:
            continue
        request = _Request(job, speeds, tail, expired, even, keep, shorter, links)
        best: Arrangement | None = None
        for start in layouts:
            if best is None or not expired():
                try:
                    best = _better(best, _search(request, start, folds))
                except InfeasibleError as error:
                    failure = failure if shorter else error
        if best is not None:
            best, request = _with_other_shares(best, request, layout, folds)
            best = _repeated(best, request)
            orders = gathered_orders(layout, speeds)
            found = [best, *_after_exchanges(request, layout, folds, orders)]
            best = reduce(_better, found)
            best = _around_slow_links(best, request, layout, folds) if links else best
            return [best, *(other for other in found if other is not best)]
        if failure is not None and failure.constraint != "memory":
            break
    assert failure is not None
    raise failure


def _with_other_shares(
    best: Arrangement, request: _Request, layout: Layout, folds: int
) -> tuple[Arrangement, _Request]:
    """Best arrangement and its request, also with equal and with present shares where memory limits
    a small job: its ranks may hold more layers in those."""
    if len(best.evaluator.setting.table.groups) > _FEW_GROUPS or not _is_limited(best, layout):
        return best, request
    chosen, shares = request, ((False, False), (True, False), (False, True))
    for (even, keep), fewer in product(shares, range(folds + 1)):
        if (even, keep, fewer) == (request.even, request.keep, folds) or request.expired():
            continue
        option = replace(request, even=even, keep=keep)
        with suppress(InfeasibleError):
            found = _search(option, layout, fewer)
            if _better(best, found) is found:
                best, chosen = found, option
    return best, chosen


def _is_limited(found: Arrangement, layout: Layout) -> bool:
    """True if memory limits the layers of a stage, or may have left replicas out."""
    setting = found.evaluator.setting
    if setting.footprint.budget_bytes is None:
        return False
    rows = zip(found.chains, found.quotas, found.layers, strict=True)
    return len(found.chains) < layout.dp or any(
        count == most < setting.layers - len(chain) + 1
        for chain, quota, layers in rows
        for count, most in zip(layers, found.evaluator.most_layers(chain, quota), strict=True)
    )


def _repeated(best: Arrangement, request: _Request) -> Arrangement:
    """Result of repeated searches of a small job from its own result while that improves it."""
    while len(best.evaluator.setting.table.groups) <= _FEW_GROUPS and not request.expired():
        try:
            found = _search(request, best.layout)
        except InfeasibleError:
            break
        if not _is_less(found, best):
            break
        best = found
    return best


def _around_slow_links(
    found: Arrangement, request: _Request, layout: Layout, folds: int
) -> Arrangement:
    """Best arrangement of searches in which ranks have changed places so that slow links carry
    less.

    The places are those of the arrangement for healthy links, as the one that was found may have
    left out ranks for a slow link, and of that one.
    """
    job, starts = request.job, [found]
    with suppress(InfeasibleError):  # where only the initial layout fits into memory
        healthy = _search(replace(request, links=ALL_LINKS_HEALTHY), layout, folds)
        starts = [healthy] if healthy.layout == found.layout else [healthy, found]
    orders = {
        order.key: order
        for start in starts
        for order in link_orders(job, start, request.speeds, request.links)
    }
    return reduce(_better, _after_exchanges(request, layout, folds, orders.values()), found)


def _after_exchanges(
    request: _Request, layout: Layout, folds: int, orders: Iterable[RankOrder]
) -> Iterator[Arrangement]:
    """Best arrangement of a search after each exchange of ranks."""
    for order in orders:
        if request.expired():
            break
        moved = replace(request, job=replace(request.job, layout=order.of(request.job.layout)))
        with suppress(InfeasibleError):
            yield _search(moved, order.of(layout), folds)


def _better(best: Arrangement | None, found: Arrangement) -> Arrangement:
    """The first arrangement, which moves less, unless the second is clearly better."""
    if best is None or found.makespan_ms < best.makespan_ms * (1 - _LEAST_GAIN):
        return found
    return best


def _is_less(one: Arrangement, other: Arrangement) -> bool:
    return one.makespan_ms < other.makespan_ms * (1 - 1e-9)


def _search(request: _Request, layout: Layout, folds: int = 0) -> Arrangement:
    """Best arrangement found from `layout`.

    Memory depends on the number of replicas: they share sharded optimizer state, and need room for
    gradients that are summed if there are several. Where an arrangement has another number than it
    was searched for, and does not fit, the search is repeated for that number, and for as many
    replicas as at first.
    """
    job = request.job
    groups, chains, spare = initial_chains(
        job,
        layout,
        request.speeds,
        request.links,
        even=request.even,
        folds=folds,
        keep=request.keep,
        level=request.shorter,
    )
    table = GroupTable.of(groups, request.links)

    def arranged(replicas: int, *, as_many: bool = False) -> Arrangement:
        setting = SearchSetting(
            table,
            MemoryFootprint.of(job, replicas),
            job.layout.layers,
            job.microbatches,
            transfer_ms(job),
            job.max_in_flight,
            request.schedules[0],
            request.expired,
            request.links,
        )
        return _arranged(request, setting, chains, spare, as_many=as_many)

    best: Arrangement | None = None
    failure = InfeasibleError("memory", "no number of replicas was found that fits")
    replicas, tried = len(chains), set[int]()
    while best is None and replicas not in tried:
        tried.add(replicas)
        try:
            found = arranged(replicas)
        except InfeasibleError as error:
            failure = error
            break
        best, replicas = within_memory(job, found), len(found.chains)
    if len(tried) > 1:
        with suppress(InfeasibleError):
            option = within_memory(job, arranged(len(chains), as_many=True))
            best = best if option is None else _better(best, option)
    if best is None or isinf(best.makespan_ms):
        raise failure
    return best


def _arranged(
    request: _Request,
    setting: SearchSetting,
    chains: Sequence[Chain],
    spare: Sequence[int],
    *,
    as_many: bool,
) -> Arrangement:
    """Best arrangement found from these chains, with as many replicas or any number."""
    job, evaluator = request.job, ChainEvaluator(setting)
    starts: list[_Start] = [(chains, spare), (sort_by_speed(evaluator, chains), spare)]
    if spare and len(chains) < min(job.microbatches, job.layout.dp) and not as_many:
        starts.append(([*chains, tuple(spare)], []))
    started = _best_start(evaluator, starts, shorter=request.shorter)
    first = _exchanged(started)
    first = best = first if as_many else _without_slow_replicas(first)
    for schedule in request.schedules[1:]:
        # Exchanges hardly depend on the schedule, so they are searched once.
        best = _better(best, _under(schedule, first) or best)
    if best is not first and len(chains) <= _FEW_REPLICAS and _may_gain(best):
        best = _exchanged(best)
    best = _with_refined_layers(best)
    if first.chains != started.chains and len(chains) <= _FEW_REPLICAS:
        for schedule in request.schedules[1:]:
            best = _better(best, _under(schedule, started) or best)
    best = _shortened(best)
    exact = _exact(request, setting, len(chains), least=len(chains) if as_many else 1)
    if exact and exact.evaluator.setting.schedule is best.evaluator.setting.schedule:
        best = exact if _is_less(exact, best) else best
    elif exact:
        best = _better(exact, best)
    return replace(best, chains=tuple(restore_positions(evaluator, chains, best.chains)))


def _under(schedule: Schedule, found: Arrangement) -> Arrangement | None:
    """Same chains under another schedule; None if they do not fit into memory, or time is up."""
    setting = replace(found.evaluator.setting, schedule=schedule)
    other, typical = ChainEvaluator(setting), max(1, setting.microbatches // len(found.chains))
    if setting.expired() or not all(other.fits(found.chains, typical)):
        return None
    return divide(other, found.chains, near=found.quotas)


def _best_start(
    evaluator: ChainEvaluator, starts: Sequence[_Start], *, shorter: bool
) -> Arrangement:
    best: Arrangement | None = None
    failure: InfeasibleError | None = None
    for chains, spare in starts:
        if best is not None and (evaluator.setting.expired() or best.slack < _CLOSE):
            break
        try:
            best = _better(best, _started(evaluator, chains, spare, shorter=shorter))
        except InfeasibleError as error:
            failure = failure or error
    if best is None:
        assert failure is not None
        raise failure
    return best


def _started(
    evaluator: ChainEvaluator, chains: Sequence[Chain], spare: Sequence[int], *, shorter: bool
) -> Arrangement:
    """Arrangement without replicas that do not fit and stages that slow it down."""
    chains, left = feasible_chains(evaluator, chains, shorter=shorter)
    typical = max(1, round(evaluator.setting.microbatches / len(chains)))
    chains = drop_slow_stages(evaluator, chains, [typical] * len(chains))
    found = divide(evaluator, chains)
    for chain, quota in zip(chains, found.quotas, strict=True):
        if isinf(evaluator.best(chain, quota)[1]):
            raise out_of_memory(evaluator, chain, quota)
    if spare or left:
        chains = insert_spare(evaluator, chains, [*spare, *left], found.makespan_ms)
        longer = divide(evaluator, chains)
        # A longer chain may not hold all layers for as many microbatches as it gets. One that is
        # slower is kept: exchanges, schedules and several chunks in a stage may gain from it.
        found = found if isinf(longer.makespan_ms) else longer
    return found


def _with_refined_layers(found: Arrangement) -> Arrangement:
    """Arrangement with better layers for the quotas and their neighbours, and quotas for them."""
    evaluator, cells = found.evaluator, sum(len(chain) ** 2 for chain in found.chains)
    if evaluator.setting.expired() or cells > _REFINE_CELLS:
        return found
    if found.slack < _FAR or found.gap < _FAR:
        return found
    pairs = list(zip(found.chains, found.quotas, strict=True))
    near = [(chain, quota + more) for chain, quota in pairs for more in (-1, 0, 1) if quota + more]
    evaluator.refine_layers(near, 1.1 * found.makespan_ms)
    better = divide(evaluator, found.chains, near=found.quotas)
    return better if _is_less(better, found) else found


def _shortened(found: Arrangement) -> Arrangement:
    """Arrangement without slow stages that only lengthen the pipelines which finish last."""
    evaluator = found.evaluator
    if evaluator.setting.expired():
        return found
    chains = drop_slow_stages(evaluator, found.chains, found.quotas, in_short_runs=True)
    if chains == list(found.chains):
        return found
    option = divide(evaluator, chains, near=found.quotas)
    rows = zip(found.chains, chains, option.quotas, strict=True)
    evaluator.prepare((chain, quota) for chain, _, quota in rows)
    needed = [
        chain if evaluator.best(chain, quota)[1] <= option.makespan_ms else shorter
        for chain, shorter, quota in zip(found.chains, chains, option.quotas, strict=True)
    ]
    return _better(found, Arrangement.of(evaluator, needed, option.quotas))


def _may_gain(found: Arrangement) -> bool:
    """True if exchanges may gain: a large share of warm-up and drain, or a wide gap."""
    few = found.evaluator.setting.microbatches < 2 * sum(map(len, found.chains))
    return few or (found.slack > _WIDE and found.gap > _WIDE)


def _exact(
    request: _Request, setting: SearchSetting, replicas: int, *, least: int
) -> Arrangement | None:
    """Optimum over all arrangements and schedules; None if there is none or the job is too
    large."""
    best: Arrangement | None = None
    for schedule in request.schedules:
        evaluator = ChainEvaluator(replace(setting, schedule=schedule))
        optimum = exhaustive(evaluator, replicas, least=least)
        if optimum is not None:
            best = _better(best, optimum)
    return best


def _exchanged(found: Arrangement) -> Arrangement:
    """Arrangement after exchanges of groups that target a shorter makespan.

    Nothing is tried if the bound for the groups in place is close.
    """
    few, evaluator = len(found.chains) <= _FEW_REPLICAS, found.evaluator
    for target in _TARGETS:
        expired = evaluator.setting.expired()
        if expired or len(found.chains) == 1 or (not few and found.slack < _CLOSE):
            break
        chains = exchange_groups(evaluator, found.chains, target * found.makespan_ms)
        if chains != list(found.chains):
            option = divide(evaluator, chains, near=found.quotas)
            found = min(found, option, key=lambda one: one.makespan_ms)
    return found


def _without_slow_replicas(found: Arrangement) -> Arrangement:
    """Arrangement without replicas that finish last although they run a single microbatch.

    Of a small job one after the other, also for a step of equal length: their groups may shorten it
    in other places. Of a large job as many at once as help.
    """
    setting = found.evaluator.setting
    is_small = len(setting.table.groups) <= _FEW_GROUPS
    while not setting.expired() and (single := _single(found)):
        counts = [1] if is_small else sorted({1, *_last_counts(found, single)})
        options = [_without(found, single[:count]) for count in counts]
        option = min(options, key=lambda one: one.makespan_ms)
        if option.makespan_ms > found.makespan_ms or not (is_small or _is_less(option, found)):
            break
        found = option
    return found


def _single(found: Arrangement) -> list[int]:
    """Replicas that run a single microbatch, the slowest first; not all replicas."""
    single = [i for i, quota in enumerate(found.quotas) if quota == 1]
    single.sort(key=lambda i: (-found.evaluator.best(found.chains[i], 1)[1], i))
    return single[: len(found.chains) - 1]


def _last_counts(found: Arrangement, single: Sequence[int]) -> list[int]:
    """Number of the replicas `single` without which the next one no longer finishes last, and the
    number before it."""
    evaluator = found.evaluator

    def is_last(count: int) -> bool:
        if count == len(single):
            return False
        rest = _rest(found, single[:count])
        next_ms = evaluator.best(found.chains[single[count]], 1)[1]
        return divide(evaluator, rest).makespan_ms <= next_ms * (1 + 1e-9)

    count = bisect_left(range(1, len(single) + 1), True, key=lambda count: not is_last(count)) + 1
    return [count, max(count - 1, 1)]


def _rest(found: Arrangement, slow: Sequence[int]) -> list[Chain]:
    left_out = set(slow)
    return [chain for i, chain in enumerate(found.chains) if i not in left_out]


def _without(found: Arrangement, slow: Sequence[int]) -> Arrangement:
    """Arrangement without these replicas, their groups idle or in others."""
    evaluator, rest = found.evaluator, _rest(found, slow)
    left = [group for index in sorted(slow) for group in found.chains[index]]
    smaller = divide(evaluator, rest)
    longer = insert_spare(evaluator, rest, left, smaller.makespan_ms)
    return min(smaller, divide(evaluator, longer), key=lambda one: one.makespan_ms)
