"""Who holds what, and what must move from one layout to another."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from resihp.contracts import Layout, StateLostError

from .holders import Holders
from .parameters import Param, Parameters, Range
from .ranges import without


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
    holders = Holders(before)
    planned: list[Move] = []
    gone: set[str] = set()
    for target, held in sorted(holdings(new, parameters).items()):
        for param, span in held.items():
            own = before.get(target, {}).get(param)
            for need in without(span, own):
                for (start, stop), source in holders.senders(param, need):
                    if source is None:
                        gone.add(f"{param.key}[{start}:{stop}]")
                    else:
                        planned.append(Move(param, start, stop, source, target))
    if gone:
        shown = ", ".join(sorted(gone)[:6])
        raise StateLostError(f"no surviving rank holds {shown} ({len(gone)} ranges in all)")
    return tuple(planned)


def least_numel(
    old: Layout, new: Layout, parameters: Parameters, *, lost: Collection[int] = ()
) -> int:
    """Lower bound of the elements that must move: what each rank holds after and not before."""
    before = {r: held for r, held in holdings(old, parameters).items() if r not in lost}
    return sum(
        sum(stop - start for start, stop in without(span, before.get(rank, {}).get(param)))
        * param.row_numel
        for rank, held in holdings(new, parameters).items()
        for param, span in held.items()
    )


def writers(layout: Layout, parameters: Parameters) -> dict[int, list[tuple[Param, Range]]]:
    """For every working rank, what it writes when the whole state is written exactly once.

    What several ranks hold is written by the one that writes least so far. Deterministic.
    """
    holders = Holders(holdings(layout, parameters))
    written: dict[int, list[tuple[Param, Range]]] = {rank: [] for rank in layout.ranks}
    for param in parameters.all:
        for span, rank in holders.senders(param, (0, param.size)):
            assert rank is not None, "every layout holds every range"
            written[rank].append((param, span))
    return written
