"""Arrangements of chains: microbatches of each chain, with the best layers for that many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from resihp.contracts import Layout, Replica, Stage

from ..greedy import allocation_by_rate, exchange_units
from .chains import Chain, ChainBatch, SearchSetting, by_length
from .layer_partition import (
    best_candidate,
    candidates,
    exhaustive_partition,
    is_small,
    local_search,
    multi_start_search,
)
from .plan_bounds import ChainBounds, chains_bound, quick_bound

_LOCAL_SEARCH_CELLS = 12_000  # chains x stages^2 beyond which layer moves are not timed
_AROUND = (-2, -1, 0, 1, 2, 3)  # offsets from a requested quota
_NEAR_CELLS = 4_000  # chains x stages^2 up to which they are evaluated together
_COMPLETE_WEIGHT = 0.7  # weight of complete microbatches in a capacity


class ChainEvaluator:
    """Cache of the best layers and exact makespan of a chain for a number of microbatches.

    Chains of groups of equal cost share entries.
    """

    def __init__(self, setting: SearchSetting) -> None:
        self.setting = setting
        self.proven = ChainBounds(setting)
        self.columns = [group.column for group in setting.table.groups]
        self.kinds: list[int] = setting.table.kind.tolist()
        self._speed = 1.0 / (setting.table.forward_ms + setting.table.backward_ms)
        self._best: dict[tuple[Chain, int], tuple[tuple[int, ...], float]] = {}
        self._slowest: dict[tuple[Chain, int], float] = {}

    def signature(self, chain: Chain) -> Chain:
        """Cache key: equal for chains of equal cost."""
        return tuple(map(self.kinds.__getitem__, chain))

    def speed(self, chain: Chain) -> float:
        """Layers per millisecond of all stages together."""
        return float(self._speed[list(chain)].sum())

    def best(self, chain: Chain, microbatches: int) -> tuple[tuple[int, ...], float]:
        """Layers per stage and makespan; inf if they do not fit."""
        key = (self.signature(chain), microbatches)
        if key not in self._best:
            self.prepare([(chain, microbatches)])
        return self._best[key]

    def slowest(self, chain: Chain, microbatches: int) -> float:
        """Time of the bottleneck stage of `best` for one microbatch."""
        return self._slowest[self.signature(chain), microbatches]

    def prepare(self, wanted: Iterable[tuple[Chain, int]]) -> None:
        """Evaluate many at once, which is much faster than one by one."""
        missing: dict[tuple[Chain, int], Chain] = {}
        for chain, microbatches in wanted:
            key = (self.signature(chain), microbatches)
            if key not in self._best:
                missing[key] = chain
        for keys, rows in self._batches(missing):
            if is_small(self.setting.layers, rows.stages):
                layers, ends = exhaustive_partition(rows)
            else:
                layers, bounds = best_candidate(rows)
                rounds = 0 if rows.chains.size * rows.stages > _LOCAL_SEARCH_CELLS else 12
                layers, ends = local_search(rows, layers, rounds=rounds)
                ends = np.where(np.isfinite(bounds), ends, np.inf)
            parts = zip(map(tuple, layers.tolist()), ends.tolist(), strict=True)
            self._best.update(zip(keys, parts, strict=True))
            self._slowest.update(zip(keys, rows.slowest(layers).tolist(), strict=True))

    def _batches(
        self, wanted: Mapping[tuple[Chain, int], Chain]
    ) -> Iterator[tuple[list[tuple[Chain, int]], ChainBatch]]:
        """Chains by signature and microbatches, in batches of equally many stages."""
        entries = list(wanted)
        for indices in by_length(wanted.values()):
            keys = [entries[index] for index in indices]
            yield keys, self._rows([wanted[key] for key in keys], [quota for _, quota in keys])

    def _rows(self, chains: Sequence[Chain], microbatches: Sequence[int]) -> ChainBatch:
        """Chains of equally many stages."""
        return ChainBatch(
            self.setting, np.array(chains, np.int64), np.array(microbatches, np.int64)
        )

    def makespans(
        self, chains: Sequence[Chain], quotas: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        """Makespans of `best`, and times of the bottleneck stages for one microbatch."""
        pairs = list(zip(chains, quotas, strict=True))
        self.prepare_near(pairs)
        return [self.best(*pair)[1] for pair in pairs], [self.slowest(*pair) for pair in pairs]

    def prepare_near(self, pairs: Sequence[tuple[Chain, int]]) -> None:
        """Evaluate like `prepare`, with neighbouring quotas as well if there are few chains.

        Neighbours are usually requested next, and for few chains the cost is per call.
        """
        missing = [(c, m) for c, m in pairs if (self.signature(c), m) not in self._best]
        cells = sum(len(chain) ** 2 for chain, _ in missing)
        around = _AROUND if len(_AROUND) * cells <= _NEAR_CELLS else (0,)
        self.prepare((c, m + more) for c, m in missing for more in around if m + more > 0)

    def refine_layers(self, pairs: Iterable[tuple[Chain, int]], within_ms: float) -> None:
        """Search better layers from more starts, which takes longer than `prepare`."""
        distinct: dict[tuple[Chain, int], Chain] = {}
        for chain, quota in pairs:
            if self.best(chain, quota)[1] < inf and not is_small(self.setting.layers, len(chain)):
                distinct.setdefault((self.signature(chain), quota), chain)
        for keys, rows in self._batches(distinct):
            layers, ends = multi_start_search(rows, within_ms=within_ms)
            found = zip(
                keys, layers.tolist(), ends.tolist(), rows.slowest(layers).tolist(), strict=True
            )
            for key, counts, end, slowest in found:
                if end < self._best[key][1]:
                    self._best[key], self._slowest[key] = (tuple(counts), end), slowest

    def estimates(
        self, chains: Sequence[Chain], quotas: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        """Estimates of `makespans` from the bounds of candidate partitions, which is faster."""
        ends, rates = np.zeros(len(chains)), np.zeros(len(chains))
        for indices in by_length(chains):
            rows = self._rows([chains[i] for i in indices], [quotas[i] for i in indices])
            layers, ends[indices] = best_candidate(rows)
            rates[indices] = rows.slowest(layers)
        return ends.tolist(), rates.tolist()

    def fits(self, chains: Sequence[Chain], microbatches: int) -> list[bool]:
        """True if each chain can hold all layers in memory."""
        found = np.zeros(len(chains), bool)
        for indices in by_length(chains):
            rows = self._rows([chains[i] for i in indices], [microbatches] * len(indices))
            found[indices] = rows.fits
        return list(found.tolist())

    def partitions(self, chain: Chain, microbatches: int) -> list[tuple[int, ...]]:
        """Candidate layer partitions, the best one for 1F1B first."""
        layers, bounds = candidates(self._rows([chain], [microbatches]))
        found = [self.best(chain, microbatches)[0]]
        found += [
            tuple(row)
            for row, end in zip(layers[:, 0].tolist(), bounds[:, 0], strict=True)
            if end < inf
        ]
        return list(dict.fromkeys(found))

    def most_layers(self, chain: Chain, microbatches: int) -> list[int]:
        """Layers that fit into the memory of each stage."""
        return list(self._rows([chain], [microbatches]).costs.most[0].tolist())

    def capacities(
        self,
        chains: Sequence[Chain],
        microbatches: int,
        makespan_ms: float,
        *,
        whole: bool = False,
        known: dict[tuple[Chain, int], float] | None = None,
    ) -> list[float]:
        """Approximate microbatches (with fractions) that each chain can finish in `makespan_ms`.

        Extrapolated from the bound for `microbatches` by the time of the bottleneck stage, over
        the best candidate partition; 0 for an infeasible chain. `whole` gives complete
        microbatches more weight than fractions. `known` caches results of calls with the same
        arguments; it is updated.
        """
        known = {} if known is None else known
        wanted = [(self.signature(chain), microbatches) for chain in chains]
        pairs = zip(wanted, chains, strict=True)
        for keys, rows in self._batches({key: chain for key, chain in pairs if key not in known}):
            layers, bounds = candidates(rows, few=True)
            fits = np.isfinite(bounds)
            capacity = microbatches + (makespan_ms - np.where(fits, bounds, 0.0)) / rows.slowest(
                layers
            )
            best = np.maximum(np.where(fits, capacity, 0.0).max(axis=0), 0.0)
            if whole:
                best = _COMPLETE_WEIGHT * np.floor(best + 1e-9) + (1.0 - _COMPLETE_WEIGHT) * best
            known.update(zip(keys, best.tolist(), strict=True))
        return [known[key] for key in wanted]


@dataclass(frozen=True)
class Arrangement:
    """Chains of groups with their quotas, layers and makespan."""

    evaluator: ChainEvaluator
    chains: tuple[Chain, ...]
    quotas: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]
    makespan_ms: float

    @classmethod
    def of(
        cls, evaluator: ChainEvaluator, chains: Sequence[Chain], quotas: Sequence[int]
    ) -> Arrangement:
        """Arrangement with the best layers for these quotas."""
        pairs = zip(chains, quotas, strict=True)
        layers, ends = zip(*(evaluator.best(*pair) for pair in pairs), strict=True)
        return cls(evaluator, tuple(chains), tuple(quotas), layers, max(ends))

    @property
    def layout(self) -> Layout:
        """Layout with the ranks, layers and shares of every stage."""
        groups = self.evaluator.setting.table.groups
        replicas = []
        for chain, layers in zip(self.chains, self.layers, strict=True):
            spans = pairwise(accumulate(layers, initial=0))
            held = zip((groups[group] for group in chain), spans, strict=True)
            stages = (Stage(group.ranks, span, group.shares) for group, span in held)
            replicas.append(Replica(tuple(stages)))
        return Layout(tuple(replicas))

    @cached_property
    def bound_ms(self) -> float:
        """Certified lower bound; see `chains_bound`."""
        return chains_bound(self.evaluator.proven, self.chains, self.quotas, self.makespan_ms)

    @property
    def gap(self) -> float:
        """Distance of the makespan from its bound, as a fraction of the bound."""
        return self.makespan_ms / self.bound_ms - 1.0

    @cached_property
    def slack(self) -> float:
        """Largest possible gain with fractional layers, as a fraction of the step."""
        quick = quick_bound(self.evaluator.setting, self.chains, self.quotas)
        return self.makespan_ms / quick - 1.0


def divide(
    evaluator: ChainEvaluator, chains: Sequence[Chain], near: Sequence[int] | None = None
) -> Arrangement:
    """Chains with quotas (at least 1 each) that minimise the makespan of the last one.

    Starts in proportion to speed, or from the quotas `near` of the same sum; allocates greedily by
    estimated and exact makespans; then moves single microbatches from the last chain to the one
    that would finish first with one more, until that does not help.
    """
    setting = evaluator.setting
    quotas = list(near or _in_proportion(evaluator, chains, setting.microbatches))
    for estimate in (
        (evaluator.estimates, evaluator.makespans) if near is None else (evaluator.makespans,)
    ):
        for _ in range(2):
            again = allocation_by_rate(*estimate(chains, quotas), quotas)
            if setting.expired() or again == quotas:
                break
            quotas = again

    def finish(counts: Sequence[tuple[int, int]]) -> list[float]:
        pairs = [(chains[index], count) for index, count in counts]
        evaluator.prepare_near(pairs)
        return [evaluator.best(*pair)[1] for pair in pairs]

    exchange_units(quotas, finish, setting.expired)
    return Arrangement.of(evaluator, chains, quotas)


def _in_proportion(evaluator: ChainEvaluator, chains: Sequence[Chain], total: int) -> list[int]:
    speeds = [evaluator.speed(chain) for chain in chains]
    scale = (total - len(chains)) / sum(speeds)
    quotas = [1 + int(speed * scale) for speed in speeds]
    for index in range(total - sum(quotas)):
        quotas[index % len(quotas)] += 1
    return quotas
