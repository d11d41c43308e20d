"""Zero-copy source for a level: bytes of tensors in host memory, not copied into the buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..format.checksum import ROW_BYTES, checksum
from ..format.shard_file import ChunkSegment, flat_bytes
from .in_flight import ChunkState, InFlightCheckpoint

Put = Callable[[list[memoryview], int], None]
"""Writes bytes to storage, from the start of a chunk on."""


class ZeroCopyChunks:
    """Chunks for one thread of a level: from the tensors before the fence, else from the buffer.

    Rows of the file (4 KiB) with more than one tensor go through the buffer, and so do tensors
    whose address differs from their file offset modulo 4096.
    """

    def __init__(self, checkpoint: InFlightCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._held, self._source = -1, torch.empty(0)

    def write(self, first: int, stop: int, put: Put) -> None:
        """Write a run of chunks with `put`, as many per call as are ready together.

        Waits while a chunk is being copied. A chunk that the fence claims during its write is
        written again. Raises the problem that ended the checkpoint.
        """
        while first < stop:
            is_direct, end = self._claim(first, stop)
            if is_direct:
                self._from_tensors(range(first, end), put)
            else:
                self._from_buffer(range(first, end), put)
            first = end

    def _claim(self, first: int, stop: int) -> tuple[bool, int]:
        """Wait for chunks to write: True with the end of a run in the tensors, False if copied."""
        checkpoint = self._checkpoint
        with checkpoint.changed:
            while checkpoint.problem is None:
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
        is_open = self._checkpoint.progress[number] is ChunkState.OPEN
        return is_open and self._checkpoint.pace is not None and self._checkpoint.has_room(number)

    @staticmethod
    def _until(first: int, stop: int, is_alike: Callable[[int], bool]) -> int:
        return next((n for n in range(first + 1, stop) if not is_alike(n)), stop)

    def _from_buffer(self, numbers: range, put: Put) -> None:
        for number in numbers:
            self._checkpoint.checksum(number)
        put([self._checkpoint.chunk(number) for number in numbers], numbers[0])

    def _from_tensors(self, numbers: range, put: Put) -> None:
        views = self._views(numbers)
        sums = [checksum(each) for each in views]
        put([view for each in views for view in each], numbers[0])
        for number in self._overtaken(numbers, sums):
            self.write(number, number + 1, put)  # waits for the copy by the fence

    def _views(self, numbers: range) -> list[list[memoryview]]:
        """Build the views of chunks; from then on the fence may claim the chunks."""
        state = ChunkState.OPEN
        try:
            views = [list(self._parts(number)) for number in numbers]
            state = ChunkState.ZERO_COPY
        finally:
            self._move(numbers, state)
        return views

    def _overtaken(self, numbers: range, sums: Sequence[int]) -> list[int]:
        """Mark chunks whose tensors did not change as stored; return the others."""
        checkpoint = self._checkpoint
        with checkpoint.changed:
            still = [checkpoint.progress[number] is ChunkState.ZERO_COPY for number in numbers]
            for number, value, is_still in zip(numbers, sums, still, strict=True):
                if is_still:
                    checkpoint.sums[number] = value
                    checkpoint.move(number, ChunkState.STORED)
        return [number for number, is_still in zip(numbers, still, strict=True) if not is_still]

    def _move(self, numbers: range, state: ChunkState) -> None:
        with self._checkpoint.changed:  # one wake-up of waiting threads
            for number in numbers:
                self._checkpoint.move(number, state)

    def _parts(self, number: int) -> Iterator[memoryview]:
        file, buffer = self._checkpoint.file, self._checkpoint.slot.buffer
        self._checkpoint.slot.write_frames(number)
        at, stop = file.chunks[number]
        for segment in file.segments[number]:
            source = self._bytes(segment.tensor)[segment.start : segment.stop]
            low, high = self._in_place(segment, source)
            buffer.tensor[segment.at : low].copy_(source[: low - segment.at])
            buffer.tensor[high : segment.at + len(source)].copy_(source[high - segment.at :])
            if low < high:
                yield buffer.view[at:low]
                yield source.numpy().data[low - segment.at : high - segment.at]
                at = high
        yield buffer.view[at:stop]

    def _in_place(self, segment: ChunkSegment, source: Tensor) -> tuple[int, int]:
        """First and last byte (exclusive) of the file in rows of this tensor alone."""
        end = segment.at + segment.stop - segment.start
        low, high = -(-segment.at // ROW_BYTES) * ROW_BYTES, end // ROW_BYTES * ROW_BYTES
        is_apart = (source.data_ptr() - segment.at) % ROW_BYTES or source.device.type != "cpu"
        if is_apart or low >= high:
            return end, end
        return low, high

    def _bytes(self, tensor: int) -> Tensor:
        if tensor != self._held:
            self._held, self._source = tensor, flat_bytes(self._checkpoint.sources[tensor])
        return self._source
