"""For a level that writes from tensors' own memory: no copy of what lies in host memory anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..format.checksum import ROW_BYTES, checksum
from ..format.shard_file import Cut, flat_bytes
from .filling import Filling
from .progress import Stage

Put = Callable[[list[memoryview]], None]


class Straight:
    """Chunks for one thread of a level: from the tensors before the fence, else from the buffer.

    What shares a row of the file (4 KiB) with something else goes through the buffer, and so does
    a tensor whose memory is not congruent with its place in the file.
    """

    def __init__(self, filling: Filling) -> None:
        self._filling = filling
        self._held, self._source = -1, torch.empty(0)

    def write(self, number: int, put: Put) -> None:
        """Let `put` write the bytes of a chunk; twice where the fence comes in between.

        Waits while somebody copies the chunk. Raises what ended the checkpoint.
        """
        if self._claim(number):
            views = self._views(number)
            total = checksum(views)
            put(views)
            if self._is_stored(number, total):
                return
            self._claim(number)  # waits: the fence copies it
        self._filling.checksum(number)
        put([self._filling.chunk(number)])

    def _claim(self, number: int) -> bool:
        """True: it is ours to read from the tensors; False: the buffer holds it."""
        filling = self._filling
        with filling.changed:
            while filling.problem is None:
                stage = filling.progress[number]
                if stage is Stage.COPIED:
                    return False
                if stage is Stage.OPEN and filling.pace and filling.has_room(number):
                    filling.progress.set(number, Stage.COPYING)
                    return True
                filling.changed.wait()
            raise filling.problem

    def _views(self, number: int) -> list[memoryview]:
        """Fill the buffer where the chunk needs it; from then on the fence may take it over."""
        try:
            views = list(self._parts(number))
        except BaseException:
            self._filling.move(number, Stage.OPEN)
            raise
        self._filling.move(number, Stage.STRAIGHT)
        return views

    def _is_stored(self, number: int, total: int) -> bool:
        """Whether the tensors stood still until the chunk was written."""
        filling = self._filling
        with filling.changed:
            if filling.progress[number] is not Stage.STRAIGHT:
                return False
            filling.note_checksum(number, total)
            filling.move(number, Stage.STORED)
            return True

    def _parts(self, number: int) -> Iterator[memoryview]:
        file, buffer = self._filling.file, self._filling.slot.buffer
        at, stop = file.chunks[number]
        for cut in file.cuts[number]:
            source = self._bytes(cut.tensor)[cut.start : cut.stop]
            low, high = self._in_place(cut, source)
            buffer.tensor[cut.at : low].copy_(source[: low - cut.at])
            buffer.tensor[high : cut.at + len(source)].copy_(source[high - cut.at :])
            if low < high:
                yield buffer.view[at:low]
                yield source.numpy().data[low - cut.at : high - cut.at]
                at = high
        yield buffer.view[at:stop]

    def _in_place(self, cut: Cut, source: Tensor) -> tuple[int, int]:
        """First and last byte (exclusive) of the file that are rows of this tensor alone."""
        end = cut.at + cut.stop - cut.start
        low, high = -(-cut.at // ROW_BYTES) * ROW_BYTES, end // ROW_BYTES * ROW_BYTES
        if (source.data_ptr() - cut.at) % ROW_BYTES or low >= high:
            return end, end
        return low, high

    def _bytes(self, tensor: int) -> Tensor:
        if tensor != self._held:
            self._held, self._source = tensor, flat_bytes(self._filling.sources[tensor])
        return self._source
