"""Writes a file straight from tensors that stay as they are: no copy but of chunks in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Lock, Thread

import torch
from torch import Tensor

from ..format.checksum import checksum
from ..format.index import CHUNK_BYTES, FileIndex, spans
from ..format.metadata import data_name, index_name
from ..format.shard_file import ShardFile, flat_bytes
from ..levels.direct_file import DirectFile, sync_folder, write_whole
from ..staging.host_buffer import HostBuffer

WRITERS = 2
"""Threads, each with one chunk of its own."""


def write_stream(
    folder: Path, index: FileIndex, file: ShardFile, tensor: Callable[[int], Tensor], section: bytes
) -> None:
    """Write the file of `index` and the index itself, both on the medium when this returns.

    tensor   gives the tensor of a place of `file`; it must not change meanwhile
    section  what comes after the tensors
    """
    target = DirectFile.create(folder / data_name(index.rank))
    try:
        work = _Stream(file, tensor, target)
        _in_threads(work.run)
        target.write([memoryview(section)], file.nbytes)
        target.truncate(index.file_bytes)
        target.sync()
    finally:
        target.close()
    after = [checksum([memoryview(section)[a:b]]) for a, b in spans(0, len(section))]
    sums = [work.sums[number] for number in range(len(file.chunks))]
    summed = replace(index, checksums=(*sums, *after))
    write_whole(folder / index_name(index.rank), summed.to_json().encode())
    sync_folder(folder)


def _in_threads(work: Callable[[], None]) -> None:
    """Run it in `WRITERS` threads; raises what one of them raised.

    No executor, which would take nothing more of a program that is about to end: torch waits for
    its asynchronous saves then.
    """
    problems: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as problem:  # noqa: BLE001 - raised below
            problems.append(problem)

    threads = [Thread(target=run, name="resihp-checkpoint-stream") for _ in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


class _Stream:
    """Chunks that several threads fill, sum and write."""

    def __init__(
        self, file: ShardFile, tensor: Callable[[int], Tensor], target: DirectFile
    ) -> None:
        self._file, self._tensor, self._target = file, tensor, target
        self._numbers: Iterator[int] = iter(range(len(file.chunks)))
        self._lock = Lock()
        self.sums: dict[int, int] = {}

    def run(self) -> None:
        """Until no chunk is left."""
        buffer = HostBuffer(CHUNK_BYTES)
        held, source = -1, torch.empty(0)
        while (number := self._claim()) is not None:
            start, stop = self._file.chunks[number]
            view = buffer.view[: stop - start]
            self._file.put_frames(number, buffer.tensor)
            for segment in self._file.segments[number]:
                if segment.tensor != held:
                    held, source = segment.tensor, flat_bytes(self._tensor(segment.tensor))
                goal = buffer.tensor[
                    segment.at - start : segment.at - start + segment.stop - segment.start
                ]
                goal.copy_(source[segment.start : segment.stop])
            self.sums[number] = checksum([view])
            self._target.write([view], start)

    def _claim(self) -> int | None:
        with self._lock:
            return next(self._numbers, None)
