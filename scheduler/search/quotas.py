"""Which replica runs how many microbatches, with the best layers for that many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from ..greedy import greedy_allocation
from .chains import ChainBatch, SearchSetting
from .layer_partition import candidates, every_partition, is_small, partition, polish, sharpened
from .plan_bounds import ChainBounds

Chain = tuple[int, ...]  # group indices in pipeline order
_POLISH_CELLS = 12_000  # chains x stages^2 beyond which single layer moves are not timed
_Estimate = Callable[[Sequence[Chain], Sequence[int]], tuple[list[float], list[float]]]
_AROUND = (-2, -1, 0, 1, 2, 3)  # quotas near a wanted one
_NEAR_CELLS = 4_000  # chains x stages^2 up to which those are worked out with it
_WHOLE = 0.7  # weight of complete microbatches


@dataclass(frozen=True)
class WorkDivision:
    """Layers of every chain, microbatches of every chain, and when the last one ends."""

    makespan_ms: float
    layers: tuple[tuple[int, ...], ...]
    quotas: tuple[int, ...]


class ChainEvaluator:
    """Best layers and exact span of a chain for a number of microbatches; looked up once known.

    Chains whose groups cost the same are the same chain.
    """

    def __init__(self, setting: SearchSetting) -> None:
        self.setting = setting
        self.proven = ChainBounds(setting)
        self.columns = [group.column for group in setting.fleet.groups]
        self.kinds: list[int] = setting.fleet.kind.tolist()
        self._speed = 1.0 / (setting.fleet.forward_ms + setting.fleet.backward_ms)
        self._best: dict[tuple[Chain, int], tuple[tuple[int, ...], float]] = {}
        self._slowest: dict[tuple[Chain, int], float] = {}

    def signature(self, chain: Chain) -> Chain:
        """Equal for chains that cost the same."""
        return tuple(map(self.kinds.__getitem__, chain))

    def speed(self, chain: Chain) -> float:
        """Layers per millisecond of all stages together."""
        return float(self._speed[list(chain)].sum())

    def best(self, chain: Chain, microbatches: int) -> tuple[tuple[int, ...], float]:
        """Layers per stage, and span; inf where they do not fit."""
        key = (self.signature(chain), microbatches)
        if key not in self._best:
            self.prepare([(chain, microbatches)])
        return self._best[key]

    def slowest(self, chain: Chain, microbatches: int) -> float:
        """What the bottleneck stage of `best` needs for one microbatch."""
        return self._slowest[self.signature(chain), microbatches]

    def prepare(self, wanted: Iterable[tuple[Chain, int]]) -> None:
        """Works out many at once, which is far quicker than one by one."""
        missing: dict[tuple[Chain, int], Chain] = {}
        for chain, microbatches in wanted:
            key = (self.signature(chain), microbatches)
            if key not in self._best:
                missing[key] = chain
        by_length: dict[int, list[tuple[tuple[Chain, int], Chain]]] = defaultdict(list)
        for key, chain in missing.items():
            by_length[len(chain)].append((key, chain))
        for stages, entries in by_length.items():
            rows = self._rows([chain for _, chain in entries], [key[1] for key, _ in entries])
            if is_small(self.setting.layers, stages):
                layers, ends = every_partition(rows)
            else:
                layers, bounds = partition(rows)
                rounds = 0 if rows.chains.size * stages > _POLISH_CELLS else 12
                layers, ends = polish(rows, layers, rounds=rounds)
                ends = np.where(np.isfinite(bounds), ends, np.inf)
            parts = zip(map(tuple, layers.tolist()), ends.tolist(), strict=True)
            keys = [key for key, _ in entries]
            self._best.update(zip(keys, parts, strict=True))
            self._slowest.update(zip(keys, rows.slowest(layers).tolist(), strict=True))

    def _rows(self, chains: Sequence[Chain], microbatches: Sequence[int]) -> ChainBatch:
        """Chains of equally many stages."""
        return ChainBatch(
            self.setting, np.array(chains, np.int64), np.array(microbatches, np.int64)
        )

    def spans(
        self, chains: Sequence[Chain], quotas: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        """Spans of `best`, and what the bottleneck stages need for one microbatch."""
        pairs = list(zip(chains, quotas, strict=True))
        self.prepare_near(pairs)
        return [self.best(*pair)[1] for pair in pairs], [self.slowest(*pair) for pair in pairs]

    def prepare_near(self, pairs: Sequence[tuple[Chain, int]]) -> None:
        """`prepare`, with a few microbatches more and less as well where that costs little.

        What is looked at next is mostly there then: of few chains the calls take the time.
        """
        missing = [(c, m) for c, m in pairs if (self.signature(c), m) not in self._best]
        cells = sum(len(chain) ** 2 for chain, _ in missing)
        around = _AROUND if len(_AROUND) * cells <= _NEAR_CELLS else (0,)
        self.prepare((c, m + more) for c, m in missing for more in around if m + more > 0)

    def sharpen(self, pairs: Iterable[tuple[Chain, int]], within_ms: float) -> None:
        """Looks for better layers from more starts, which takes longer than `prepare`."""
        by_length: dict[int, dict[tuple[Chain, int], Chain]] = defaultdict(dict)
        for chain, quota in pairs:
            if self.best(chain, quota)[1] < inf and not is_small(self.setting.layers, len(chain)):
                by_length[len(chain)].setdefault((self.signature(chain), quota), chain)
        for distinct in by_length.values():
            rows = self._rows(list(distinct.values()), [quota for _, quota in distinct])
            layers, ends = sharpened(rows, within_ms=within_ms)
            for key, found, end, slowest in zip(
                distinct, layers.tolist(), ends.tolist(), rows.slowest(layers).tolist(), strict=True
            ):
                if end < self._best[key][1]:
                    self._best[key] = (tuple(found), end)
                    self._slowest[key] = slowest

    def estimates(
        self, chains: Sequence[Chain], quotas: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        """As `spans`, from the bounds of the candidate partitions, which is quicker."""
        ends, rates = np.zeros(len(chains)), np.zeros(len(chains))
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, chain in enumerate(chains):
            by_length[len(chain)].append(index)
        for indices in by_length.values():
            rows = self._rows([chains[i] for i in indices], [quotas[i] for i in indices])
            layers, ends[indices] = partition(rows)
            rates[indices] = rows.slowest(layers)
        return ends.tolist(), rates.tolist()

    def fits(self, chains: Sequence[Chain], microbatches: int) -> list[bool]:
        """Whether the memory of each chain holds all layers."""
        return [bool(self._rows([chain], [microbatches]).fits[0]) for chain in chains]

    def partitions(self, chain: Chain, microbatches: int) -> list[tuple[int, ...]]:
        """Ways to spread the layers that are worth a try, the best for 1F1B first."""
        layers, bounds = candidates(self._rows([chain], [microbatches]))
        found = [self.best(chain, microbatches)[0]]
        found += [
            tuple(row)
            for row, end in zip(layers[:, 0].tolist(), bounds[:, 0], strict=True)
            if end < inf
        ]
        return list(dict.fromkeys(found))

    def most_layers(self, chain: Chain, microbatches: int) -> list[int]:
        """Layers for which each stage has the memory."""
        return list(self._rows([chain], [microbatches]).most[0].tolist())

    def capacities(
        self,
        chains: Sequence[Chain],
        microbatches: int,
        makespan_ms: float,
        *,
        whole: bool = False,
        known: dict[Chain, float] | None = None,
    ) -> list[float]:
        """Microbatches (fractions allowed) that each chain can finish in `makespan_ms`, nearly.

        Extrapolated from the bound for `microbatches` with the bottleneck stage's time for each
        further one, over the best of the candidate partitions. 0 where a chain is infeasible.
        `whole` weighs complete microbatches more than parts of one. `known`: what earlier calls
        with the same arguments found, by signature; it is added to.
        """
        known = {} if known is None else known
        signatures = [self.signature(chain) for chain in chains]
        by_length: dict[int, dict[Chain, Chain]] = defaultdict(dict)
        for signature, chain in zip(signatures, chains, strict=True):
            if signature not in known:
                by_length[len(chain)].setdefault(signature, chain)
        for distinct in by_length.values():
            rows = self._rows(list(distinct.values()), [microbatches] * len(distinct))
            layers, bounds = candidates(rows, few=True)
            fits = np.isfinite(bounds)
            capacity = microbatches + (makespan_ms - np.where(fits, bounds, 0.0)) / rows.slowest(
                layers
            )
            best = np.maximum(np.where(fits, capacity, 0.0).max(axis=0), 0.0)
            if whole:
                best = _WHOLE * np.floor(best + 1e-9) + (1.0 - _WHOLE) * best
            known.update(zip(distinct, best.tolist(), strict=True))
        return [known[signature] for signature in signatures]


def divide(
    evaluator: ChainEvaluator,
    chains: Sequence[Chain],
    microbatches: int,
    expired: Callable[[], bool] = lambda: False,
    near: Sequence[int] | None = None,
) -> WorkDivision:
    """Quotas (at least 1 each) by exchange until the last chain to end cannot be relieved.

    Starts in proportion to speed, or from quotas of the same sum that are `near`; gives each
    microbatch where it ends first; then moves one at a time from the latest chain to the one that
    would end first with it.
    """
    quotas = list(near or _in_proportion(evaluator, chains, microbatches))
    for estimate in (evaluator.estimates, evaluator.spans) if near is None else (evaluator.spans,):
        for _ in range(2):
            again = _by_rate(estimate, chains, quotas)
            if expired() or again == quotas:
                break
            quotas = again
    _exchange(evaluator, chains, quotas, expired)
    parts = [evaluator.best(chain, quota) for chain, quota in zip(chains, quotas, strict=True)]
    span = max(end for _, end in parts)
    return WorkDivision(span, tuple(layers for layers, _ in parts), tuple(quotas))


def _in_proportion(evaluator: ChainEvaluator, chains: Sequence[Chain], total: int) -> list[int]:
    speeds = [evaluator.speed(chain) for chain in chains]
    scale = (total - len(chains)) / sum(speeds)
    quotas = [1 + int(speed * scale) for speed in speeds]
    for index in range(total - sum(quotas)):
        quotas[index % len(quotas)] += 1
    return quotas


def _by_rate(estimate: _Estimate, chains: Sequence[Chain], quotas: Sequence[int]) -> list[int]:
    """Every microbatch where it ends first, extrapolating the spans of `quotas`."""
    spans, rates = estimate(chains, quotas)
    if not np.isfinite(spans).all():
        return list(quotas)
    offsets = [s - r * q for s, r, q in zip(spans, rates, quotas, strict=True)]
    total = sum(quotas)
    level = (total + sum(o / r for o, r in zip(offsets, rates, strict=True))) / sum(
        1.0 / r for r in rates
    )
    fresh = [
        max(1, int((level - o) / r) - 1) if level > o else 1
        for o, r in zip(offsets, rates, strict=True)
    ]
    fresh = greedy_allocation(
        fresh, total - sum(fresh), lambda i, count: offsets[i] + rates[i] * count
    )
    return fresh if sum(fresh) == total else list(quotas)


def _exchange(
    evaluator: ChainEvaluator,
    chains: Sequence[Chain],
    quotas: list[int],
    expired: Callable[[], bool],
) -> None:
    """Improves `quotas` in place."""
    pairs = list(zip(chains, quotas, strict=True))
    evaluator.prepare_near([*pairs, *((c, q + 1) for c, q in pairs)])
    ends = [evaluator.best(c, q)[1] for c, q in zip(chains, quotas, strict=True)]
    later = [evaluator.best(c, q + 1)[1] for c, q in zip(chains, quotas, strict=True)]
    for _ in range(4 * len(chains) + 16):
        worst = max(range(len(ends)), key=lambda i: (ends[i], -i))
        others = [i for i in range(len(ends)) if i != worst]
        if quotas[worst] <= 1 or not others or expired():
            return
        taker = min(others, key=lambda i: (later[i], i))
        if later[taker] >= ends[worst] * (1 - 1e-9):
            return
        quotas[worst] -= 1
        quotas[taker] += 1
        moved = [(chains[i], quotas[i]) for i in (worst, taker)]
        evaluator.prepare_near([*moved, *((chain, quota + 1) for chain, quota in moved)])
        for index in (worst, taker):
            chain, quota = chains[index], quotas[index]
            ends[index] = evaluator.best(chain, quota)[1]
            later[index] = evaluator.best(chain, quota + 1)[1]
