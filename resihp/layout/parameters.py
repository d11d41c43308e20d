"""Parameters of a model: their stage, their shape, and the ranges that tensor parallelism cuts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from resihp.contracts import ContractError, Replica

Range = tuple[int, int]
"""Half-open range of rows."""


@dataclass(frozen=True)
class Param:
    """One unsharded parameter.

    key    unique name, e.g. "layers.3.wq"
    shape  of the unsharded tensor
    dim    dimension that tensor parallelism splits; None: replicated on every rank of the stage
    unit   shard edges are multiples of this many rows of `dim` (e.g. the width of a KV group)
    """

    key: str
    shape: tuple[int, ...]
    dim: int | None = None
    unit: int = 1

    def __hash__(self) -> int:
        return hash(self.key)  # that of all fields would take most of the time of a look-up

    @property
    def size(self) -> int:
        """Rows along the split dimension (dimension 0 if there is none)."""
        return self.shape[self.dim or 0]

    @property
    def row_numel(self) -> int:
        """Elements of one row along that dimension."""
        return prod(self.shape) // self.size

    def ranges(self, shares: Sequence[int]) -> tuple[Range, ...]:
        """Range of each rank of a stage with these shares."""
        if self.dim is None:
            return ((0, self.size),) * len(shares)
        return split(self.size, shares, unit=self.unit)


@dataclass(frozen=True)
class Parameters:
    """All parameters of a model by location: first stage, `layers[i]`, last stage.

    A tied parameter is in `first` and in `last`: the two stages hold equal copies, whose gradients
    are summed. Raises `ContractError` for any other tie.
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
        """Every parameter once, in execution order."""
        inner = tuple(param for layer in self.layers for param in layer)
        return self.first + inner + self._last_alone

    @property
    def second_copies(self) -> Parameters:
        """Tied parameters only, as held by the last stage."""
        tied = tuple(param for param in self.last if param in self.first)
        return Parameters(((),) * len(self.layers), (), tied)

    @property
    def first_copies(self) -> Parameters:
        """Every parameter, with tied ones in the first stage only."""
        return Parameters(self.layers, self.first, self._last_alone)

    def parts(self, replica: Replica, index: int) -> dict[str, tuple[Param, ...]]:
        """Parameters of each part of a replica's stage, in execution order.

        A part is "first", "layers.N" or "last"; the first or the last stage may hold no layers.
        """
        parts: dict[str, tuple[Param, ...]] = {}
        for chunk in range(replica.chunks):
            parts |= self.chunk_parts(replica, index, chunk)
        return parts

    def chunk_parts(self, replica: Replica, index: int, chunk: int) -> dict[str, tuple[Param, ...]]:
        """Parts of one model chunk of the stage."""
        start, stop = replica.stages[index].chunks[chunk]
        is_first = (index, chunk) == (0, 0)
        is_last = (index + 1, chunk + 1) == (len(replica.stages), replica.chunks)
        inner = {f"layers.{number}": self.layers[number] for number in range(start, stop)}
        first = {"first": self.first} if is_first else {}
        return first | inner | ({"last": self.last} if is_last else {})

    def of_stage(self, replica: Replica, index: int) -> tuple[Param, ...]:
        """Parameters of a replica's stage, each once, in execution order."""
        parts = self.parts(replica, index).values()
        return tuple(dict.fromkeys(param for params in parts for param in params))

    @property
    def _last_alone(self) -> tuple[Param, ...]:
        return tuple(param for param in self.last if param not in self.first)


def split(size: int, shares: Sequence[int], *, unit: int = 1) -> tuple[Range, ...]:
    """Ranges of `size` rows in proportion to `shares`, cut at multiples of `unit`.

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


def without(span: Range, held: Range | None) -> list[Range]:
    """Parts of `span` outside `held`."""
    if held is None:
        return [span]
    parts = [(span[0], min(span[1], held[0])), (max(span[0], held[1]), span[1])]
    return [(start, stop) for start, stop in parts if start < stop]


def refine(span: Range, cuts: Iterable[Range]) -> list[Range]:
    """Ranges of `span`, cut at every edge of `cuts` inside it."""
    inner = {edge for cut in cuts for edge in cut if span[0] < edge < span[1]}
    return list(pairwise([span[0], *sorted(inner), span[1]]))
