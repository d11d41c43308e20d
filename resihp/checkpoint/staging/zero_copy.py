"""Zero-copy source for a level: bytes of tensors in host memory, not copied into the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Event

from torch import Tensor

from ..format.checksum import ROW_BYTES, checksum
from ..format.index import CHUNK_BYTES
from ..format.shard_file import ChunkSegment, SourceBytes
from .host_buffer import HostBuffer
from .in_flight import ChunkState, InFlightCheckpoint

WRITERS = 2
"""Threads per file: while one computes checksums the other keeps the disk busy."""

SCRATCH_BLOCKS = 2
"""Memory of each thread, in chunks: one may have to be copied whole, after the edges of others."""

Put = Callable[[list[memoryview], int], None]
"""Writes bytes to storage, from the start of a chunk on."""


class ZeroCopyChunks:
    """Chunks for one thread of a level: from the tensors before the fence, else from the cache.

    Rows of the file (4 KiB) with more than one tensor go through memory of its own, and so do
    tensors whose address differs from their file offset modulo 4096.

    is_over  set when another thread of the level has failed, which notifies `checkpoint.changed`
    """

    def __init__(self, checkpoint: InFlightCheckpoint, is_over: Event) -> None:
        self._checkpoint, self._is_over = checkpoint, is_over
        self._bytes = SourceBytes(checkpoint.sources)
        self._scratch = HostBuffer(SCRATCH_BLOCKS * CHUNK_BYTES, huge=False)
        self._used = 0

    def write(self, first: int, stop: int, put: Put) -> Iterator[range]:
        """Write a run of chunks with `put`, as many per call as are ready; yields those written.

        Waits while a chunk is being copied. A chunk that the fence claims during its write is
        written again. Raises the problem that ended the checkpoint; ends early if `is_over`.
        """
        while first < stop:
            claimed = self._claim(first, stop)
            if claimed is None:
                return
            is_direct, end = claimed
            if is_direct:
                end = self._from_tensors(range(first, end), put)
            else:
                self._from_cache(range(first, end), put)
            yield range(first, end)
            first = end

    def _claim(self, first: int, stop: int) -> tuple[bool, int] | None:
        """Wait for chunks to write: True with the end of a run in the tensors, False if copied."""
        checkpoint = self._checkpoint
        with checkpoint.changed:
            while checkpoint.problem is None:
                if self._is_over.is_set():
                    return None
                if checkpoint.progress[first] is ChunkState.COPIED:
                    return False, self._until(first, stop, self._is_copied)
                if self._is_free(first):
                    end = self._until(first, stop, self._is_free)
                    for number in range(first, end):
                        checkpoint.progress.set(number, ChunkState.COPYING)
                    return True, end
                checkpoint.changed.wait()
            raise checkpoint.problem

    def _is_copied(self, number: int) -> bool:
        return self._checkpoint.progress[number] is ChunkState.COPIED

    def _is_free(self, number: int) -> bool:
        return self._checkpoint.progress[number] is ChunkState.OPEN and (
            self._checkpoint.pace is not None
        )

    @staticmethod
    def _until(first: int, stop: int, is_alike: Callable[[int], bool]) -> int:
        return next((n for n in range(first + 1, stop) if not is_alike(n)), stop)

    def _from_cache(self, numbers: range, put: Put) -> None:
        for number in numbers:
            self._checkpoint.checksum(number)
        put([self._checkpoint.chunk(number) for number in numbers], numbers[0])

    def _from_tensors(self, claimed: range, put: Put) -> int:
        """Write chunks from the tensors, as many as the scratch memory allows; returns the end."""
        views = self._views(claimed)
        numbers = range(claimed.start, claimed.start + len(views))
        sums = [checksum(each) for each in views]
        put([view for each in views for view in each], numbers[0])
        for number in self._overtaken(numbers, sums):
            for _ in self.write(number, number + 1, put):  # waits for the copy by the fence
                pass
        return numbers.stop

    def _views(self, claimed: range) -> list[list[memoryview]]:
        """Build the views of chunks; from then on the fence may claim the chunks."""
        views: list[list[memoryview]] = []
        self._used, is_built = 0, False
        try:
            for number in claimed:
                start, stop = self._checkpoint.file.chunks[number]
                if views and self._used + stop - start > len(self._scratch.view):
                    break
                views.append(list(self._parts(number)))
            is_built = True
        finally:
            built = len(views) if is_built else 0
            with self._checkpoint.changed:  # one wake-up of waiting threads
                for at, number in enumerate(claimed):
                    state = ChunkState.ZERO_COPY if at < built else ChunkState.OPEN
                    self._checkpoint.move(number, state)
        return views

    def _overtaken(self, numbers: range, sums: Sequence[int]) -> list[int]:
        """Mark chunks whose tensors did not change as stored; return the others.

        Raises the problem that ended the checkpoint meanwhile: its tensors may have changed.
        """
        checkpoint = self._checkpoint
        with checkpoint.changed:
            if checkpoint.problem is not None:
                raise checkpoint.problem
            still = [checkpoint.progress[number] is ChunkState.ZERO_COPY for number in numbers]
            for number, value, is_still in zip(numbers, sums, still, strict=True):
                if is_still:
                    checkpoint.sums[number] = value
                    checkpoint.move(number, ChunkState.STORED)
        return [number for number, is_still in zip(numbers, still, strict=True) if not is_still]

    def _parts(self, number: int) -> Iterator[memoryview]:
        """Views of a chunk: rows of one tensor in place, what lies between them in the scratch."""
        file = self._checkpoint.file
        at, stop = file.chunks[number]
        for segment in file.segments[number]:
            source = self._bytes.of(segment)
            low, high = self._in_place(segment, source)
            self._put_edge(source[: low - segment.at], segment.at - at)
            if low < high:
                yield self._gap(number, at, low)
                yield source.numpy().data[low - segment.at : high - segment.at]
                at = high
                self._put_edge(source[high - segment.at :], 0)
        yield self._gap(number, at, stop)

    def _put_edge(self, edge: Tensor, at: int) -> None:
        """Copy bytes of a tensor into the current gap, `at` bytes from its start."""
        begin = self._used + at
        self._scratch.tensor[begin : begin + len(edge)].copy_(edge)

    def _gap(self, number: int, start: int, stop: int) -> memoryview:
        """Complete the current gap with the frames of its range of the file, and begin the next."""
        gap = self._scratch.view[self._used : self._used + stop - start]
        self._checkpoint.file.put_frames(number, gap, start)
        self._used += stop - start
        return gap

    def _in_place(self, segment: ChunkSegment, source: Tensor) -> tuple[int, int]:
        """First and last byte (exclusive) of the file in rows of this tensor alone."""
        end = segment.at + segment.stop - segment.start
        low, high = -(-segment.at // ROW_BYTES) * ROW_BYTES, end // ROW_BYTES * ROW_BYTES
        is_apart = (source.data_ptr() - segment.at) % ROW_BYTES or source.device.type != "cpu"
        if is_apart or low >= high:
            return end, end
        return low, high
