"""Which replica runs how many microbatches, with the best layers for that many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from .layers import (
    Floats,
    Ints,
    Setting,
    candidates,
    every_partition,
    is_small,
    most_layers,
    partition,
    polish,
    stage_times,
)

Chain = tuple[int, ...]  # group indices in pipeline order
_POLISH_CELLS = 12_000  # chains x stages^2 beyond which single layer moves are not timed
_Estimate = Callable[[Sequence[Chain], Sequence[int]], tuple[list[float], list[float]]]
_WHOLE = 0.7  # weight of complete microbatches


@dataclass(frozen=True)
class Division:
    """Layers of every chain, microbatches of every chain, and when the last one ends."""

    span_ms: float
    layers: tuple[tuple[int, ...], ...]
    quotas: tuple[int, ...]


class Evaluator:
    """Best layers and exact span of a chain for a number of microbatches; looked up once known.

    Chains whose groups cost the same are the same chain.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
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
            rows = np.array([chain for _, chain in entries], np.int64).reshape(-1, stages)
            counts = np.array([key[1] for key, _ in entries], np.int64)
            if is_small(self.setting.layers, stages):
                layers, ends = every_partition(self.setting, rows, counts)
                self._keep(entries, rows, layers, ends)
                continue
            layers, bounds = partition(self.setting, rows, counts)
            rounds = 0 if rows.size * stages > _POLISH_CELLS else 12
            layers, ends = polish(self.setting, rows, layers, counts, rounds=rounds)
            ends = np.where(np.isfinite(bounds), ends, np.inf)
            self._keep(entries, rows, layers, ends)

    def _keep(
        self,
        entries: Sequence[tuple[tuple[Chain, int], Chain]],
        rows: Ints,
        layers: Ints,
        ends: Floats,
    ) -> None:
        forward, backward = stage_times(self.setting, rows, layers)
        slowest = (forward + backward).max(axis=1).tolist()
        for row, (key, _) in enumerate(entries):
            self._best[key] = (tuple(layers[row].tolist()), float(ends[row]))
            self._slowest[key] = slowest[row]

    def spans(
        self, chains: Sequence[Chain], quotas: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        """Spans of `best`, and what the bottleneck stages need for one microbatch."""
        pairs = list(zip(chains, quotas, strict=True))
        self.prepare(pairs)
        return [self.best(*pair)[1] for pair in pairs], [self.slowest(*pair) for pair in pairs]

    def estimates(
        self, chains: Sequence[Chain], quotas: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        """As `spans`, from the bounds of the candidate partitions, which is quicker."""
        ends, rates = np.zeros(len(chains)), np.zeros(len(chains))
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, chain in enumerate(chains):
            by_length[len(chain)].append(index)
        for indices in by_length.values():
            rows = np.array([chains[i] for i in indices], np.int64)
            counts = np.array([quotas[i] for i in indices], np.int64)
            layers, ends[indices] = partition(self.setting, rows, counts)
            forward, backward = stage_times(self.setting, rows, layers)
            rates[indices] = (forward + backward).max(axis=1)
        return ends.tolist(), rates.tolist()

    def fits(self, chains: Sequence[Chain], microbatches: int) -> list[bool]:
        """Whether the memory of each chain holds all layers."""
        fit = []
        for chain in chains:
            most = most_layers(self.setting, np.array([chain]), np.array([microbatches]))
            fit.append(bool(most.min() >= 1 and most.sum() >= self.setting.layers))
        return fit

    def capacities(
        self,
        chains: Sequence[Chain],
        microbatches: int,
        span_ms: float,
        *,
        whole: bool = False,
        known: dict[Chain, float] | None = None,
    ) -> list[float]:
        """Microbatches (fractions allowed) that each chain can finish in `span_ms`, nearly.

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
        for stages, distinct in by_length.items():
            rows = np.array(list(distinct.values()), np.int64).reshape(-1, stages)
            counts = np.full(len(rows), microbatches)
            layers, bounds = candidates(self.setting, rows, counts, few=True)
            forward, backward = stage_times(self.setting, rows, layers)
            slowest = (forward + backward).max(axis=2)
            capacity = microbatches + (span_ms - bounds) / slowest
            best = np.maximum(np.where(np.isfinite(bounds), capacity, 0.0).max(axis=0), 0.0)
            if whole:
                best = _WHOLE * np.floor(best + 1e-9) + (1.0 - _WHOLE) * best
            known.update(zip(distinct, best.tolist(), strict=True))
        return [known[signature] for signature in signatures]


def divide(
    evaluator: Evaluator,
    chains: Sequence[Chain],
    microbatches: int,
    expired: Callable[[], bool] = lambda: False,
    near: Sequence[int] | None = None,
) -> Division:
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
    return Division(span, tuple(layers for layers, _ in parts), tuple(quotas))


def _in_proportion(evaluator: Evaluator, chains: Sequence[Chain], total: int) -> list[int]:
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
    heap = [
        (o + r * (q + 1), i) for i, (o, r, q) in enumerate(zip(offsets, rates, fresh, strict=True))
    ]
    heapify(heap)
    for _ in range(total - sum(fresh)):
        end, index = heap[0]
        fresh[index] += 1
        heapreplace(heap, (end + rates[index], index))
    return fresh if sum(fresh) == total else list(quotas)


def _exchange(
    evaluator: Evaluator,
    chains: Sequence[Chain],
    quotas: list[int],
    expired: Callable[[], bool],
) -> None:
    """Improves `quotas` in place."""
    pairs = list(zip(chains, quotas, strict=True))
    evaluator.prepare([*pairs, *((c, q + 1) for c, q in pairs)])
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
        evaluator.prepare([*moved, *((chain, quota + 1) for chain, quota in moved)])
        for index in (worst, taker):
            chain, quota = chains[index], quotas[index]
            ends[index] = evaluator.best(chain, quota)[1]
            later[index] = evaluator.best(chain, quota + 1)[1]
