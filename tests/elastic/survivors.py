"""A source of plans for jobs that lose ranks."""

from __future__ import annotations

import time
from collections.abc import Collection

from resihp.contracts import InfeasibleError, Layout, Plan, Replica, Stage, even_quotas
from resihp.layout import split
from tests.elastic.engine_job import MICROBATCHES


class Survivors:
    """After a loss: spares in the places of the lost, else smaller groups if it may, else fewer
    replicas."""

    def __init__(self, shrink: bool) -> None:
        self._shrink = shrink

    def wait(self, after: int, seconds: float) -> Plan | None:
        time.sleep(min(seconds, 0.05))  # whoever asks does so in a loop
        return None

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        spares = [rank for rank in sorted(survivors) if rank not in current.layout.ranks]
        filled = [_filled(replica, survivors, spares) for replica in current.layout.replicas]
        replicas = [_rest(replica, survivors, self._shrink) for replica in filled]
        left = [replica for replica in replicas if replica is not None]
        if not left:
            raise InfeasibleError("replicas", "no replica is whole")
        quotas = even_quotas(MICROBATCHES, len(left))
        return Plan(version=current.version + 1, layout=Layout(tuple(left)), quotas=quotas)

    def joined(self, current: Plan, joiners: Collection[int], step: int) -> Plan | None:
        if not joiners:
            return None
        whole = (0, current.layout.layers)
        new = [Replica((Stage((rank,), whole, (4,)),)) for rank in sorted(joiners)]
        layout = Layout((*current.layout.replicas, *new))
        quotas = even_quotas(MICROBATCHES, layout.dp)
        return Plan(version=current.version + 1, layout=layout, quotas=quotas)

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        pass

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        pass


def _filled(replica: Replica, survivors: Collection[int], spares: list[int]) -> Replica:
    """`replica` with spares, as far as they go, in the places of those that are lost."""
    stages = []
    for stage in replica.stages:
        ranks = [r if r in survivors or not spares else spares.pop(0) for r in stage.ranks]
        stages.append(Stage(tuple(ranks), stage.layers, stage.shares))
    return Replica(tuple(stages))


def _rest(replica: Replica, survivors: Collection[int], shrink: bool) -> Replica | None:
    if set(replica.ranks) <= set(survivors):
        return replica
    stages = []
    for stage in replica.stages:
        ranks = tuple(rank for rank in stage.ranks if rank in survivors)
        if not ranks or not shrink:
            return None
        shares = tuple(stop - start for start, stop in split(4, (1,) * len(ranks)))
        stages.append(Stage(ranks, stage.layers, shares))
    return Replica(tuple(stages))
