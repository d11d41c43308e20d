"""Sources of microbatches: a function of the step, or an iterator with a cursor."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Protocol, runtime_checkable

from resihp.contracts import ContractError

from ..models import Packed

DataSource = Callable[[int, int], Packed]
"""Microbatch `index` (over all replicas) of `step`; the same on every rank, however laid out."""


@runtime_checkable
class Cursor(Protocol):
    """Data source whose microbatches depend on what was read before.

    Every training rank may ask repeatedly for the microbatches of a step, until it calls
    `finish(step)`. The state is equal on all ranks; a joiner loads the state of another rank.
    `state_dict` holds numbers, strings, tensors, and lists and dictionaries of them, and describes
    the beginning of the unfinished step.
    """

    def __call__(self, step: int, index: int) -> Packed: ...

    def finish(self, step: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StatefulIterator(Protocol):
    """Iterator over microbatches that can save and restore its position."""

    def __next__(self) -> Packed: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class IteratorData:
    """`Cursor` over an iterator: each step takes its next `microbatches`, on every rank.

    microbatches  of a step, over all replicas; as many as the job has

    States are copied: the iterator may give, or keep, one that it changes. Raises `ContractError`
    where it ends within a step.
    """

    def __init__(self, iterator: StatefulIterator, microbatches: int) -> None:
        self._iterator, self.microbatches = iterator, microbatches
        self._drawn: list[Packed] = []
        self._before = deepcopy(iterator.state_dict())

    def __call__(self, step: int, index: int) -> Packed:
        """Return microbatch `index` of the unfinished step."""
        self._draw()
        return self._drawn[index]

    def finish(self, step: int) -> None:
        """Advance past the microbatches of this step, requested or not."""
        self._draw()
        self._drawn, self._before = [], deepcopy(self._iterator.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iterator at the start of the step."""
        return self._before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of another rank."""
        self._iterator.load_state_dict(deepcopy(state))
        self._drawn, self._before = [], state

    def _draw(self) -> None:
        while len(self._drawn) < self.microbatches:
            try:
                self._drawn.append(next(self._iterator))
            except StopIteration:
                held = f"{len(self._drawn)} of {self.microbatches} microbatches of the step"
                raise ContractError("data", f"ended after {held}") from None
