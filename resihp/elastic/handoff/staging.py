"""Fills the next world's shard while the present one trains."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from resihp.contracts import WorldBrokenError
from resihp.layout import Param, Range

from ..engine import Setup
from ..engine.replicated import carry_over
from ..engine.shard import Shard, rows
from ..engine.sums import Gradients
from .courier import Courier, Summed, state_view
from .draft import unshared
from .prepare import Prepared

_NICENESS = 5


@dataclass(frozen=True)
class Carried:
    """Bytes of state and of gradients that one rank received, and of the buffers for both."""

    received_bytes: int = 0
    handed_bytes: int = 0
    buffer_bytes: int = 0


class Staging:
    """Brings a prepared shard to the state of the present step, leaving the old one whole.

    Parameters and moments do not change between two updates, so they can be copied while the
    passes of a step run (LiveR, arXiv 2605.22014; DataStates-LLM, arXiv 2601.16956). The update
    at the step's end is not copied: `hand_over` gives each new holder the summed
    gradients of its ranges, and it makes the same elementwise update itself. Collective over
    the ranks alive: all call `start` (or `fill`) before the same step.
    """

    def __init__(
        self,
        setup: Setup,
        prepared: Prepared,
        old: Shard | None,
        rank: int,
        completed: int,
        *,
        buffer_bytes: int,
        on_parcel: Callable[[int], None],
    ) -> None:
        self.completed = completed
        self._received_bytes = self._handed_bytes = 0
        self._setup, self._prepared = setup, prepared
        self._old, self._new = old, prepared.draft
        self._rank, self._buffer_bytes, self._on_parcel = rank, buffer_bytes, on_parcel
        self._courier: Courier | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def courier(self) -> Courier:
        """What has filled the shard; it can carry more between the same ranks."""
        assert self._courier is not None
        return self._courier

    @property
    def carried(self) -> Carried:
        """What has been received so far, and the memory of the exchange's buffers."""
        return Carried(self._received_bytes, self._handed_bytes, self.courier.held_bytes)

    def start(self) -> None:
        """Fill in the background; `wait` for it before the update."""
        # A thread that is never started would keep this, and the world, until cycles are collected.
        self._thread = threading.Thread(target=self._run, name="resihp-staging", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the shard is filled. Raises `WorldBrokenError` if it will never be."""
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Give it up; no state is read or written any more afterwards."""
        self._prepared.cancelled.set()
        if self._thread is not None:
            self._thread.join()

    def fill(self) -> None:
        """Bring parameters, moments and the count of updates to where the old world is."""
        old, new = self._old, self._new
        assert self._prepared.transit is not None
        self.completed = carry_over(
            self._prepared.transit,
            self._setup,
            self.completed,
            old=old,
            new=new.shard if new is not None else None,
            source=self._prepared.source,
        )
        self._courier = Courier(
            self._prepared.pairs,
            self._rank,
            buffer_bytes=self._buffer_bytes,
            on_parcel=self._on_parcel,
        )
        for param, span, origin in self._kept():
            assert old is not None
            assert new is not None
            for source, target in zip(old.state(param), new.state(param), strict=True):
                _copy(source, target, param, span, origin)
        # Most optimizers make their moments at the first update.
        is_new = self.completed == 0 and not self._setup.optimizer.form.eager
        copies = 1 if is_new else self._setup.optimizer.copies
        self._received_bytes = self._courier.carry(
            self._prepared.planned, copies, state_view(old), state_view(new)
        )

    def hand_over(self, total: Gradients | None) -> Gradients | None:
        """Give the new holders the whole gradients of this step; the old world keeps its own.

        `total` is what this rank has in the old world; returns what it has in the new one.
        """
        old, new = self._old, self._new
        gradients = new.gradients if new is not None else {}

        def own() -> Iterator[None]:
            for param, span, origin in self._kept():
                assert total is not None
                _copy(total[param], gradients[param], param, span, origin)
                yield

        self._handed_bytes = self.courier.carry(
            self._prepared.planned,
            1,
            state_view(Summed(old.ranges, [total]) if old is not None and total else None),
            state_view(Summed(new.ranges, [gradients]) if new is not None else None),
            meanwhile=own(),
        )
        if new is None:
            return None
        whole = {**(total or {}), **gradients}
        return {param: whole[param] for param in new.shard.tensors}

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self.fill()
        except WorldBrokenError as error:
            self._error = WorldBrokenError(str(error))  # a traceback would keep all of this
        except Exception as error:  # noqa: BLE001 what is not filled must not be taken on
            self._error = error

    def _kept(self) -> list[tuple[Param, Range, tuple[int, int]]]:
        """What this rank holds in both layouts, but in different ranges; where these begin."""
        old, new = self._old, self._new
        if old is None or new is None:
            return []
        kept = []
        for param in unshared(new.shard, old):
            if param in old.ranges:
                before, after = old.ranges[param], new.ranges[param]
                span = (max(before[0], after[0]), min(before[1], after[1]))
                if span[0] < span[1]:
                    kept.append((param, span, (before[0], after[0])))
        return kept


def _copy(
    source: torch.Tensor, target: torch.Tensor, param: Param, span: Range, origin: tuple[int, int]
) -> None:
    rows(target, param, span, origin[1]).copy_(rows(source, param, span, origin[0]))
