"""Learning-rate schedules as functions of the step, independent of the layout.

A rate is the factor on the optimizer's own `lr`, like the lambdas of torch's `LambdaLR`; any
callable will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from resihp.contracts import ContractError

Rate = Callable[[int], float]
"""Factor on the learning rate in a step; steps count from 0."""


def constant(step: int) -> float:
    """Keep the optimizer's own rate."""
    return 1.0


def warmup(steps: int) -> Rate:
    """Rise linearly over `steps` steps, then stay constant.

    >>> [warmup(3)(step) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if steps < 0:
        raise ContractError("warmup", f"must be 0 or more steps, not {steps}")
    return lambda step: min(1.0, (step + 1) / (steps + 1))


def warmup_cosine(steps: int, total: int, *, floor: float = 0.1) -> Rate:
    """Rise linearly over `steps`, then follow half a cosine down to `floor` at step `total`.

    Loshchilov & Hutter, SGDR (arXiv 1608.03983), equation 5, without restarts.

    >>> rate = warmup_cosine(2, 10, floor=0.0)
    >>> [round(rate(step), 2) for step in (0, 2, 6, 10, 20)]
    [0.33, 1.0, 0.5, 0.0, 0.0]
    """
    if not 0 <= steps < total:
        raise ContractError("total", f"must exceed the {steps} steps of warm-up, not {total}")
    rise = warmup(steps)

    def rate(step: int) -> float:
        if step < steps:
            return rise(step)
        progress = min(1.0, (step - steps) / (total - steps))
        return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0

    return rate
