"""Pool of host buffers, allocated once per file layout and lent to one checkpoint at a time."""

from __future__ import annotations

from ..format.shard_file import ShardFile
from .host_buffer import HostBuffer, begin, populate
from .in_flight import BufferSlot, InFlightCheckpoint


class BufferPool:
    """A fixed number of buffers, each an image of the same file.

    spare  number of buffers for a slow level; their pages are allocated at the first use
    """

    def __init__(self, count: int, spare: int = 0) -> None:
        self._count, self._spare = count, spare
        self._slots: list[BufferSlot] = []
        self._file: ShardFile | None = None

    def fit(self, file: ShardFile, *, pinned: bool) -> bool:
        """Make every buffer an image of `file`; False while one of another layout is in use."""
        if file is self._file:
            return True
        if any(slot.last is not None and not slot.last.is_idle for slot in self._slots):
            return False
        buffers = [slot.buffer for slot in self._slots]
        if self._file is None or self._file.nbytes != file.nbytes:
            self._slots.clear()
            buffers.clear()
            buffers = [HostBuffer(file.nbytes, pinned=pinned) for _ in range(self._count)]
            begin(populate, [buffer.tensor for buffer in buffers[: self._count - self._spare]])
        self._slots = [BufferSlot(buffer, file) for buffer in buffers]
        self._file = file
        return True

    def lend(self, window_s: float) -> tuple[BufferSlot, InFlightCheckpoint | None] | None:
        """Return a free slot, or one that will be released chunk by chunk within the window.

        The latter comes with the checkpoint that is still being read there. None: no slot.
        """
        readers = [(slot, _reader(slot)) for slot in self._slots]
        for slot, reader in readers:
            if reader is None and (slot.last is None or slot.last.is_idle):
                return slot, None
        for slot, reader in readers:
            is_quiet = slot.last is None or not slot.last.progress.copying
            if reader is not None and is_quiet and reader.released_within(window_s):
                return slot, reader
        return None


def _reader(slot: BufferSlot) -> InFlightCheckpoint | None:
    """Return the checkpoint in the slot that levels still read; abandoned ones do not count."""
    last = slot.last
    if last is not None and last.problem is not None and not last.taken:
        last = last.previous
    return last if last is not None and last.problem is None and last.taken else None
