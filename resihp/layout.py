"""Pure algebra of layouts: who holds which range of which parameter, and what must move.

A tensor-parallel shard is a half-open range along one dimension, never "the i-th equal chunk", so
shards of any width, and layouts whose replicas differ in shape, are ordinary cases. Communication
and storage live elsewhere; everything here is data in, data out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from .contracts import ContractError, Layout, Replica, Stage, StateLostError

Range = tuple[int, int]
"""Half-open."""


@dataclass(frozen=True)
class Param:
    """One parameter of the whole model.

    key    unique name, e.g. "layers.3.wq"
    shape  of the unsharded tensor
    dim    dimension that tensor parallelism splits; None: every rank of the stage holds all of it
    unit   shard edges are multiples of this many rows of `dim` (e.g. the width of a KV group)
    """

    key: str
    shape: tuple[int, ...]
    dim: int | None = None
    unit: int = 1

    @property
    def size(self) -> int:
        """Rows along the split dimension (along dimension 0 where it is not split)."""
        return self.shape[self.dim or 0]

    @property
    def row_numel(self) -> int:
        """Elements in one row along that dimension."""
        return prod(self.shape) // self.size

    def ranges(self, shares: Sequence[int]) -> tuple[Range, ...]:
        """The range that each rank of a stage with these shares holds."""
        if self.dim is None:
            return ((0, self.size),) * len(shares)
        return split(self.size, shares, unit=self.unit)


@dataclass(frozen=True)
class Parameters:
    """All parameters of a model by where they live: first stage, `layers[i]`, last stage.

    A tied parameter stands in `first` and in `last`: the two stages hold equal copies, whose
    gradients are summed. Raises `ContractError` for one that is tied in any other way.
    """

    layers: tuple[tuple[Param, ...], ...]
    first: tuple[Param, ...] = ()
    last: tuple[Param, ...] = ()

    def __post_init__(self) -> None:
        inner = [param for layer in self.layers for param in layer]
        once = {param.key for param in (*inner, *self.first)} | {p.key for p in self._last_alone}
        if len(once) < len(inner) + len(self.first) + len(self._last_alone):
            raise ContractError("parameters", "only first and last stage may share a parameter")
        for param in set(self.first) & set(self.last):
            if param.dim is None:
                raise ContractError(param.key, "a tied parameter needs a dimension to split")

    @property
    def all(self) -> tuple[Param, ...]:
        """Every parameter once, in the order in which they are used."""
        inner = tuple(param for layer in self.layers for param in layer)
        return self.first + inner + self._last_alone

    @property
    def second_copies(self) -> Parameters:
        """The tied parameters alone, where the last stage holds them."""
        tied = tuple(param for param in self.last if param in self.first)
        return Parameters(((),) * len(self.layers), (), tied)

    @property
    def first_copies(self) -> Parameters:
        """Every parameter, but tied ones in the first stage only."""
        return Parameters(self.layers, self.first, self._last_alone)

    def parts(self, replica: Replica, index: int) -> dict[str, tuple[Param, ...]]:
        """The parts of a replica's stage, in the order in which they run, and their parameters.

        A part is "first", "layers.N" or "last"; the first stage may hold no layers, or the last.
        """
        start, stop = replica.stages[index].layers
        first = {"first": self.first} if index == 0 else {}
        inner = {f"layers.{number}": self.layers[number] for number in range(start, stop)}
        last = {"last": self.last} if index + 1 == len(replica.stages) else {}
        return first | inner | last

    def of_stage(self, replica: Replica, index: int) -> tuple[Param, ...]:
        """The parameters of a replica's stage, each once, in the order in which they are used."""
        parts = self.parts(replica, index).values()
        return tuple(dict.fromkeys(param for params in parts for param in params))

    @property
    def _last_alone(self) -> tuple[Param, ...]:
        return tuple(param for param in self.last if param not in self.first)


@dataclass(frozen=True)
class Move:
    """Rows [start, stop) of a parameter go from one rank to another."""

    param: Param
    start: int
    stop: int
    source: int
    target: int

    @property
    def numel(self) -> int:
        """Elements moved (of the parameter; its optimizer state moves along with it)."""
        return (self.stop - self.start) * self.param.row_numel


