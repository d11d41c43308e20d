"""Writes one rank's part of the checkpoints of one layout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from resihp.checkpoint import Checkpointer, SavePolicy
from resihp.checkpoint.policy import SaveTiming
from resihp.contracts import Plan
from resihp.layout import Param, Range

from ..engine import Cursor, Setup
from ..engine.shard import Shard
from .pieces import pieces_of


class Writer:
    """Writes the ranges `spans` of this rank's shard at the steps that it is told.

    The first save of the layout finds everything planned and allocated. `policy` is asked on one
    rank alone, so that `saver` has none of its own. `connect` tells its levels where peers are.
    """

    def __init__(
        self,
        saver: Checkpointer,
        policy: SavePolicy,
        setup: Setup,
        plan: Plan,
        spans: Sequence[tuple[Param, Range]],
        shard: Shard,
        connect: Callable[[], None],
    ) -> None:
        self.plan = plan
        self._saver, self._policy, self._setup, self._spans = saver, policy, setup, spans
        self._is_owed = False
        self._begun_s: float | None = None
        self._cost_s: float | None = None
        self._blocked_before_s = 0.0
        pieces = pieces_of(shard, self._spans, setup.model.parameters)

        def prepare() -> None:
            connect()
            saver.prepare(pieces)

        self._ready = threading.Thread(
            target=prepare, name="resihp-checkpoint-prepare", daemon=True
        )
        self._ready.start()

    def is_due(self, step: int) -> bool:
        """What the policy says; and again until it has been done."""
        now, counters = time.monotonic(), self._saver.counters
        times = [c.durable_s for c in counters.levels.values() if c.durable_s is not None]
        since_s = None if self._begun_s is None else now - self._begun_s
        moment = SaveTiming(step, since_s, self._cost_s, max(times, default=None))
        self._is_owed = self._is_owed or self._policy.is_due(moment)
        return self._is_owed

    def save(self, step: int, shard: Shard) -> None:
        """Begin to save the state after `step`."""
        self._ready.join()
        self._blocked_before_s = self._saver.counters.blocking_s
        data = self._setup.data
        extra = {
            "plan": self.plan.version,
            "cursor": data.state_dict() if isinstance(data, Cursor) else None,
        }
        self._begun_s = time.monotonic()
        pieces = pieces_of(shard, self._spans, self._setup.model.parameters)
        self._is_owed = not self._saver.save(step, pieces, extra)

    def fence(self) -> None:
        """Wait for copies."""
        if self._begun_s is not None:
            self._saver.fence()
            self._cost_s = self._saver.counters.blocking_s - self._blocked_before_s

    def wait(self, timeout_s: float) -> None:
        """Until everything that was begun is written, at most so long."""
        self._ready.join()
        self._saver.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """As `wait`, and end all threads."""
        self._ready.join()
        self._saver.close(timeout_s)
