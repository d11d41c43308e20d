"""From a state to a checkpoint in a host buffer: the plan, the buffer, the order of the copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Condition
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..parts import Part, State, Thing, collect
from ..ranks import Ranks
from .copier import Copier, chunks_until, write_order
from .filling import Abandoned, Filling, Identity
from .plan import (
    SavePlan,
    buffer_addresses,
    extra_of,
    frozen,
    make_plan,
    signature_of,
    snapshot,
)
from .slots import Slots


class Fitted(NamedTuple):
    """What a state holds, and whether there are buffers of its shape (not: free ones)."""

    parts: list[Part]
    things: list[Thing]
    has_buffers: bool


class Staging:
    """Copies states into host buffers, one state at a time, and waits for copies at the fence."""

    def __init__(self, ranks: Ranks, buffers: int) -> None:
        self._ranks = ranks
        self._slots = Slots(buffers)
        self._changed = Condition()
        self._copier: Copier | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._modules: list[nn.Module] = []
        self._plan: SavePlan | None = None

    def know(self, optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> None:
        """Copy in the order in which this optimizer writes; save buffers of modules at once."""
        self._optimizers.append(optimizer)
        self._modules += modules

    def fit(self, state: State) -> Fitted:
        """Plan for the state if its shapes are new, and make the buffers fit it."""
        parts, things = collect(state)
        plan = self._plan
        if plan is None or plan.signature != signature_of(parts, things):
            order = write_order([part.tensor for part in parts], self._optimizers)
            plan = self._plan = make_plan(parts, things, self._ranks, order)
        if self._copier is None:
            cuda = (part.tensor.device for part in parts if part.tensor.is_cuda)
            self._copier = Copier(next(cuda, torch.device("cpu")))
        return Fitted(parts, things, self._slots.fit(plan.file, pinned=self._copier.pins))

    def lend(
        self,
        step: int,
        found: Fitted,
        state: State,
        extra: Mapping[str, object],
        window_s: float,
    ) -> Filling | None:
        """A checkpoint in a buffer, not yet begun; None where no buffer is free in time."""
        assert self._plan is not None
        lent = self._slots.lend(window_s)
        if lent is None:
            return None
        given = state.values() if isinstance(state, Mapping) else ()
        volatile = buffer_addresses([*self._modules, *given])
        mine = [thing for thing in found.things if thing.key in self._plan.things]
        mine.append(extra_of(extra, self._ranks.rank))
        return Filling(
            Identity(step, self._ranks.rank, self._ranks.run, self._ranks.all),
            self._plan.file,
            lent[0],
            [snapshot(found.parts[pick].tensor, volatile) for pick in self._plan.picks],
            frozen(mine),
            self._changed,
            previous=lent[1],
        )

    @property
    def picks(self) -> tuple[int, ...]:
        """Positions of the parts that are copied, in the order of the buffer."""
        return self._plan.picks if self._plan is not None else ()

    def start(self, filling: Filling) -> None:
        """Begin to copy."""
        assert self._copier is not None
        self._copier.start(filling)

    def fence(self, filling: Filling, tensors: Sequence[Tensor] | None) -> bool:
        """Wait until the tensors (None: all) may change; False where it gives the checkpoint up.

        It waits for copies, never for storage: a copy that waits for room in the buffer is given
        up instead.
        """
        assert self._copier is not None
        needed = filling.count if tensors is None else chunks_until(filling, tensors)
        self._copier.help(filling, needed)
        with filling.changed:
            while filling.enqueued < needed and filling.problem is None:
                if filling.is_blocked:
                    filling.problem = Abandoned("no room in the buffer at the fence")
                    filling.changed.notify_all()
                    return False
                filling.changed.wait()
        self._copier.fence()
        return True

    def close(self) -> None:
        """End the copying thread."""
        if self._copier is not None:
            self._copier.close()
