"""Where microbatches come from: a function of the step, or an iterator with a cursor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from ..models import Packed

DataSource = Callable[[int, int], Packed]
"""Microbatch `index` (over all replicas) of `step`; the same on every rank, however laid out."""


@runtime_checkable
class Cursor(Protocol):
    """A data source whose microbatches depend on what was read before.

    It may be asked for the microbatches of a step again and again until `finish(step)` is called,
    on every rank that trains. Its state is the same on all of them; a rank that comes in loads
    what another one saves. `state_dict` holds numbers, strings, tensors, and lists and
    dictionaries of them, and describes the beginning of the step that is not finished yet.
    """

    def __call__(self, step: int, index: int) -> Packed: ...

    def finish(self, step: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StatefulIterator(Protocol):
    """An iterator over microbatches that can save where it stands and go on from there."""

    def __next__(self) -> Packed: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class IteratorData:
    """A `Cursor` over an iterator: each step takes the next `microbatches` of it, on every rank."""

    def __init__(self, iterator: StatefulIterator, microbatches: int) -> None:
        self._iterator, self._microbatches = iterator, microbatches
        self._drawn: list[Packed] = []
        self._before = iterator.state_dict()

    def __call__(self, step: int, index: int) -> Packed:
        """Microbatch `index` of the step that is not finished yet."""
        self._draw()
        return self._drawn[index]

    def finish(self, step: int) -> None:
        """Go on behind this step's microbatches, asked for or not."""
        self._draw()
        self._drawn, self._before = [], self._iterator.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Where the iterator stood when the step began."""
        return self._before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where another rank stood."""
        self._iterator.load_state_dict(state)
        self._drawn, self._before = [], state

    def _draw(self) -> None:
        while len(self._drawn) < self._microbatches:
            self._drawn.append(next(self._iterator))
