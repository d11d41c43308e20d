"""Transfer of the summed gradients of a step to the ranks that make its update."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from resihp.contracts import PeerLostError
from resihp.layout import Move, Param, Parameters, Range, StateRange, containing

from ..step import Engine
from ..step.gradient_allreduce import SummedGradients
from ..step.shard import copy_shared_rows
from .buffers import PendingShard, held_apart
from .exchange import GradientParts, TensorExchange, view_of

_POLL_S = 0.005
_LONGEST_WAIT_S = 0.05


@dataclass(frozen=True)
class _Turn:
    """Gradients that move together: `moves` from and to this rank, and what it copies itself."""

    moves: list[Move] = field(default_factory=list)
    local: list[tuple[Param, Range, Range]] = field(default_factory=list)

    def of(self, params: Collection[Param]) -> _Turn:
        """Return the part of some parameters."""
        return _Turn(
            [move for move in self.moves if move.param in params],
            [apart for apart in self.local if apart[0] in params],
        )


class GradientTransfer:
    """Gives the new holders of state the summed gradients of its rows; the old ones keep theirs.

    `early`, parts of the model take turns, the last one first: the gradients of each move as soon
    as they are whole, while training still computes those of the parts before it. Every rank takes
    the same turns, which excludes a deadlock.

    planned    moves of the state: gradients of the same rows move
    parameters of the model
    engine     of the old generation; None if this rank has no place in it
    pending    shard of the new generation; None if this rank has no place in it
    early      before all gradients are whole; alike on all ranks

    received_bytes  by this rank so far
    is_summed       to be set when `engine.total` is there
    """

    def __init__(
        self,
        planned: Sequence[Move],
        parameters: Parameters,
        exchange: TensorExchange,
        engine: Engine | None,
        pending: PendingShard | None,
        *,
        early: bool,
    ) -> None:
        self.received_bytes = 0
        self.is_summed = threading.Event()
        self._exchange, self._engine, self._pending = exchange, engine, pending
        self._held = engine.shard.state_ranges if engine is not None else {}
        self._target = pending.gradients if pending is not None else SummedGradients()
        self._target_view = view_of(GradientParts([self._target]))
        turn_of = _turns(parameters) if early else dict.fromkeys(parameters.all, 0)
        self._turns = [_Turn() for _ in range(max(turn_of.values(), default=0) + 1)]
        for move in planned:
            if exchange.rank in (move.source, move.target):
                self._turns[turn_of[move.param]].moves.append(move)
        for apart in held_apart(engine.shard if engine is not None else None, pending):
            self._turns[turn_of[apart[0]]].local.append(apart)

    def run(self, cancelled: threading.Event) -> None:
        """Move all of them. Raises `PeerLostError` if a peer is lost, or once it is `cancelled`."""
        for turn in self._turns:
            self._move(turn, self._await(turn, cancelled))

    def kept_of(self, params: Collection[Param], total: SummedGradients) -> SummedGradients:
        """Return those of `total` that this rank gives in `run_behind`."""
        given = (self._given(turn.of(params)) for turn in self._turns)
        return {held: total[held] for held in chain.from_iterable(given)}

    def run_behind(self, params: Collection[Param], kept: SummedGradients) -> None:
        """Move those of `params` in a step whose update the old generation has made.

        `kept_of` this rank, as its update has clipped them.
        """
        for turn in self._turns:
            self._move(turn.of(params), kept)

    def _move(self, turn: _Turn, source: SummedGradients) -> None:
        self.received_bytes += self._exchange.run(
            turn.moves,
            1,
            view_of(GradientParts([source])),
            self._target_view,
            meanwhile=_copies(turn, source, self._target),
        )

    def total(self) -> SummedGradients | None:
        """Return the summed gradients of the new shard, behind `run`."""
        if self._pending is None:
            return None
        kept = self._engine.total if self._engine is not None else None
        whole = {**(kept or {}), **self._pending.gradients}
        return {held: whole[held] for held in self._pending.shard.slices}

    def _await(self, turn: _Turn, cancelled: threading.Event) -> SummedGradients:
        """Return the gradients that this rank gives in a turn, once they are whole."""
        engine, whole = self._engine, SummedGradients()
        for held in self._given(turn):
            assert engine is not None, "only ranks of the old layout give"
            while (summed := engine.sum_of(held)) is None:
                if cancelled.is_set():
                    raise PeerLostError("the change of layout was given up")
                if engine.is_ending.wait(_LONGEST_WAIT_S):
                    self.is_summed.wait(_POLL_S)
            whole[held] = summed
        return whole

    def _given(self, turn: _Turn) -> Iterator[StateRange]:
        for move in turn.moves:
            if move.source == self._exchange.rank:
                yield containing(self._held, move.param, (move.start, move.stop))
        for param, held, _ in turn.local:
            yield param, held


def _turns(parameters: Parameters) -> dict[Param, int]:
    """The turn of each parameter: by parts of the model, in the order of backward.

    Those that are not split come last: their sums over replicas are whole at the end of the step,
    and they are small.
    """
    parts = (parameters.last, *reversed(parameters.layers), parameters.first)
    turns = {param: turn for turn, params in enumerate(parts) for param in params}
    return {param: len(parts) if param.dim is None else turn for param, turn in turns.items()}


def _copies(turn: _Turn, source: SummedGradients, target: SummedGradients) -> Iterator[None]:
    """Copy what this rank has already in other ranges, one after the other."""
    for param, held, due in turn.local:
        copy_shared_rows(param, source[param, held], held, target[param, due], due)
        yield
