"""Options of replicas: layers and shares between the present ones and the best ones.

Within a limit of the step time an option runs a number of microbatches and makes its ranks receive
a number of bytes. Replicas take the options that together run all microbatches and receive least.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Layout

from ..migration import StateBytes
from .chains import Chain, ChainBatch, Floats, Ints, by_length
from .layer_partition import least_bottleneck, neighbour_moves, single_moves
from .quotas import Arrangement, ChainEvaluator
from .received_state import NearbyShares, ReceivedState
from .tp_groups import GroupTable, TPGroup

_MOVES = 24  # of single layers, from either end
_BETWEEN = (0.0, 0.2, 0.54, 1.0)  # limits between the best and the present slowest stage
_REDUCED = 2  # placements of the fewest bytes that are looked at more closely
_LEAST_BYTES = 0.02  # of a layer, counted for moves that cost less
_LEAST_MS = 1e-6  # counted for moves that take less
_LEAST_RATE = 1e-12  # of time or bytes, beyond rounding

Mask = NDArray[np.bool_]
_Entry = tuple[int, float, int, Chain]  # microbatches, bytes, index of the option, chain


class _Option(NamedTuple):
    """A chain with layers for a number of microbatches."""

    chain: Chain
    layers: tuple[int, ...]
    quota: int


class ReplicaOptions:
    """Options of the replicas of placements in which no rank receives more than `most_bytes`.

    A replica has a chain for each level of shares, and a chain has several layer partitions.
    Replicas of equal cost that held the same state share the figures, in all placements; all arrays
    are [option].

    placements  arrangements of one schedule and one memory footprint
    slower      levels of shares: times that layers may take, relative to the fastest shares
    """

    def __init__(
        self,
        placements: Sequence[Arrangement],
        current: Layout,
        sizes: StateBytes,
        nearby: NearbyShares,
        slower: Sequence[float],
        most_bytes: float,
    ) -> None:
        variants = _ShareVariants(nearby, slower)
        given = [
            [
                [_Option(chain, layers, quota) for chain in variants.of(placed, own)]
                for own, quota, layers in zip(
                    placed.chains, placed.quotas, placed.layers, strict=True
                )
            ]
            for placed in placements
        ]
        setting, groups = placements[0].evaluator.setting, variants.groups
        setting = replace(setting, table=GroupTable.of(groups, setting.links))
        self._evaluator = ChainEvaluator(setting)
        self.state = ReceivedState(current, groups, sizes)
        self._most_bytes = most_bytes * (1 + 1e-9)
        self._least_bytes = _LEAST_BYTES * sizes.layer
        numbers: dict[object, int] = {}
        kinds = [
            numbers.setdefault(kind, len(numbers))
            for kind in zip(setting.table.kind.tolist(), self.state.kinds, strict=True)
        ]

        def alike(start: _Option) -> object:
            return start._replace(chain=tuple([kinds[group] for group in start.chain]))

        starts: dict[object, _Option] = {}
        for start in (option for row in given for replica in row for option in replica):
            starts.setdefault(alike(start), start)
        self._options: list[_Option] = []
        self._of_start: dict[object, range] = {}
        for key, options in zip(starts, self._partitions(list(starts.values())), strict=True):
            first = len(self._options)
            self._options += options
            self._of_start[key] = range(first, len(self._options))
        self._measure()
        self._placements = [
            [self._fewest([(alike(start), start.chain) for start in replica]) for replica in row]
            for row in given
        ]

    def _partitions(self, starts: Sequence[_Option]) -> list[list[_Option]]:
        """Options between the present layers and those of each start, both included."""
        found: list[list[_Option]] = [[] for _ in starts]
        total = self._evaluator.setting.layers
        for indices, is_joined in self._by_depth(starts):
            some = [starts[index] for index in indices]
            batch = self._batch(some)
            # All pairs of the stages of a joined replica would be four times as many.
            moves = (neighbour_moves if is_joined else single_moves)(batch.stages)
            home = np.array([self.state.home(start.chain, total) for start in some], np.int64)
            best = np.array([start.layers for start in some], np.int64)
            for layers in (
                *self._walk(batch, home, moves, self._gain),
                *self._walk(batch, best, moves, self._saving),
                *self._balanced(batch, home),
            ):
                for index, row in zip(indices, layers.tolist(), strict=True):
                    found[index].append(starts[index]._replace(layers=tuple(row)))
        return [list(dict.fromkeys(o for o in options if o.layers[0])) for options in found]

    def _balanced(self, batch: ChainBatch, home: Ints) -> Ints:
        """Layers of the fewest bytes for limits of the slowest stage, [limit, chain, stage]."""
        costs = batch.costs
        each, extra = costs.forward + costs.backward, 3.0 * costs.extra
        least = least_bottleneck(each, extra, np.maximum(costs.most, 1), int(home[0].sum()))
        least = np.where(np.isfinite(least), least, 0.0)  # those that do not fit get no layers
        most = np.maximum((home * each + extra).max(axis=1), least)
        limits = least + (most - least) * np.array(_BETWEEN)[:, None]
        room = np.floor((limits[..., None] - extra) / each + 1e-9)
        return self.state.fewest(batch.chains, home, np.minimum(room, costs.most).astype(np.int64))

    def _by_depth(self, starts: Sequence[_Option]) -> Iterator[tuple[list[int], bool]]:
        """Indices of starts of equal depth, and whether two replicas are joined in them."""
        columns = self._evaluator.columns
        grouped: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for index, (chain, *_) in enumerate(starts):
            is_joined = len({columns[group] for group in chain}) < len(chain)
            grouped[len(chain), is_joined].append(index)
        for (_, is_joined), indices in grouped.items():
            yield indices, is_joined

    def _gain(self, later_ms: Floats, more_bytes: Floats) -> Floats:
        """Rate of moves that gain time: by bytes."""
        return np.asarray(-later_ms / np.maximum(more_bytes, self._least_bytes))

    def _saving(self, later_ms: Floats, more_bytes: Floats) -> Floats:
        """Rate of moves that save bytes: by time."""
        return np.asarray(-more_bytes / np.maximum(later_ms, _LEAST_MS))

    def _walk(
        self,
        batch: ChainBatch,
        layers: Ints,
        moves: Ints,
        rate: Callable[[Floats, Floats], Floats],
    ) -> list[Ints]:
        """Layers after each of the moves, [move, stage], with the best rates, until none helps."""
        steps = [layers]
        bounds, sizes = self._weighed(batch, layers)
        active = np.arange(len(layers)) if batch.stages > 1 else np.empty(0, np.int64)
        for _ in range(_MOVES):
            if not active.size or self._evaluator.setting.expired():
                break
            moved = layers[active] + moves[:, None, :]
            later, larger = self._weighed(batch.pick(active), np.maximum(moved, 1))
            rates = rate(later - bounds[active], larger - sizes[active])
            rates = np.where((moved >= 1).all(axis=2), rates, 0.0)
            choice, take = rates.argmax(axis=0), np.arange(len(active))
            better = np.flatnonzero(rates[choice, take] > _LEAST_RATE)
            active, choice = active[better], choice[better]
            layers = layers.copy()
            layers[active] = moved[choice, better]
            bounds[active], sizes[active] = later[choice, better], larger[choice, better]
            steps.append(layers)
        return steps

    def _weighed(self, batch: ChainBatch, layers: Ints) -> tuple[Floats, Floats]:
        """Bounds of the makespans, much higher beyond the memory, and bytes, [..., chain]."""
        beyond = np.maximum(layers - batch.costs.most, 0).sum(axis=-1)
        bounds = batch.bounds(layers) * (1.0 + beyond)
        return np.asarray(bounds), self.state.total(batch.chains, layers)

    def _measure(self) -> None:
        """Times and bytes of all options; those that do not fit take forever."""
        count = len(self._options)
        self._ends, self._slowest = np.full(count, np.inf), np.ones(count)
        self._bytes = np.zeros(count)
        for indices in by_length([option.chain for option in self._options]):
            some = [self._options[index] for index in indices]
            batch, layers = self._batch(some), np.array([o.layers for o in some], np.int64)
            self._bytes[indices] = self.state.total(batch.chains, layers)
            self._slowest[indices] = batch.slowest(layers)
            self._ends[indices] = self._makespans(batch, layers)

    def _makespans(self, batch: ChainBatch, layers: Ints, wanted: Mask | None = None) -> Floats:
        """Exact makespans; inf where not wanted, out of memory, or if a rank receives too much."""
        able = (layers <= batch.costs.most).all(axis=1)
        able &= self.state.most(batch.chains, layers) <= self._most_bytes
        rows = np.flatnonzero(able if wanted is None else able & wanted)
        ends = np.full(len(layers), np.inf)
        if rows.size:
            ends[rows] = batch.pick(rows).makespans(layers[rows])
        return ends

    def _batch(self, options: Sequence[_Option], quotas: Sequence[int] = ()) -> ChainBatch:
        """Batch of options of chains of equal length, with other quotas if given."""
        chains = np.array([option.chain for option in options], np.int64)
        own = np.array(quotas or [option.quota for option in options], np.int64)
        return ChainBatch(self._evaluator.setting, chains, own)

    def _fewest(self, keys: Sequence[tuple[object, Chain]]) -> list[tuple[int, Chain]]:
        """Options of a replica that no other one of fewer bytes outruns, each with its chain."""
        options = [(index, chain) for key, chain in keys for index in self._of_start[key]]
        options.sort(key=lambda pair: (self._bytes[pair[0]], self._ends[pair[0]]))
        kept, least_ms = [], np.inf
        for index, chain in options:
            if self._ends[index] < least_ms:
                kept.append((index, chain))
                least_ms = self._ends[index]
        return kept

    def within(self, limit_ms: float) -> list[Arrangement]:
        """Arrangements within a makespan with the fewest bytes found, of the best placements."""
        counts, needed = self._counts(limit_ms), self._evaluator.setting.microbatches
        found = []
        for replicas in self._placements:
            runs = [
                _rising([(counts[index], self._bytes[index], index, c) for index, c in replica])
                for replica in replicas
            ]
            picked = _cheapest(runs, needed)
            if picked is not None:
                found.append([run[at] for run, at in zip(runs, picked, strict=True)])
        found.sort(key=lambda chosen: sum(size for _, size, *_ in chosen))
        return [self._arranged(chosen, limit_ms) for chosen in found[:_REDUCED]]

    def _arranged(self, chosen: Sequence[_Entry], limit_ms: float) -> Arrangement:
        """Arrangement of these options without the microbatches that are too many."""
        options = [self._options[index]._replace(chain=chain) for _, _, index, chain in chosen]
        quotas = [count for count, *_ in chosen]
        slowest = [float(self._slowest[index]) for _, _, index, _ in chosen]
        ends = [float(self._ends[index]) for _, _, index, _ in chosen]
        ends = [
            end + (count - option.quota) * each
            for end, count, option, each in zip(ends, quotas, options, slowest, strict=True)
        ]
        for _ in range(sum(quotas) - self._evaluator.setting.microbatches):
            last = max((i for i, q in enumerate(quotas) if q > 1), key=lambda i: (ends[i], i))
            quotas[last] -= 1
            ends[last] -= slowest[last]
        return self._reduced(options, quotas, limit_ms)

    def _reduced(
        self, options: Sequence[_Option], quotas: Sequence[int], limit_ms: float
    ) -> Arrangement:
        """Arrangement after moves of single layers that save bytes within the makespan."""
        layers: dict[int, tuple[int, ...]] = {}
        makespan_ms = 0.0
        for indices in by_length([option.chain for option in options]):
            some = [options[index] for index in indices]
            batch = self._batch(some, [quotas[index] for index in indices])
            held = np.array([option.layers for option in some], np.int64)
            ends, sizes = self._makespans(batch, held), self.state.total(batch.chains, held)
            steps, changed = single_moves(batch.stages), np.arange(len(held))
            smaller, hopeful = (np.zeros((len(steps), len(held)), t) for t in (float, bool))
            for _ in range(_MOVES):
                found = self._savings(batch.pick(changed), held[changed], sizes[changed], limit_ms)
                smaller[:, changed], hopeful[:, changed] = found
                left = np.flatnonzero(hopeful.any(axis=0))
                if not left.size:
                    break
                choice = np.where(hopeful, smaller, np.inf)[:, left].argmin(axis=0)
                hopeful[choice, left] = False
                trial = held[left] + steps[choice]
                exact = self._makespans(batch.pick(left), trial)
                better = exact <= limit_ms * (1 + 1e-9)
                changed = left[better]
                held[changed], ends[changed] = trial[better], exact[better]
                sizes[changed] = smaller[choice[better], changed]
            makespan_ms = max(makespan_ms, float(ends.max()))
            layers |= zip(indices, map(tuple, held.tolist()), strict=True)
        return Arrangement(
            self._evaluator,
            tuple(option.chain for option in options),
            tuple(quotas),
            tuple(layers[index] for index in range(len(options))),
            makespan_ms,
        )

    def _savings(
        self, batch: ChainBatch, layers: Ints, sizes: Floats, limit_ms: float
    ) -> tuple[Floats, Mask]:
        """Bytes after each move of a single layer, and those that may be fewer than `sizes` within
        the makespan, both [move, chain]."""
        moved = layers + single_moves(batch.stages)[:, None, :]
        bounds, smaller = self._weighed(batch, np.maximum(moved, 1))
        hopeful = (moved >= 1).all(axis=2) & (bounds <= limit_ms)
        return smaller, np.asarray(hopeful & (smaller < sizes - _LEAST_RATE * sizes))

    def _counts(self, limit_ms: float) -> dict[int, int]:
        """Microbatches that the options run within a makespan; 0 for those that run none.

        Starts with one more than the time of the slowest stage predicts: the next microbatch may
        take less, as that stage need not determine the makespan yet.
        """
        used = sorted({i for row in self._placements for replica in row for i, _ in replica})
        more = np.floor((limit_ms - self._ends[used]) / self._slowest[used] + 1e-9)
        first = np.array([self._options[index].quota for index in used])
        tried = np.where(np.isfinite(more), first + more + 1.0, 0.0)
        counts = np.maximum(tried, 0.0).astype(np.int64)
        for indices in by_length([self._options[index].chain for index in used]):
            layers = np.array([self._options[used[i]].layers for i in indices], np.int64)
            for last in (False, False, False, True):
                own = counts[indices]
                some = [self._options[used[i]] for i in indices]
                batch = self._batch(some, np.maximum(own, 1).tolist())
                late = self._makespans(batch, layers, own > 0) > limit_ms * (1 + 1e-9)
                counts[indices] = np.where(late, 0 if last else np.maximum(own - 1, 0), own)
        return dict(zip(used, counts.tolist(), strict=True))


class _ShareVariants:
    """Groups of several placements, and for each chain those with nearby shares; see
    `NearbyShares.group` for the levels `slower`."""

    def __init__(self, nearby: NearbyShares, slower: Sequence[float]) -> None:
        self._nearby, self._slower = nearby, slower
        self.groups: list[TPGroup] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._levels: dict[int, list[int]] = {}

    def of(self, placed: Arrangement, chain: Chain) -> list[Chain]:
        """Chain of these groups, and one for each level of shares, without repetitions."""
        groups = [placed.evaluator.setting.table.groups[group] for group in chain]
        own = tuple([self._number(group) for group in groups])
        levels = zip(*map(self._of_group, groups), strict=True)
        return list(dict.fromkeys([own, *levels]))

    def _of_group(self, group: TPGroup) -> list[int]:
        """Number of the group to take at each level: its own one if nothing has moved."""
        own = self._number(group)
        if own not in self._levels:
            others = [own] * len(self._slower)
            if self._nearby.has_moved(group):
                near = (self._nearby.group(group, times) for times in self._slower)
                others = [self._number(other) for other in near]
            self._levels[own] = others
        return self._levels[own]

    def _number(self, group: TPGroup) -> int:
        key = group.ranks, group.shares, group.column
        if key not in self._numbers:
            self._numbers[key] = len(self.groups)
            self.groups.append(group)
        return self._numbers[key]


def _rising(entries: Sequence[_Entry]) -> list[_Entry]:
    """Entries of rising microbatches, from the one of the fewest bytes on."""
    rising: list[_Entry] = []
    for entry in sorted(entries, key=lambda e: (e[1], -e[0])):
        if entry[0] > (rising[-1][0] if rising else 0):
            rising.append(entry)
    return rising


def _cheapest(runs: Sequence[Sequence[_Entry]], needed: int) -> list[int] | None:
    """Index of an entry of every run, for enough microbatches and the fewest bytes; None if
    there is none.

    Dynamic program over the runs: the fewest bytes for at least each number of microbatches.
    """
    if not all(runs):
        return None
    least = np.where(np.arange(needed + 1) > 0, np.inf, 0.0)
    choices = []
    for run in runs:
        options = np.full((len(run), needed + 1), np.inf)
        for row, (count, size, *_) in enumerate(run):
            options[row, :count] = least[0] + size
            options[row, count:] = least[: max(needed + 1 - count, 0)] + size
        choices.append(options.argmin(axis=0))
        least = options.min(axis=0)
    if not np.isfinite(least[needed]):
        return None
    picked, missing = [], needed
    for run, choice in zip(reversed(runs), reversed(choices), strict=True):
        at = int(choice[missing])
        picked.append(at)
        missing = max(missing - run[at][0], 0)
    return picked[::-1]
