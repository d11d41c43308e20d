"""Builds the next world in the background, groups and memory, while the present one trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from resihp.contracts import Plan
from resihp.layout import Parameters

from ..engine.shard import Shard
from ..engine.sums import Rest
from ..worlds.comm import Group, Network, WorldBrokenError
from ..worlds.world import World, build_world


@dataclass(frozen=True)
class Prepared:
    """A world that is connected but not yet taken on.

    transit  all ranks of the old and the new world; state moves over it
    world    None for a rank that has no place in the new layout
    shard    what the rank will hold, its memory in place
    rest     of the step that the old world has begun; None between two steps
    """

    epoch: int
    plan: Plan
    transit: Group
    world: World | None
    shard: Shard | None
    rest: Rest | None = None


class Preparation:
    """Builds one world in a thread of its own; `result` is there when all ranks are connected.

    The thread is abandoned with the preparation: building a group cannot be interrupted, but it
    ends by itself when the store's time-out has passed.
    """

    def __init__(
        self,
        network: Callable[[], Network],
        plan: Plan,
        parameters: Parameters,
        participants: Sequence[int],
        build: Callable[[World], Shard],
        *,
        epoch: int,
        name: str,
    ) -> None:
        self.epoch, self.name = epoch, name
        self.result: Prepared | None = None
        self.error: Exception | None = None
        self._participants = tuple(sorted(participants))
        self._arguments = (network, plan, parameters, build)
        self._thread = threading.Thread(target=self._run, name="resihp-prepare", daemon=True)
        self._thread.start()

    def wait(self, broken: Callable[[Sequence[int], float], str | None]) -> Prepared:
        """The prepared world. Raises `WorldBrokenError` if it will never be complete."""
        waited = timedelta(0)
        slice_ = timedelta(milliseconds=20)
        while self._thread.is_alive():
            self._thread.join(slice_.total_seconds())
            waited += slice_
            reason = broken(self._participants, waited.total_seconds())
            if reason is not None:
                raise WorldBrokenError(reason)
        if self.result is None:
            raise WorldBrokenError(f"the next world could not be built: {self.error}")
        return self.result

    def _run(self) -> None:
        make_network, plan, parameters, build = self._arguments
        try:
            network = make_network()
            transit = network.group(f"{self.name}/transit", self._participants)
            world = shard = None
            if network.rank in plan.layout.ranks:
                world = build_world(network, plan.layout, parameters, name=self.name)
                shard = build(world)
            self.result = Prepared(self.epoch, plan, transit, world, shard)
        except (RuntimeError, dist.DistError) as error:
            self.error = error
