"""Host memory: the newest checkpoints stay in the blocks into which they were copied."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from threading import Lock

from resihp.contracts import CheckpointError

from ..format.index import FileIndex
from ..history import StoredCheckpoint
from ..staging.in_flight import InFlightCheckpoint
from .level import CheckpointReader, Level, valid_keep


@dataclass(frozen=True, eq=False)
class MemoryImage:
    """The file of a rank in memory: index, tensor section and object section.

    tensors  the tensor section, in one or more parts
    release  called when the image is dropped
    """

    index: FileIndex
    tensors: Sequence[memoryview]
    section: bytes
    release: Callable[[], None]

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes of the file from offset `start`."""
        number = bisect_right(self._starts, start) - 1
        while into:
            part = self._parts[number][start - self._starts[number] :][: len(into)]
            into[: len(part)] = part
            start, into, number = start + len(part), into[len(part) :], number + 1

    @cached_property
    def _parts(self) -> Sequence[memoryview]:
        return [*(part for part in self.tensors if part), memoryview(self.section)]

    @cached_property
    def _starts(self) -> Sequence[int]:
        return [0, *accumulate(len(part) for part in self._parts)][:-1]


class ImageStore:
    """Images by rank and step, the newest `keep` of each rank."""

    def __init__(self, keep: int) -> None:
        self.keep = valid_keep(keep)
        self._images: dict[tuple[int, int], MemoryImage] = {}
        self._lock = Lock()

    def add(self, image: MemoryImage) -> None:
        """Add an image; drop the oldest of its rank, or the one of the same step.

        Once all images of its rank are of the new lineage, older ones of ranks that no longer take
        part are dropped too.
        """
        rank, step = image.index.rank, image.index.step
        with self._lock:
            dropped = [self._images.pop((rank, step), None)]
            self._images[rank, step] = image
            held = sorted((k for k in self._images if k[0] == rank), key=self._age)
            dropped += [self._images.pop(key) for key in held[: -self.keep]]
            dropped += [self._images.pop(key) for key in self._left_behind(image.index)]
        for old in dropped:
            if old is not None:
                old.release()

    def _left_behind(self, index: FileIndex) -> list[tuple[int, int]]:
        mine = [i.index.run for (rank, _), i in self._images.items() if rank == index.rank]
        if mine.count(index.run) < self.keep:
            return []
        born, ranks = index.lineage.born, set(index.ranks)
        return [
            key
            for key, image in self._images.items()
            if key[0] not in ranks and image.index.lineage.born < born
        ]

    def _age(self, key: tuple[int, int]) -> tuple[int, int]:
        """Sort key: lineage first, as a job that has gone back repeats steps."""
        return self._images[key].index.lineage.born, key[1]

    def get(self, rank: int, step: int) -> MemoryImage:
        """Return an image. Raises `CheckpointError` if it is not there."""
        with self._lock:
            image = self._images.get((rank, step))
        if image is None:
            raise CheckpointError(f"rank {rank} of step {step} is not in memory")
        return image

    def clear(self) -> None:
        """Drop all images."""
        with self._lock:
            dropped, self._images = self._images, {}
        for image in dropped.values():
            image.release()

    def indexes(self) -> list[FileIndex]:
        """List the indexes of all images."""
        with self._lock:
            return [image.index for image in self._images.values()]


class HostMemory(Level):
    """Checkpoints of this process, in the blocks of the host cache into which they were copied.

    keep  number of checkpoints that stay; the cache has to hold them and one more
    """

    name = "host memory"

    def __init__(self, *, keep: int = 1) -> None:
        self.store = ImageStore(keep)
        self.keep = keep

    def put(self, checkpoint: InFlightCheckpoint) -> None:
        """Wait for the copy and keep its blocks until newer checkpoints are complete."""
        checkpoint.take(checkpoint.count - 1)
        checkpoint.await_agreement(self.name)
        index, chunks = checkpoint.index(), [*map(checkpoint.chunk, range(checkpoint.count))]
        checkpoint.kept.add(self.name)
        release = partial(checkpoint.done_with, self.name)
        self.store.add(MemoryImage(index, chunks, checkpoint.section, release))

    def checkpoints(self) -> list[StoredCheckpoint]:
        return [StoredCheckpoint(index.step, index.lineage) for index in self.store.indexes()]

    def open(self, step: int) -> MemoryReader:
        found = [index for index in self.store.indexes() if index.step == step]
        return MemoryReader(self.store, {index.rank: index for index in found})


class MemoryReader(CheckpointReader):
    """Reads a checkpoint from this process's memory."""

    def __init__(self, store: ImageStore, indexes: Mapping[int, FileIndex]) -> None:
        self._store, self.indexes = store, indexes

    def read(self, rank: int, start: int, into: memoryview) -> None:
        self._store.get(rank, self.indexes[rank].step).read(start, into)
