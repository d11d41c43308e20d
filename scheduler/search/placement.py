"""Placement of groups in replicas: exchanges within a column, spare groups, slow stages.

Groups of one column hold the same weights, so two of them can exchange replicas without moving
parameters (as far as their layers agree). Slow groups and gaps in the same replicas make chains
whose layers divide with less remainder.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from statistics import fmean

from .chains import Chain
from .quotas import ChainEvaluator

_TRIES = 1200  # exchanges evaluated in one round
_BUDGET = 4000  # exchanges evaluated in all rounds
_DEEP = 4  # least number of columns for moving a single group between replicas
_LEAST_GAIN = 1e-3  # microbatches

_Exchange = tuple[int, int, Chain, Chain]  # two replicas and their chains after it


def sort_by_speed(evaluator: ChainEvaluator, chains: Sequence[Chain]) -> list[Chain]:
    """Chains with the groups of each column sorted by speed, the fastest in the first replica.

    Slow groups and gaps gather in the last replicas.
    """
    groups = evaluator.setting.table.groups
    columns: dict[int, list[int]] = defaultdict(list)
    for chain in chains:
        for group in chain:
            columns[groups[group].column].append(group)
    fresh: list[list[int]] = [[] for _ in chains]
    for members in (columns[c] for c in sorted(columns)):
        members.sort(key=lambda g: (-evaluator.speed((g,)), g))
        for index, group in enumerate(members):
            fresh[index % len(fresh)].append(group)
    return [tuple(chain) for chain in fresh if chain]


def exchange_groups(
    evaluator: ChainEvaluator,
    chains: Sequence[Chain],
    makespan_ms: float,
    *,
    swaps_only: bool = False,
) -> list[Chain]:
    """Chains after exchanges of groups while the total capacity within `makespan_ms` grows.

    Two groups of a column are swapped between two replicas, or one moves alone, which makes one
    replica longer and the other shorter (not with `swaps_only`). Each round applies the best
    exchanges of disjoint replicas. Complete microbatches count more than fractions of one.
    """
    current = list(chains)
    typical = max(1, round(evaluator.setting.microbatches / len(current)))
    known: dict[tuple[Chain, int], float] = {}
    capacity = evaluator.capacities(current, typical, makespan_ms, whole=True, known=known)
    least = min(len(set(evaluator.columns)) - 1, *map(len, chains))
    looked_at = 0
    while looked_at < _BUDGET and not evaluator.setting.expired():
        options = _exchanges(evaluator, current, least, swaps_only=swaps_only)
        looked_at += len(options)
        if not options:
            break
        flat = [chain for _, _, one, other in options for chain in (one, other)]
        after = evaluator.capacities(flat, typical, makespan_ms, whole=True, known=known)
        gains = [
            (after[2 * k] + after[2 * k + 1] - capacity[a] - capacity[b], k)
            for k, (a, b, _, _) in enumerate(options)
        ]
        touched: set[int] = set()
        for gain, k in sorted(gains, key=lambda pair: (-pair[0], pair[1])):
            a, b, one, other = options[k]
            if gain < _LEAST_GAIN:
                break
            if a in touched or b in touched:
                continue
            touched |= {a, b}
            current[a], current[b] = one, other
            capacity[a], capacity[b] = after[2 * k], after[2 * k + 1]
        if not touched:
            break
    return current


def _exchanges(
    evaluator: ChainEvaluator, chains: Sequence[Chain], least: int, *, swaps_only: bool
) -> list[_Exchange]:
    """Exchanges between the first replicas of all distinct chains that change their cost.

    No replica gets fewer than `least` stages.
    """
    columns, kinds = evaluator.columns, evaluator.kinds
    firsts: dict[Chain, int] = {}
    for index, chain in enumerate(chains):
        firsts.setdefault(evaluator.signature(chain), index)
    rows = list(firsts.values())
    at = [{columns[g]: g for g in chains[row]} for row in rows]
    count = len(set(columns))
    may_leave = count >= _DEEP and not swaps_only
    full = [len(chains[row]) - count for row in rows]
    found: list[_Exchange] = []
    for distance in range(1, len(rows)):
        for i in range(len(rows) - distance):
            j = i + distance
            one, other = chains[rows[i]], chains[rows[j]]
            leave = (
                full[i] >= 0 >= full[j] and may_leave and len(one) > least,
                full[j] >= 0 >= full[i] and may_leave and len(other) > least,
            )
            for column in sorted({*at[i], *at[j]}):
                given, taken = at[i].get(column), at[j].get(column)
                for out, into in _group_moves(kinds, given, taken, leave=leave):
                    fresh = _replaced(one, out, into, columns), _replaced(other, into, out, columns)
                    if min(map(len, fresh)) >= max(least, 1):
                        found.append((rows[i], rows[j], *fresh))
            if len(found) > _TRIES:
                return found
    return found


def _group_moves(
    kinds: Sequence[int], one: int | None, other: int | None, *, leave: tuple[bool, bool]
) -> list[tuple[int | None, int | None]]:
    """Swap of two groups, and moves of either group alone where it may `leave`.

    A group may leave a replica with at least all columns for one with at most all columns, so that
    no replica is dismantled to lengthen the others.
    """
    if one is None or other is None:
        return [(one, other)]
    options: list[tuple[int | None, int | None]] = []
    if kinds[one] != kinds[other]:
        options.append((one, other))
    if leave[0]:
        options.append((one, None))
    if leave[1]:
        options.append((None, other))
    return options


def _replaced(chain: Chain, old: int | None, new: int | None, columns: Sequence[int]) -> Chain:
    """Chain with a group replaced, inserted or removed."""
    if new is None:
        return tuple([g for g in chain if g != old])
    if old is not None:  # same column, same position
        return tuple([new if g == old else g for g in chain])
    place = bisect(chain, columns[new], key=columns.__getitem__)
    return (*chain[:place], new, *chain[place:])


def insert_spare(
    evaluator: ChainEvaluator,
    chains: Sequence[Chain],
    spare: Sequence[int],
    makespan_ms: float,
) -> list[Chain]:
    """Chains with each spare group inserted where it adds most capacity, or left idle.

    Of chains that are alike, which are most of a large job's, only the first is tried.
    """
    current, known = list(chains), dict[tuple[Chain, int], float]()
    typical = max(1, round(evaluator.setting.microbatches / len(current)))
    alike = [(evaluator.columns[g], kind) for g, kind in enumerate(evaluator.kinds)]
    firsts: dict[tuple[tuple[int, int], ...], list[int]] = {}

    def note(index: int) -> None:
        heappush(firsts.setdefault(tuple([alike[g] for g in current[index]]), []), index)

    for index in range(len(current)):
        note(index)
    for group in spare:
        tried = [heap[0] for heap in firsts.values() if heap]
        held = [current[index] for index in tried]
        options = [_replaced(chain, None, group, evaluator.columns) for chain in held]
        before, after = (
            evaluator.capacities(some, typical, makespan_ms, known=known)
            for some in (held, options)
        )
        rows = zip(tried, options, before, after, strict=True)
        gain, index, option = max(
            ((late - soon, index, option) for index, option, soon, late in rows),
            key=lambda one: (one[0], -one[1]),
        )
        if gain > _LEAST_GAIN:
            heappop(firsts[tuple([alike[g] for g in current[index]])])
            current[index] = option
            note(index)
    return current


def drop_slow_stages(
    evaluator: ChainEvaluator,
    chains: Sequence[Chain],
    quotas: Sequence[int],
    *,
    in_short_runs: bool = False,
) -> list[Chain]:
    """Chains without stages that are so slow that their replica is faster without them.

    Tried are stages of less than half of the mean speed; with `in_short_runs`, those slower than
    another one in a replica of fewer microbatches than stages, as they may only lengthen its
    warm-up and drain.
    """
    current = list(chains)
    active = list(range(len(current)))
    while active:
        trial = {}
        for index in active:
            chain = current[index]
            speeds = {g: evaluator.speed((g,)) for g in chain}
            slowest = min(chain, key=lambda g: (speeds[g], g))
            limit = 0.5 * fmean(speeds.values())
            if in_short_runs:
                is_short = quotas[index] < len(chain)
                limit = max(speeds.values()) * (1 - 1e-9) if is_short else 0.0
            if len(chain) > 1 and speeds[slowest] < limit:
                trial[index] = tuple(g for g in chain if g != slowest)
        evaluator.prepare((current[i], quotas[i]) for i in trial)
        evaluator.prepare((chain, quotas[i]) for i, chain in trial.items())
        active = [
            i
            for i, chain in trial.items()
            if evaluator.best(chain, quotas[i])[1] < evaluator.best(current[i], quotas[i])[1]
        ]
        for index in active:
            current[index] = trial[index]
    return current


def restore_positions(
    evaluator: ChainEvaluator, before: Sequence[Chain], chains: Sequence[Chain]
) -> list[Chain]:
    """Equivalent chains with groups in their previous replica, as far as possible.

    Groups of a column and of equal cost are interchangeable.
    """
    table = evaluator.setting.table
    kinds = table.kind.tolist()
    alike = [(group.column, kind) for group, kind in zip(table.groups, kinds, strict=True)]
    home = {group: index for index, chain in enumerate(before) for group in chain}
    at_home: dict[tuple[tuple[int, int], int], list[int]] = defaultdict(list)
    for chain in chains:
        for group in sorted(chain, reverse=True):
            at_home[alike[group], home.get(group, -1)].append(group)
    kept: list[list[int | None]] = []
    for chain in chains:
        origin = Counter(home.get(group, -1) for group in chain).most_common(1)[0][0]
        own = [at_home[alike[group], origin] for group in chain]
        kept.append([groups.pop() if groups else None for groups in own])
    away: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (key, _), groups in sorted(at_home.items(), reverse=True):
        away[key] += groups
    return [
        tuple([away[alike[g]].pop() if k is None else k for g, k in zip(chain, row, strict=True)])
        for chain, row in zip(chains, kept, strict=True)
    ]
