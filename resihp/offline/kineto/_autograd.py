"""Forward and backward passes that autograd's sequence numbers tell apart.

A forward operator takes the next number of its thread, and the operator that evaluates its gradient
carries the same one. Within one backward pass the numbers only fall, since the engine evaluates the
latest operator that is ready: where they rise, another backward pass begins. The numbers that a
backward pass evaluated are those of its forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._intervals import Times
from ._rank_profile import OperatorKind, Operators


@dataclass(frozen=True)
class Window:
    """Stretch of time of one host thread; -1: of that with most operators."""

    start_us: float
    stop_us: float
    thread: int


@dataclass
class _BackwardPass:
    """Windows of one backward pass, and the lowest and highest number that it evaluated."""

    low: int
    high: int
    windows: list[Window]


def autograd_passes(operators: Operators) -> list[tuple[Window | None, list[Window]]]:
    """The forward and backward windows of every microbatch, in the order of the forward passes; the
    forward window is None where it was not recorded."""
    found = list(_backward_passes(operators))
    if not found:
        return []
    forward = _ForwardOperators(operators)
    result: list[tuple[Window | None, list[Window]]] = []
    after = -np.inf
    for one in _merged(found):
        window = forward.window(one.low, one.high, after)
        after = after if window is None else window.stop_us
        result.append((window, one.windows))
    return result


def outermost(start: Times, stop: Times) -> NDArray[np.bool_]:
    """Mask of the stretches that lie in none of the others; in the order of their start, the longer
    one first."""
    reach = np.maximum.accumulate(stop)
    first = np.ones(start.size, bool)
    first[1:] = start[1:] >= reach[:-1]
    return first


def _backward_passes(operators: Operators) -> Iterator[_BackwardPass]:
    engine = operators.select(operators.kind == OperatorKind.ENGINE)
    for thread in np.unique(engine.thread).tolist():
        here = engine.select(engine.thread == thread)
        here = here.select(outermost(here.start, here.stop))
        numbered = here.sequence >= 0
        if not numbered.any():
            continue
        sequence = here.sequence[numbered]
        rises = np.concatenate([[0], np.cumsum(sequence[1:] >= sequence[:-1])])
        # Those without a number, the accumulation of gradients, belong to the pass before them.
        before = np.maximum(np.cumsum(numbered) - 1, 0)
        owner = rises[before]
        for number in range(int(rises[-1]) + 1):
            inside, evaluated = owner == number, sequence[rises == number]
            window = Window(
                float(here.start[inside][0]), float(here.stop[inside].max()), int(thread)
            )
            yield _BackwardPass(int(evaluated.min()), int(evaluated.max()), [window])


def _merged(passes: list[_BackwardPass]) -> list[_BackwardPass]:
    """Backward passes of the same operators as one: of several threads, or in two halves."""
    result: list[_BackwardPass] = []
    for one in sorted(passes, key=lambda one: one.low):
        if result and one.low <= result[-1].high:
            last = result[-1]
            last.high = max(last.high, one.high)
            last.windows += one.windows
        else:
            result.append(one)
    return result


class _ForwardOperators:
    """Numbered operators outside of the engine, of the thread that runs most of them.

    Operators that record nothing carry the number that the next one takes: the last that begins
    with a number is the one that took it.
    """

    def __init__(self, operators: Operators) -> None:
        numbered = (operators.sequence >= 0) & (operators.kind != OperatorKind.ENGINE)
        forward = operators.select(numbered & (operators.backward == 0))
        threads, counts = np.unique(forward.thread, return_counts=True)
        self._thread = int(threads[np.argmax(counts)]) if threads.size else -1
        here = operators.select(operators.thread == self._thread)
        top = here.select(outermost(here.start, here.stop))
        is_engine = top.kind == OperatorKind.ENGINE
        self._top = top
        forward = forward.select(forward.thread == self._thread)
        at = np.searchsorted(top.start, forward.start, side="right") - 1
        forward, at = forward.select(~is_engine[at]), at[~is_engine[at]]
        order = np.lexsort((forward.start, forward.sequence))
        self._sequence, self._at = forward.sequence[order], at[order]

    def window(self, low: int, high: int, after: float) -> Window | None:
        """From the operator that took number `low` to the one that took `high`, not before the
        moment `after`; None if the first of them was not recorded."""
        first, last = (
            int(np.searchsorted(self._sequence, number, side="right")) - 1 for number in (low, high)
        )
        if first < 0 or self._sequence[first] != low:
            return None
        start, stop = self._top.start[self._at[first]], self._top.stop[self._at[last]]
        return Window(max(float(start), after), float(stop), self._thread)
