"""Random layouts for chains of changes."""

from __future__ import annotations

import random

from resihp.contracts import Layout, Plan, Replica, Stage
from tests.elastic.engine_job import MICROBATCHES, plan


def random_plan(chosen: random.Random, version: int, *, from_step: int = 0) -> Plan:
    """One or two replicas of uneven stages over a random part of eight ranks, uneven quotas."""
    layout = random_layout(chosen)
    first = chosen.randint(1, MICROBATCHES - 1)
    quotas = (first, MICROBATCHES - first) if layout.dp == 2 else (MICROBATCHES,)
    return plan(version, layout, quotas=quotas, from_step=from_step)


def random_layout(chosen: random.Random) -> Layout:
    """Replicas of one or two stages, of one or two ranks each with uneven shares."""
    free = chosen.sample(range(8), 8)
    replicas = []
    for _ in range(chosen.randint(1, 2)):
        cuts = sorted(chosen.sample(range(1, 4), chosen.randint(0, 1)))
        stages = []
        for start, stop in zip([0, *cuts], [*cuts, 4], strict=True):
            degree = chosen.randint(1, 2)
            ranks, free = tuple(free[:degree]), free[degree:]
            first = chosen.randint(1, 3)
            stages.append(Stage(ranks, (start, stop), (first, 4 - first) if degree > 1 else (4,)))
        replicas.append(Replica(tuple(stages)))
    return Layout(tuple(replicas))