def split(size: int, shares: Sequence[int], *, unit: int = 1) -> tuple[Range, ...]:
    """`size` rows cut in proportion to `shares`, at multiples of `unit`.

    >>> split(8, (1, 3))
    ((0, 2), (2, 8))
    >>> split(12, (1, 1), unit=4)
    ((0, 8), (8, 12))
    """
    if size % unit:
        raise ContractError("unit", f"{unit} does not divide {size}")
    blocks, total = size // unit, sum(shares)
    edges, held = [0], 0
    for share in shares:
        held += share
        edges.append((2 * blocks * held + total) // (2 * total) * unit)
    return tuple(pairwise(edges))


def holdings(layout: Layout, parameters: Parameters) -> dict[int, dict[Param, Range]]:
    """For every working rank, the range of each parameter that it holds."""
    held: dict[int, dict[Param, Range]] = {}
    for replica in layout.replicas:
        for place, stage in enumerate(replica.stages):
            ranges = [(p, p.ranges(stage.shares)) for p in parameters.of_stage(replica, place)]
            for index, rank in enumerate(stage.ranks):
                held[rank] = {param: r[index] for param, r in ranges if r[index][0] < r[index][1]}
    return held


def moves(
    old: Layout, new: Layout, parameters: Parameters, *, lost: Collection[int] = ()
) -> tuple[Move, ...]:
    """The moves that turn `old` into `new`, when the ranks in `lost` can send nothing any more.

    Nothing that a rank already holds is moved, so the bytes are the least possible; among the
    holders of a range, the one that sends least so far sends it. Deterministic. Raises
    `StateLostError` naming the ranges that no surviving rank holds.
    """
    before = {r: held for r, held in holdings(old, parameters).items() if r not in lost}
    holders: dict[Param, list[tuple[Range, int]]] = defaultdict(list)
    for rank in sorted(before):
        for param, span in before[rank].items():
            holders[param].append((span, rank))
    planned: list[Move] = []
    gone: list[str] = []
    sent: dict[int, int] = defaultdict(int)
    for target, held in sorted(holdings(new, parameters).items()):
        for param, span in held.items():
            own = before.get(target, {}).get(param)
            for need in _without(span, own):
                for start, stop in _refine(need, (r for r, _ in holders[param])):
                    source = _lightest(holders[param], (start, stop), sent)
                    if source is None:
                        gone.append(f"{param.key}[{start}:{stop}]")
                        continue
                    move = Move(param, start, stop, source, target)
                    sent[source] += move.numel
                    planned.append(move)
    if gone:
        shown = ", ".join(sorted(set(gone))[:6])
        raise StateLostError(f"no surviving rank holds {shown} ({len(set(gone))} ranges in all)")
    return tuple(planned)


def least_numel(
    old: Layout, new: Layout, parameters: Parameters, *, lost: Collection[int] = ()
) -> int:
    """Lower bound of the elements that must move: what each rank holds after and not before."""
    before = {r: held for r, held in holdings(old, parameters).items() if r not in lost}
    return sum(
        sum(stop - start for start, stop in _without(span, before.get(rank, {}).get(param)))
        * param.row_numel
        for rank, held in holdings(new, parameters).items()
        for param, span in held.items()
    )


@dataclass(frozen=True)
class Reduction:
    """Gradient ranges that one set of ranks, one for each copy of them, sums among themselves."""

    ranks: tuple[int, ...]
    pieces: tuple[tuple[Param, Range], ...]


def reductions(layout: Layout, parameters: Parameters) -> tuple[Reduction, ...]:
    """How copies whose shards differ sum their gradients: over the common refinement.

    A replica holds one copy of a parameter, two of a tied one whose stages differ. Parameters
    that are not split are summed by the first rank of each stage alone; the ranks beside it take
    the sum from there, so that all of them hold the same bits. Sorted by ranks, the order in
    which every rank has to start them.
    """
    by_ranks: dict[tuple[int, ...], list[tuple[Param, Range]]] = defaultdict(list)
    copies: dict[Param, list[list[tuple[Range, int]]]] = defaultdict(list)
    for replica in layout.replicas:
        for place, stage in enumerate(replica.stages):
            for param in parameters.of_stage(replica, place):
                spans = list(zip(param.ranges(stage.shares), stage.ranks, strict=True))
                copies[param].append(spans[: 1 if param.dim is None else None])
    for param, held in copies.items():
        for span in _refine((0, param.size), (r for places in held for r, _ in places)):
            owners = tuple(
                next(rank for r, rank in places if r[0] <= span[0] and span[1] <= r[1])
                for places in held
            )
            by_ranks[owners].append((param, span))
    return tuple(Reduction(ranks, tuple(pieces)) for ranks, pieces in sorted(by_ranks.items()))


@dataclass(frozen=True)
class Transfer:
    """One chunk of a boundary activation between two stages: token rows cut in `chunks` parts."""

    chunk: int
    source: int
    target: int


def boundary(sender: Stage, receiver: Stage) -> tuple[Transfer, ...]:
    """How an activation crosses between stages of unequal tensor-parallel degree.

    Every sender holds all of it and every receiver needs all of it: it is scattered into as many
    chunks as the larger degree, sent in parallel and gathered inside the receiver (ResiHP, arXiv
    2605.06374).
    """
    chunks = max(sender.tp, receiver.tp)
    return tuple(
        Transfer(
            chunk,
            sender.ranks[chunk * sender.tp // chunks],
            receiver.ranks[chunk * receiver.tp // chunks],
        )
        for chunk in range(chunks)
    )


def replica_of(layout: Layout, quotas: Sequence[int]) -> Mapping[int, range]:
    """The microbatches of a step (indices over all replicas) that each replica computes."""
    edges = [0]
    for quota in quotas:
        edges.append(edges[-1] + quota)
    return {index: range(*pair) for index, pair in enumerate(pairwise(edges[: layout.dp + 1]))}


def _without(span: Range, held: Range | None) -> list[Range]:
    """The parts of `span` outside `held`."""
    if held is None:
        return [span]
    parts = [(span[0], min(span[1], held[0])), (max(span[0], held[1]), span[1])]
    return [(start, stop) for start, stop in parts if start < stop]


def _refine(span: Range, cuts: Iterable[Range]) -> list[Range]:
    """`span` cut at every edge in `cuts` that lies inside it."""
    inner = {edge for cut in cuts for edge in cut if span[0] < edge < span[1]}
    return list(pairwise([span[0], *sorted(inner), span[1]]))


def _lightest(
    holders: Sequence[tuple[Range, int]], span: Range, sent: Mapping[int, int]
) -> int | None:
    able = [rank for (a, b), rank in holders if a <= span[0] and span[1] <= b]
    return min(able, key=lambda rank: (sent.get(rank, 0), rank), default=None)
