"""Event-driven replay of one replica's pipeline: when every pass starts and ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resihp.contracts import ContractError, Op

from .orders import Part, Pass

Order = Sequence[Pass]
WEIGHT_PART = 0.5  # of a split backward: as many products as the gradient of the inputs takes


@dataclass(frozen=True, eq=False)
class Replay:
    """Start and end of every pass, one array per stage, aligned with the stage's order.

    The unit is that of the durations; the step starts at 0.
    """

    starts: tuple[NDArray[np.float64], ...]
    ends: tuple[NDArray[np.float64], ...]

    @property
    def span(self) -> float:
        """Time at which the last pass ends."""
        return max((float(end[-1]) for end in self.ends if end.size), default=0.0)


def pass_durations(
    orders: Sequence[Order],
    forward: ArrayLike,
    backward: ArrayLike,
    *,
    weight_part: float = WEIGHT_PART,
) -> list[list[float]]:
    """Duration of every pass, aligned with `orders`.

    `forward` and `backward` broadcast to [stage, microbatch]: what all chunks of the stage need
    together; a chunk takes an equal part. `weight_part` of a split backward is its weight half.
    """
    shape = (len(orders), 1 + max((p.microbatch for order in orders for p in order), default=-1))
    chunks = 1 + max((p.chunk for order in orders for p in order), default=0)
    times = [(np.broadcast_to(t, shape) / chunks).tolist() for t in (forward, backward)]
    scale = {Part.WHOLE: 1.0, Part.WEIGHT: weight_part, Part.INPUT: 1.0 - weight_part}
    return [
        [times[p.op is Op.BACKWARD][stage][p.microbatch] * scale[p.part] for p in order]
        for stage, order in enumerate(orders)
    ]


def replay(
    orders: Sequence[Order],
    durations: Sequence[Sequence[float]],
    *,
    p2p: ArrayLike = 0.0,
    blocking: bool = False,
) -> Replay:
    """Runs every stage's `orders` as soon as the stages before and behind it allow.

    durations  of every pass, aligned with `orders`
    p2p        delay of a transfer; broadcasts to [direction, link, microbatch], where direction 0
               is forward and link s joins stages s and s + 1 (the last one, the last stage and
               the first, between two chunks)
    blocking   a transfer holds its sender as well, until the receiver has ended what it ran before
               and the transfer is over (Megatron-LM without overlapped transfers); else it delays
               its receiver only

    Raises `ContractError` for orders that wait for each other for ever.
    """
    stages = len(orders)
    links = np.broadcast_to(
        p2p, (2, stages, 1 + max((p.microbatch for order in orders for p in order), default=-1))
    ).tolist()
    needs = _needs(orders, links, blocking=blocking)
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    waiting: dict[_Place, list[int]] = defaultdict(list)
    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        own = ends[stage]
        while (index := len(own)) < len(orders[stage]):
            now = own[-1] if own else 0.0
            for other, at, delay in needs[stage][index]:
                if len(ends[other]) <= at:
                    waiting[other, at].append(stage)
                    break
                now = max(now, ends[other][at] + delay)
            else:
                starts[stage].append(now)
                own.append(now + durations[stage][index])
                ready += waiting.pop((stage, index), ())
                continue
            break
    if waiting:
        stuck = sorted({stage for stages in waiting.values() for stage in stages})
        raise ContractError("orders", f"the passes of stages {stuck} wait for each other for ever")
    return Replay(tuple(map(np.asarray, starts)), tuple(map(np.asarray, ends)))


_Place = tuple[int, int]  # stage, index in its order
_Need = tuple[int, int, float]  # stage, index and the delay after that pass has ended
_Needs = list[list[list[_Need]]]  # of every pass of every stage
_Links = Sequence[Sequence[Sequence[float]]]


def _needs(orders: Sequence[Order], links: _Links, *, blocking: bool) -> _Needs:
    """Dependencies of every pass on passes of other stages."""
    needs: _Needs = [[[] for _ in order] for order in orders]
    for stage, row in enumerate(_sources(orders)):
        for index, source in enumerate(row):
            if source is not None:
                item = orders[stage][index]
                link = links[0][stage - 1] if item.op is Op.FORWARD else links[1][stage]
                delay = link[item.microbatch]
                needs[stage][index].append((*source, delay))
                if blocking:
                    _hold_both(needs, source, (stage, index), delay)
    return needs


def _hold_both(needs: _Needs, sender: _Place, receiver: _Place, delay: float) -> None:
    """A transfer begins when both ends are ready, and neither goes on before it is over."""
    stage, index = receiver
    resumed = [(*sender, delay)]
    if index:
        needs[stage][index].append((stage, index - 1, delay))
        resumed.append((stage, index - 1, delay))
    if sender[1] + 1 < len(needs[sender[0]]):
        needs[sender[0]][sender[1] + 1] += resumed


def _sources(orders: Sequence[Order]) -> list[list[_Place | None]]:
    """The pass of another stage whose result every pass takes in; None where there is none.

    A stage runs in order, so that its own forward needs no entry: that it comes first is checked.
    """
    stages = len(orders)
    last = stages * (1 + max((p.chunk for order in orders for p in order), default=0)) - 1
    made: dict[tuple[Op, int, int], _Place] = {}
    for stage, order in enumerate(orders):
        for index, item in enumerate(order):
            if item.part is not Part.WEIGHT:
                made[item.op, item.chunk * stages + stage, item.microbatch] = stage, index
    sources: list[list[_Place | None]] = []
    for stage, order in enumerate(orders):
        row: list[_Place | None] = []
        for index, item in enumerate(order):
            here, step = item.chunk * stages + stage, -1 if item.op is Op.FORWARD else 1
            if step > 0 and made.get((Op.FORWARD, here, item.microbatch), (0, index))[1] >= index:
                raise ContractError("orders", f"stage {stage} runs {item} before its forward")
            from_outside = item.part is not Part.WEIGHT and 0 <= here + step <= last
            source = made.get((item.op, here + step, item.microbatch)) if from_outside else None
            if from_outside and source is None:
                raise ContractError("orders", f"stage {stage} waits for ever for what {item} needs")
            row.append(source)
        sources.append(row)
    return sources
