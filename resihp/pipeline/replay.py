"""Event-driven replay of one replica's pipeline: when every pass starts and ends."""

from __future__ import annotations

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
        """When the last pass ends."""
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
    orders: Sequence[Order], durations: Sequence[Sequence[float]], *, p2p: ArrayLike = 0.0
) -> Replay:
    """Runs every stage's `orders` as soon as the stages before and behind it allow.

    durations  of every pass, aligned with `orders`
    p2p        delay of a transfer; broadcasts to [direction, link, microbatch], where direction 0
               is forward and link s joins stages s and s + 1 (the last one, the last stage and
               the first, between two chunks). A transfer delays its receiver, not its sender.

    Raises `ContractError` for orders that wait for each other for ever.
    """
    stages = len(orders)
    links = np.broadcast_to(
        p2p, (2, stages, 1 + max((p.microbatch for order in orders for p in order), default=-1))
    ).tolist()
    plan = [_dependencies(order, stage, stages, links) for stage, order in enumerate(orders)]
    done: dict[tuple[int, int, int], float] = {}
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    waiting: dict[tuple[int, int, int], int] = {}
    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        now = ends[stage][-1] if ends[stage] else 0.0
        for own, needs, delay in plan[stage][len(starts[stage]) :]:
            if needs is not None:
                arrival = done.get(needs)
                if arrival is None:
                    waiting[needs] = stage
                    break
                now = max(now, arrival + delay)
            starts[stage].append(now)
            now += durations[stage][len(ends[stage])]
            ends[stage].append(now)
            if own is not None:
                done[own] = now
                if own in waiting:
                    ready.append(waiting.pop(own))
    if waiting:
        stuck = sorted(waiting.values())
        raise ContractError("orders", f"the passes of stages {stuck} wait for each other for ever")
    return Replay(tuple(map(np.asarray, starts)), tuple(map(np.asarray, ends)))


_Key = tuple[int, int, int]  # direction, virtual stage, microbatch


def _dependencies(
    order: Order, stage: int, stages: int, links: list[list[list[float]]]
) -> list[tuple[_Key | None, _Key | None, float]]:
    """For every pass: what it provides, what it needs from another stage, and the delay of that.

    The end of its own forward needs no entry: a stage runs in order, and the order is checked.
    """
    last = stages * (1 + max((p.chunk for p in order), default=0)) - 1
    plan: list[tuple[_Key | None, _Key | None, float]] = []
    forwarded = set()
    for item in order:
        here, index = item.chunk * stages + stage, item.microbatch
        if item.part is Part.WEIGHT:
            plan.append((None, None, 0.0))
        elif item.op is Op.FORWARD:
            forwarded.add((here, index))
            needs = (0, here - 1, index) if here else None
            plan.append(((0, here, index), needs, links[0][stage - 1][index]))
        else:
            if (here, index) not in forwarded:
                raise ContractError("orders", f"stage {stage} runs {item} before its forward")
            needs = (1, here + 1, index) if here < last else None
            plan.append(((1, here, index), needs, links[1][stage][index]))
    return plan
