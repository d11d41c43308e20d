"""Reads tensor shards from a checkpoint: chunk by chunk, verified, in several threads."""

from __future__ import annotations

import io
import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from resihp.contracts import CheckpointDamagedError

from .format.index import CHUNK_BYTES, FileIndex, IndexEntry
from .levels.level import CheckpointReader
from .providers import flat_bytes
from .staging.host_buffer import HostBuffer
from .state_dict import Box, TensorEntry, overlap

READERS = 4
_BATCH_BYTES = 32 << 20

Located = tuple[FileIndex, IndexEntry]
"""An entry and the index of its file."""


@dataclass(frozen=True, eq=False)
class ReadJob:
    """Bytes [start, stop) of a file, which hold the intersection of a wanted shard and an entry."""

    wanted: TensorEntry
    index: FileIndex
    entry: IndexEntry
    shared: Box
    start: int
    stop: int


def missing_of(wanted: Sequence[TensorEntry], jobs: Sequence[ReadJob]) -> list[str]:
    """Describe the wanted shards that the checkpoint does not cover, by name and range."""
    have: dict[int, int] = defaultdict(int)
    for job in jobs:
        have[id(job.wanted)] += math.prod(job.shared[1])
    return [
        f"{shard.key}{[f'{a}:{a + n}' for a, n in zip(*shard.box, strict=True)]}"
        for shard in wanted
        if have[id(shard)] < shard.tensor.numel()
    ]


def read_tensors(reader: CheckpointReader, jobs: Sequence[ReadJob]) -> None:
    """Fill the wanted shards. Raises `CheckpointDamagedError` with all damaged ones found."""
    jobs = sorted(jobs, key=lambda job: (job.index.rank, job.start))
    with ThreadPoolExecutor(READERS, "resihp-checkpoint-read") as pool:
        batches = [pool.submit(_read_batch, reader, batch) for batch in _batches(jobs)]
    damaged = []
    for batch in batches:
        try:
            batch.result()
        except CheckpointDamagedError as problem:
            damaged.append(problem)
    if damaged:
        shards = sorted({shard for problem in damaged for shard in problem.shards})
        raise CheckpointDamagedError("its data", tuple(shards), damaged[0].problem)


def read_object(reader: CheckpointReader, index: FileIndex, entry: IndexEntry) -> object:
    """Read a value that is not a tensor. Like torch's reader, it unpickles: trust is required."""
    content = torch.empty(entry.length, dtype=torch.uint8, device="cpu")
    _ChunkReader(reader).copy(index, entry.start, content)
    with torch.inference_mode(False):  # as in `empty_on_host`
        return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=False)


class _ChunkReader:
    """Reads and verifies chunks; caches the last one, which neighbouring shards share."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._buffer = HostBuffer(CHUNK_BYTES)
        self._held: tuple[int, int] | None = None

    def copy(self, index: FileIndex, start: int, goal: Tensor) -> None:
        """Fill `goal` (uint8, on the host) from offset `start` of the file."""
        stop = start + goal.numel()
        number = bisect(index.chunks, start, key=itemgetter(0)) - 1
        while start < stop:
            first, last = index.chunks[number]
            self._load(index, number)
            end = min(stop, last)
            filled = goal.numel() - (stop - start)
            goal[filled : filled + end - start].copy_(
                self._buffer.tensor[start - first : end - first]
            )
            start, number = end, number + 1

    def _load(self, index: FileIndex, number: int) -> None:
        if self._held == (index.rank, number):
            return
        self._held = None
        start, stop = index.chunks[number]
        view = self._buffer.view[: stop - start]
        try:
            self._reader.read(index.rank, start, view)
        except OSError as problem:
            raise _damaged(index, number, f"cannot be read ({problem})") from problem
        if not index.is_intact(number, view):
            raise _damaged(index, number, "checksum differs")
        self._held = (index.rank, number)


def _damaged(index: FileIndex, number: int, problem: str) -> CheckpointDamagedError:
    start, stop = index.chunks[number]
    shards = tuple(
        f"{entry.key} (file of rank {index.rank})"
        for entry in index.entries
        if entry.start < stop and entry.start + entry.length > start
    )
    return CheckpointDamagedError(f"bytes {start}:{stop}", shards, problem)


def jobs_of(wanted: Sequence[TensorEntry], entries: Sequence[Located]) -> Iterator[ReadJob]:
    """List what has to be read of each entry for each wanted shard."""
    by_key: dict[str, dict[Box, Located]] = defaultdict(dict)
    for index, entry in entries:
        if entry.dtype is not None:
            by_key[entry.key].setdefault(entry.box, (index, entry))
    for shard in wanted:
        for index, entry in by_key[shard.key].values():
            if len(shard.shape) != len(entry.shape):
                continue
            shared = overlap(shard.box, entry.box)
            if shared is not None:
                yield _job(shard, index, entry, shared)


def _job(wanted: TensorEntry, index: FileIndex, entry: IndexEntry, shared: Box) -> ReadJob:
    """Build the job for the shortest range of bytes that holds the shared box."""
    assert entry.dtype is not None
    width = getattr(torch, entry.dtype).itemsize
    inside = [a - b for a, b in zip(shared[0], entry.offsets, strict=True)]
    strides = _strides(entry.sizes)
    low = sum(at * stride for at, stride in zip(inside, strides, strict=True))
    high = low + sum((n - 1) * stride for n, stride in zip(shared[1], strides, strict=True)) + 1
    start, stop = entry.data + low * width, entry.data + high * width
    return ReadJob(wanted, index, entry, shared, start, stop)


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def _batches(jobs: Sequence[ReadJob]) -> Iterator[list[ReadJob]]:
    """Batch neighbouring jobs, so that a chunk is read at most twice."""
    batch: list[ReadJob] = []
    held = 0
    for job in jobs:
        batch.append(job)
        held += job.stop - job.start
        if held >= _BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _read_batch(reader: CheckpointReader, batch: Sequence[ReadJob]) -> None:
    chunks = _ChunkReader(reader)
    for job in batch:
        _read(chunks, job)


def _read(chunks: _ChunkReader, job: ReadJob) -> None:
    dtype: torch.dtype = getattr(torch, job.entry.dtype or "uint8")
    goal = job.wanted.tensor.detach()
    for dim, (start, size) in enumerate(zip(*job.shared, strict=True)):
        goal = goal.narrow(dim, start - job.wanted.offsets[dim], size)
    is_dense = job.stop - job.start == goal.numel() * dtype.itemsize
    is_plain = goal.is_contiguous() and not (goal.is_cuda or goal.is_conj() or goal.is_neg())
    if is_dense and is_plain and goal.dtype == dtype:
        chunks.copy(job.index, job.start, flat_bytes(goal))
        return
    content = torch.empty(job.stop - job.start, dtype=torch.uint8, device="cpu")
    chunks.copy(job.index, job.start, content)
    typed = content.view(dtype).as_strided(job.shared[1], _strides(job.entry.sizes))
    goal.copy_(typed)
