"""Fence: the wait of the training thread until a checkpoint needs its tensors no more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from .copier import Copier
from .in_flight import CheckpointAbandoned, ChunkState, InFlightCheckpoint

STALL_TIMEOUT_S = 60.0
"""Longest wait for storage that makes no progress; then training goes on without the checkpoint."""


class FenceWait:
    """Wait of one call of the fence, for some chunks of one checkpoint.

    Where the host cache holds the whole state it waits for copies and never for storage: a chunk
    that finds no room ends the checkpoint. Where the cache is smaller than the state (`streams`),
    chunks that are not copied yet have to wait until levels have drained others.

    deadline_s  of the monotonic clock, for the wait for room; None: as said above
    room_s      seconds spent in waits for room
    """

    def __init__(
        self, checkpoint: InFlightCheckpoint, copier: Copier, deadline_s: float | None
    ) -> None:
        self._checkpoint, self._copier, self._deadline_s = checkpoint, copier, deadline_s
        self._progress = (-1, -1)
        self._since_s = 0.0
        self.room_s = 0.0

    def secure(self, needed: Iterable[int]) -> bool:
        """Wait until the tensors of these chunks may change; False if the wait was given up."""
        checkpoint, pending = self._checkpoint, deque(needed)
        while True:
            is_helped = self._copier.help(checkpoint, pending)
            with checkpoint.changed:
                if checkpoint.problem is not None or not pending:
                    return True
                state = checkpoint.progress[pending[0]]
                has_room = checkpoint.has_room(pending[0])
                if state >= ChunkState.ORDERED or (
                    has_room and is_helped and state is not ChunkState.COPYING
                ):
                    continue
                if state is ChunkState.COPYING or has_room:
                    checkpoint.changed.wait()
                elif not self._wait_for_room():
                    checkpoint.abandon(CheckpointAbandoned("no room in the host cache"))
                    return False

    def _wait_for_room(self) -> bool:
        """Wait until something changes; False if there is no time left for that."""
        begun_s = time.monotonic()
        left_s = self._left_s(begun_s)
        if left_s <= 0:
            return False
        self._checkpoint.changed.wait(left_s)
        self.room_s += time.monotonic() - begun_s
        return True

    def _left_s(self, now_s: float) -> float:
        """Seconds that the wait for room may still take."""
        if self._deadline_s is not None:
            return self._deadline_s - now_s
        if not self._checkpoint.streams:
            return 0.0
        progress = (self._checkpoint.progress.safe, self._checkpoint.cache.returned)
        if progress != self._progress:
            self._progress, self._since_s = progress, now_s
        return self._since_s + STALL_TIMEOUT_S - now_s
