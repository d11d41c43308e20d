"""Pool of host buffers, allocated once per file layout and lent to one checkpoint at a time."""

from __future__ import annotations

from ..format.shard_file import ShardFile
from .host_buffer import HostBuffer, begin, populate
from .in_flight import BufferSlot, InFlightCheckpoint


class BufferPool:
    """A fixed number of buffers, each an image of a rank's file.

    spare  number of buffers for a slow level; their pages are allocated at the first use
    """

    def __init__(self, count: int, spare: int = 0) -> None:
        self._count, self._spare = count, spare
        self._slots: list[BufferSlot] = []

    def fit(self, file: ShardFile, *, pinned: bool) -> None:
        """Make every idle buffer an image of `file`; those in use follow in a later call."""
        old: list[BufferSlot | None] = [*self._slots]
        old += [None] * (self._count - len(old))
        self._slots, fresh = [], []
        while old:
            slot = old.pop(0)
            if slot is None or (slot.file is not file and _is_idle(slot)):
                if slot is not None and slot.file.nbytes == file.nbytes:
                    buffer = slot.buffer
                else:
                    slot = None  # its memory is returned before more is allocated
                    buffer = HostBuffer(file.nbytes, pinned=pinned)
                    fresh.append(buffer.tensor)
                slot = BufferSlot(buffer, file)
            self._slots.append(slot)
        begin(populate, fresh[: self._count - self._spare])

    def lend(
        self, file: ShardFile, window_s: float
    ) -> tuple[BufferSlot, InFlightCheckpoint | None] | None:
        """Return a free slot of `file`, or one to be released chunk by chunk within the window.

        The latter comes with the checkpoint that is still being read there. None: no slot.
        """
        readers = [(slot, _reader(slot)) for slot in self._slots if slot.file is file]
        for slot, reader in readers:
            if reader is None and _is_idle(slot):
                return slot, None
        for slot, reader in readers:
            is_quiet = slot.last is None or not slot.last.progress.copying
            if reader is not None and is_quiet and reader.released_within(window_s):
                return slot, reader
        return None


def _is_idle(slot: BufferSlot) -> bool:
    return slot.last is None or slot.last.is_idle


def _reader(slot: BufferSlot) -> InFlightCheckpoint | None:
    """Return the checkpoint in the slot that levels still read; abandoned ones do not count."""
    last = slot.last
    if last is not None and last.problem is not None and not last.taken:
        last = last.previous
    return last if last is not None and last.problem is None and last.taken else None
