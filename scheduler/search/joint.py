"""The joint search: arrangements of groups into replicas, each with its best layers and quotas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isinf

from resihp.contracts import InfeasibleError, Job, Layout, Schedule

from ..cost_model import transfer_ms
from ..memory import MemoryFootprint, plan_schedules
from .arrangements import Arrangement, arrange, feasible, out_of_memory
from .chains import SearchSetting
from .exhaustive import exhaustive
from .placement import gathered, inserted, settled, thinned, traded
from .quotas import Chain, ChainEvaluator, divide
from .tp_groups import GroupTable

_CLOSE = 2e-3  # a gap that is not worth a further search
_AIMS = (0.99, 0.998)
_WIDE = 5e-3  # a certified gap that is worth one under another schedule than the first
_FAR = 1e-2  # one that is worth better layers
_SHARP_CELLS = 1_000  # chains x stages^2 up to which they are looked for
_SMALL_SLOTS = 48  # up to which a search is repeated from its own result
_FEW_REPLICAS = 12  # up to which two trades are tried even where the gap is small
_WORTH = 1e-3  # an arrangement must be better than a tidier one by this much

_Start = tuple[Sequence[Chain], Sequence[int]]  # chains, and groups without a replica


@dataclass(frozen=True)
class _Question:
    """What a plan is searched for; `schedules` are those it may choose from."""

    job: Job
    speeds: Mapping[int, float]
    schedules: tuple[Schedule, ...]
    expired: Callable[[], bool]


def search(
    job: Job, layout: Layout, speeds: Mapping[int, float], expired: Callable[[], bool]
) -> Arrangement:
    """The best arrangement that is found before `expired`. Raises `InfeasibleError`.

    Starts from `layout`, and from the job's first one in case that has become better. Where memory
    does not hold what is tried first, then without the schedules that need more of it, with equal
    shares, and at last with fewer replicas, each of more stages.
    """
    schedules = plan_schedules(job)
    layouts = [layout] if layout == job.layout else [layout, job.layout]
    tails = [schedules[index:] for index in range(len(schedules))]
    failure: InfeasibleError | None = None
    for folds, tail, even in product(range(layout.dp.bit_length()), tails, (False, True)):
        question = _Question(job, speeds, tail, expired)
        best: Arrangement | None = None
        for start in layouts:
            if best is None or not expired():
                try:
                    best = _better(best, _search(question, start, even=even, folds=folds))
                except InfeasibleError as error:
                    failure = error
        if best is not None:
            return _settled_down(best, question, even=even)
        if failure is not None and failure.constraint != "memory":
            break
    assert failure is not None
    raise failure


def _settled_down(best: Arrangement, question: _Question, *, even: bool) -> Arrangement:
    """Searched again from where it led, while that is better: a small fleet has the time."""
    while len(best.evaluator.setting.fleet.groups) <= _SMALL_SLOTS and not question.expired():
        try:
            found = _search(question, best.layout, even=even, folds=0)
        except InfeasibleError:
            break
        if not _is_less(found, best):
            break
        best = found
    return best


def _better(best: Arrangement | None, found: Arrangement) -> Arrangement:
    """The first one, which disturbs less, unless the second is clearly better."""
    if best is None or found.division.makespan_ms < best.division.makespan_ms * (1 - _WORTH):
        return found
    return best


def _search(question: _Question, layout: Layout, *, even: bool, folds: int) -> Arrangement:
    """The best arrangement that starts from `layout`.

    Replicas that are left out own no optimizer state any more, so that the others have to hold
    theirs: then all is looked at again with the memory that this leaves.
    """
    job = question.job
    groups, chains, spare = arrange(job, layout, question.speeds, even=even, folds=folds)
    owners = len(chains)
    while True:
        setting = SearchSetting(
            GroupTable.of(groups),
            MemoryFootprint.of(job, owners),
            job.layout.layers,
            transfer_ms(job),
            job.max_in_flight,
            question.schedules[0],
        )
        found = _arranged(question, setting, chains, spare)
        if len(found.chains) >= owners or not job.memory.sharded_optimizer:
            return found
        owners = len(found.chains)


def _arranged(
    question: _Question, setting: SearchSetting, chains: Sequence[Chain], spare: Sequence[int]
) -> Arrangement:
    job, expired = question.job, question.expired
    evaluator = ChainEvaluator(setting)
    starts: list[_Start] = [(chains, spare), (gathered(evaluator, chains), spare)]
    if spare and len(chains) < min(job.microbatches, job.layout.dp):
        starts.append(([*chains, tuple(spare)], []))
    best = _best_start(evaluator, starts, job.microbatches, expired)
    best = _refined(best, job.microbatches, expired)
    best = _without_hopeless(best, job.microbatches, expired)
    first = best
    for other in _under_others(question, best):
        best = _better(best, other)
    if best is not first and len(chains) <= _FEW_REPLICAS and _is_loose(best, job.microbatches):
        best = _refined(best, job.microbatches, expired)
    best = _sharpened(best, job.microbatches, expired)
    exact = _exact(question, setting, len(chains))
    if exact and (_schedule(exact) is not _schedule(best) or _is_less(exact, best)):
        best = exact
    return replace(best, chains=tuple(settled(evaluator, chains, best.chains)))


def _best_start(
    evaluator: ChainEvaluator,
    starts: Sequence[_Start],
    microbatches: int,
    expired: Callable[[], bool],
) -> Arrangement:
    best: Arrangement | None = None
    failure: InfeasibleError | None = None
    for chains, spare in starts:
        if best is not None and (expired() or best.slack < _CLOSE):
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


def _started(
    evaluator: ChainEvaluator,
    chains: Sequence[Chain],
    spare: Sequence[int],
    microbatches: int,
    expired: Callable[[], bool],
) -> Arrangement:
    """An arrangement without replicas that do not fit and stages that hurt; all groups placed."""
    chains, left = feasible(evaluator, chains, microbatches)
    chains = thinned(evaluator, chains, microbatches)
    division = divide(evaluator, chains, microbatches, expired)
    for chain, quota in zip(chains, division.quotas, strict=True):
        if isinf(evaluator.best(chain, quota)[1]):
            raise out_of_memory(evaluator, chain, quota)
    if spare or left:
        chains = inserted(evaluator, chains, [*spare, *left], microbatches, division.makespan_ms)
        division = divide(evaluator, chains, microbatches, expired)
    return Arrangement(evaluator, tuple(chains), division)


def _under_others(question: _Question, found: Arrangement) -> Iterator[Arrangement]:
    """The same arrangement under the other schedules whose activations fit into memory.

    Which group serves which replica hardly depends on the schedule, so it is looked for once.
    """
    microbatches = question.job.microbatches
    typical = max(1, microbatches // len(found.chains))
    for schedule in question.schedules[1:]:
        evaluator = _under(found.evaluator.setting, schedule)
        if not question.expired() and all(evaluator.fits(found.chains, typical)):
            near = found.division.quotas
            division = divide(evaluator, found.chains, microbatches, question.expired, near=near)
            yield Arrangement(evaluator, found.chains, division)


def _under(setting: SearchSetting, schedule: Schedule) -> ChainEvaluator:
    return ChainEvaluator(replace(setting, schedule=schedule))


def _sharpened(found: Arrangement, microbatches: int, expired: Callable[[], bool]) -> Arrangement:
    """With better layers for the quotas at hand and near them, and quotas for those."""
    cells = sum(len(chain) ** 2 for chain in found.chains)
    if expired() or cells > _SHARP_CELLS or found.slack < _FAR or found.gap < _FAR:
        return found
    evaluator, division = found.evaluator, found.division
    pairs = list(zip(found.chains, division.quotas, strict=True))
    near = [(chain, quota + more) for chain, quota in pairs for more in (-1, 0, 1) if quota + more]
    evaluator.sharpen(near, 1.1 * division.makespan_ms)
    division = divide(evaluator, found.chains, microbatches, expired, near=division.quotas)
    better = Arrangement(evaluator, found.chains, division)
    return better if _is_less(better, found) else found


def _is_loose(found: Arrangement, microbatches: int) -> bool:
    """Whether trades may gain under this schedule: much filling and draining, or a wide gap."""
    slots = sum(map(len, found.chains))
    return microbatches < 2 * slots or (found.slack > _WIDE and found.gap > _WIDE)


def _exact(question: _Question, setting: SearchSetting, replicas: int) -> Arrangement | None:
    """The optimum over all arrangements under each schedule; None if the job is too large."""
    best: Arrangement | None = None
    for schedule in question.schedules:
        evaluator = _under(setting, schedule)
        optimum = exhaustive(evaluator, replicas, question.job.microbatches)
        if optimum is None:
            return None
        best = _better(best, optimum)
    return best


def _schedule(found: Arrangement) -> Schedule:
    return found.evaluator.setting.schedule


def _is_less(one: Arrangement, other: Arrangement) -> bool:
    return one.division.makespan_ms < other.division.makespan_ms * (1 - 1e-9)


def _refined(found: Arrangement, microbatches: int, expired: Callable[[], bool]) -> Arrangement:
    """Trades that aim at a little less time than was reached, then counting whole microbatches.

    Where groups cannot be used better in place, the bound says so, and nothing is tried.
    """
    for index, aim in enumerate(_AIMS):
        few = len(found.chains) <= _FEW_REPLICAS and index < 2
        if expired() or len(found.chains) == 1 or (not few and found.slack < _CLOSE):
            break
        evaluator, aim_ms = found.evaluator, aim * found.division.makespan_ms
        whole = aim < 1.0
        chains = traded(evaluator, found.chains, microbatches, aim_ms, expired, whole=whole)
        if chains == list(found.chains):
            continue
        division = divide(evaluator, chains, microbatches, expired, near=found.division.quotas)
        if division.makespan_ms < found.division.makespan_ms:
            found = Arrangement(evaluator, tuple(chains), division)
    return found


def _without_hopeless(
    found: Arrangement, microbatches: int, expired: Callable[[], bool]
) -> Arrangement:
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
        longer = inserted(evaluator, rest, spare, microbatches, smaller.makespan_ms)
        options = [
            Arrangement(evaluator, tuple(rest), smaller),
            Arrangement(evaluator, tuple(longer), divide(evaluator, longer, microbatches, expired)),
            found,
        ]
        best = min(options, key=lambda option: option.division.makespan_ms)
        if best is found:
            break
        found = best
    return found
