"""Layout of the model over ranks: replicas of pipeline stages of tensor-parallel groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from ._json import OMIT_EMPTY
from ._numbers import checked, make_plain, named, whole_number, whole_numbers
from .errors import ContractError

LAST_RANK = 2**31 - 1  # what a record can name


class Schedule(StrEnum):
    """Order in which a pipeline runs the passes of its microbatches."""

    ONE_F_ONE_B = "1f1b"
    EAGER_1F1B = "eager_1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero_bubble"

    @classmethod
    def named(cls, name: str) -> Schedule:
        """Schedule of that name, which may be the schedule itself. Raises `ContractError`."""
        return checked("schedule", named(cls), name)


@dataclass(frozen=True)
class Stage:
    """One pipeline stage of one replica.

    ranks        global ranks of its tensor-parallel group; the order is the tensor-parallel rank
    layers       half-open range of the model's layers
    shares       how much of each layer each rank holds, in whole units (KV groups, where the model
                 shape is known); empty on construction means equal shares of one unit each
    more_layers  ranges of the further model chunks that it holds under an interleaved schedule
    """

    ranks: tuple[int, ...]
    layers: tuple[int, int]
    shares: tuple[int, ...] = ()
    more_layers: tuple[tuple[int, int], ...] = field(default=(), metadata={OMIT_EMPTY: True})

    def __post_init__(self) -> None:
        numbers = (*self.ranks, *self.layers, *self.shares)
        if self.more_layers or set(map(type, numbers)) != {int}:  # plain in most of many stages
            make_plain(self, whole_numbers, "ranks", "layers", "shares")
            make_plain(self, _ranges, "more_layers")
        if not self.ranks:
            raise ContractError("ranks", "a stage needs at least one rank")
        if min(self.ranks) < 0 or len(set(self.ranks)) < len(self.ranks):
            raise ContractError("ranks", "must be distinct and 0 or more")
        if max(self.ranks) > LAST_RANK:
            raise ContractError("ranks", f"must be at most {LAST_RANK}")
        for chunk in self.chunks:
            if len(chunk) != 2 or not 0 <= chunk[0] <= chunk[1]:
                raise ContractError("layers", f"must be a half-open range, not {chunk}")
        if not self.shares:
            object.__setattr__(self, "shares", (1,) * len(self.ranks))
        if len(self.shares) != len(self.ranks):
            raise ContractError("shares", "must have one entry for each rank")
        if min(self.shares) < 1:
            raise ContractError("shares", "must be 1 or more; leave out a rank that holds nothing")

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return len(self.ranks)

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """The layer range of each of its model chunks; one unless interleaved."""
        return (self.layers, *self.more_layers)

    @property
    def layer_count(self) -> int:
        """Layers in all its chunks."""
        return sum(stop - start for start, stop in self.chunks)


@dataclass(frozen=True)
class Replica:
    """One data-parallel copy of the model: its stages in pipeline order.

    The first chunks of all stages come first in the model, then all second ones, and so on.

    in_flight  microbatches of which each stage holds activations at most, under a schedule with
               whole backward passes and one chunk; empty: as many as the schedule gives
    """

    stages: tuple[Stage, ...]
    in_flight: tuple[int, ...] = field(default=(), metadata={OMIT_EMPTY: True})

    def __post_init__(self) -> None:
        if not self.stages:
            raise ContractError("stages", "a replica needs at least one stage")
        if len({len(stage.chunks) for stage in self.stages}) > 1:
            raise ContractError("stages", "must all hold as many chunks")
        if self.chunks > 1 and len(self.stages) == 1:
            raise ContractError("stages", "several chunks need several stages")
        if self.in_flight:
            self._check_in_flight()
        layer = 0
        for chunk in range(self.chunks):
            for index, stage in enumerate(self.stages):
                start, stop = stage.chunks[chunk]
                if start != layer:
                    where = f"more_layers[{chunk - 1}]" if chunk else "layers"
                    raise ContractError(
                        f"stages[{index}].{where}", f"must start at {layer}, not {start}"
                    )
                layer = stop

    def _check_in_flight(self) -> None:
        make_plain(self, whole_numbers, "in_flight", least=1)
        counts = self.in_flight
        if len(counts) != len(self.stages) or self.chunks > 1:
            raise ContractError("in_flight", "must have one entry for each stage, of one chunk")
        if sorted(counts, reverse=True) != list(counts):
            raise ContractError("in_flight", "must be no more than in stages before")

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return self.stages[-1].chunks[-1][1]

    @property
    def chunks(self) -> int:
        """Model chunks of every stage."""
        return len(self.stages[0].chunks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, stage by stage."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)


@dataclass(frozen=True)
class Layout:
    """Every replica of a job. No rank works in two places; all replicas hold the same layers.

    schedule  of the plan that the layout belongs to, set by `Plan` and read by
              `scheduler.simulate`; None outside a plan; not part of equality, JSON and repr
    """

    replicas: tuple[Replica, ...]
    schedule: Schedule | None = field(init=False, default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ContractError("replicas", "a layout needs at least one replica")
        if len({replica.layers for replica in self.replicas}) > 1:
            raise ContractError("replicas", "all replicas must hold the same number of layers")
        ranks = self.ranks
        if len(set(ranks)) < len(ranks):
            twice = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
            raise ContractError("replicas", f"ranks {twice[:4]} stand in two places")

    @classmethod
    def grid(
        cls, *, dp: int, pp: int, tp: int, layers: int, units: int | None = None, chunks: int = 1
    ) -> Layout:
        """The regular layout, ranks numbered as Megatron does: tp fastest, then dp, then pp.

        Layers and `units` (of a tensor-parallel share; default `tp`) are spread as evenly as they
        go, the larger parts first; over `chunks` model chunks in each stage, if it is interleaved.
        """
        dp, pp, tp = checked("dp, pp, tp", whole_numbers, (dp, pp, tp), least=1)
        layers = checked("layers", whole_number, layers, least=0)
        chunks = checked("chunks", whole_number, chunks, least=1)
        units = checked("units", whole_number, units or tp)
        if units < tp:
            raise ContractError("tp", f"{tp} ranks cannot share {units} units")
        spans = list(pairwise(_bounds(layers, pp * chunks)))
        edges = _bounds(units, tp)
        shares = tuple(stop - start for start, stop in pairwise(edges))
        return cls(
            tuple(
                Replica(
                    tuple(
                        Stage(
                            tuple(tp * (d + dp * p) + t for t in range(tp)),
                            spans[p],
                            shares,
                            tuple(spans[p + pp :: pp]),
                        )
                        for p in range(pp)
                    )
                )
                for d in range(dp)
            )
        )

    def under(self, schedule: Schedule | None) -> Layout:
        """Return this layout as part of a plan with that schedule, or of none."""
        if self.schedule is schedule:
            return self
        same = copy(self)
        object.__setattr__(same, "schedule", schedule)
        return same

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return self.replicas[0].layers

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that work, replica by replica, stage by stage."""
        return tuple(rank for replica in self.replicas for rank in replica.ranks)

    @cached_property
    def members(self) -> frozenset[int]:
        """The same ranks, for looking one up."""
        return frozenset(self.ranks)

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return len(self.replicas)

    @cached_property
    def pp(self) -> int:
        """Largest number of stages of a replica."""
        return max(len(replica.stages) for replica in self.replicas)

    @cached_property
    def tp(self) -> int:
        """Largest tensor-parallel degree of a stage."""
        return max(stage.tp for replica in self.replicas for stage in replica.stages)

    def places(self) -> Iterator[Place]:
        """Coordinates of each working rank, in the order of `ranks`."""
        for dp, replica in enumerate(self.replicas):
            for pp, stage in enumerate(replica.stages):
                for tp, rank in enumerate(stage.ranks):
                    yield Place(rank=rank, dp=dp, pp=pp, tp=tp)

    def place_of(self, rank: int) -> Place | None:
        """Coordinates of `rank`; None if it does not work in this layout."""
        return next((place for place in self.places() if place.rank == rank), None)

    def stage_at(self, place: Place) -> Stage:
        """Stage of a place."""
        return self.replicas[place.dp].stages[place.pp]


@dataclass(frozen=True)
class Place:
    """Replica, stage and tensor-parallel index of one rank."""

    rank: int
    dp: int
    pp: int
    tp: int


def _ranges(chunks: Iterable[Iterable[object]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(whole_numbers, chunks))


def _bounds(total: int, parts: int) -> list[int]:
    """Edges of `parts` ranges over `total`, as even as they go, the larger ones first."""
    size, extra = divmod(total, parts)
    edges = [0]
    for index in range(parts):
        edges.append(edges[-1] + size + (index < extra))
    return edges
