"""Who holds what, and what must move from one layout to another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from resihp.contracts import Layout, StateLostError

from .parameters import Param, Parameters, Range
from .ranges import holders_of, lightest, refine, without


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
    holders = holders_of(before)
    planned: list[Move] = []
    gone: list[str] = []
    sent: dict[int, int] = defaultdict(int)
    for target, held in sorted(holdings(new, parameters).items()):
        for param, span in held.items():
            own = before.get(target, {}).get(param)
            for need in without(span, own):
                for start, stop in refine(need, (r for r, _ in holders[param])):
                    source = lightest(holders[param], (start, stop), sent)
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
        sum(stop - start for start, stop in without(span, before.get(rank, {}).get(param)))
        * param.row_numel
        for rank, held in holdings(new, parameters).items()
        for param, span in held.items()
    )


def writers(layout: Layout, parameters: Parameters) -> dict[int, list[tuple[Param, Range]]]:
    """For every working rank, what it writes when the whole state is written exactly once.

    What several ranks hold is written by the one that writes least so far. Deterministic.
    """
    holders = holders_of(holdings(layout, parameters))
    written: dict[int, list[tuple[Param, Range]]] = {rank: [] for rank in layout.ranks}
    load: dict[int, int] = defaultdict(int)
    for param in parameters.all:
        for span in refine((0, param.size), (held for held, _ in holders[param])):
            rank = lightest(holders[param], span, load)
            assert rank is not None, "every layout holds every range"
            written[rank].append((param, span))
            load[rank] += (span[1] - span[0]) * param.row_numel
    return written
