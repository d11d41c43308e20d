"""Shared storage at any fsspec URL: a bucket, a network file system, a folder.

Object stores cannot rename: a checkpoint is complete once its `.metadata` exists, which is written
last, by the rank that finds the index of every rank in place.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any

import fsspec

from resihp.contracts import CheckpointError, ContractError

from ..format.index import CHUNK_BYTES, FileIndex, read_index
from ..format.metadata import LINEAGE, METADATA, by_rank, data_name, index_name, to_metadata
from ..history import Lineage, StoredCheckpoint, expired, lineage_json, merged_lineage, read_lineage
from ..staging.in_flight import InFlightCheckpoint
from .checkpoint_folder import step_name, step_of
from .level import CheckpointReader, Level, valid_keep


class SharedStorage(Level):
    """Checkpoints below a URL, in torch's distributed format.

    keep     number of complete checkpoints that stay
    options  of the file system, as for fsspec

    It reads the disk level's file if there is a disk level, and then needs no host memory.
    """

    after_disk = True

    def __init__(self, url: str, *, keep: int = 2, **options: Any) -> None:
        if not url:
            raise ContractError("url", "is empty")
        self.name, self._keep = url, valid_keep(keep)
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **options)
        except (ValueError, ImportError) as problem:
            raise ContractError("url", f"{url}: {problem}") from problem

    def put(self, checkpoint: InFlightCheckpoint) -> None:
        """Upload file and index; the last rank writes `.metadata` and deletes old checkpoints."""
        me = checkpoint.identity
        folder = f"{self._root}/{step_name(me.step)}"
        self._fs.makedirs(folder, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{folder}/{METADATA}")
        with self._fs.open(f"{folder}/{data_name(me.rank)}", "wb") as file:
            index = self._send(checkpoint, file)
        self._fs.pipe_file(f"{folder}/{index_name(me.rank)}", index.to_json().encode())
        if self._publish(folder, index):
            self._drop_old(me.step)

    def _send(self, checkpoint: InFlightCheckpoint, file: IO[bytes]) -> FileIndex:
        if checkpoint.stored is not None:
            index = checkpoint.index()
            for start in range(0, index.file_bytes, CHUNK_BYTES):
                file.write(os.pread(checkpoint.stored, CHUNK_BYTES, start))
            return index
        for number in range(checkpoint.count):
            checkpoint.take(number)
            file.write(checkpoint.chunk(number))
            checkpoint.checksum(number)
            checkpoint.done_with(self.name, number + 1)
        file.write(checkpoint.section)
        return checkpoint.index()

    def _publish(self, folder: str, own: FileIndex) -> bool:
        indexes = []
        for rank in own.ranks:
            try:
                indexes.append(self._index(folder, rank))
            except FileNotFoundError:
                return False
        if any(index.run != own.run for index in indexes):
            return False  # of a former run of the job; will be overwritten
        lineage = merged_lineage(index.lineage for index in indexes)
        self._fs.pipe_file(f"{folder}/{LINEAGE}", lineage_json(lineage))
        self._fs.pipe_file(f"{folder}/{METADATA}", to_metadata(indexes))
        return True

    def checkpoints(self) -> list[StoredCheckpoint]:
        return [
            StoredCheckpoint(step, self._lineage(step)) for step, whole in self._folders() if whole
        ]

    def open(self, step: int) -> SharedStorageReader:
        folder = f"{self._root}/{step_name(step)}"
        found = [self._index(folder, rank) for rank in self._ranks(folder)]
        return SharedStorageReader(self._fs, folder, by_rank(found, folder))

    def _lineage(self, step: int) -> Lineage:
        folder = f"{self._root}/{step_name(step)}"
        with contextlib.suppress(FileNotFoundError):
            lineage = read_lineage(self._fs.cat_file(f"{folder}/{LINEAGE}"))
            if lineage is not None:
                return lineage
        indexes = []
        for rank in self._ranks(folder):
            with contextlib.suppress(FileNotFoundError, UnicodeError, CheckpointError):
                indexes.append(self._index(folder, rank))
        return merged_lineage(index.lineage for index in indexes)

    def _ranks(self, folder: str) -> list[int]:
        names = [str(path).rsplit("/", 1)[-1] for path in self._fs.ls(folder, detail=False)]
        return sorted(int(n[2:].split(".")[0]) for n in names if n.endswith(".index.json"))

    def _index(self, folder: str, rank: int) -> FileIndex:
        path = f"{folder}/{index_name(rank)}"
        return read_index(self._fs.cat_file(path).decode(), path)

    def _folders(self) -> Iterator[tuple[int, bool]]:
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return
        for path in sorted(str(path).rstrip("/") for path in paths):
            step = step_of(path.rsplit("/", 1)[-1])
            if step is not None:
                yield step, self._fs.exists(f"{path}/{METADATA}")

    def _drop_old(self, published: int) -> None:
        """Delete all but the best `keep`, and unfinished ones older than those."""
        found = self.checkpoints()
        dropped = expired(found, self._keep) - {published}
        oldest = min({one.step for one in found} - dropped | {published})
        for step, is_whole in list(self._folders()):
            if step in dropped or (not is_whole and step < oldest):
                folder = f"{self._root}/{step_name(step)}"
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(f"{folder}/{METADATA}")
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm(folder, recursive=True)


class SharedStorageReader(CheckpointReader):
    """Reads a checkpoint on shared storage by byte ranges."""

    def __init__(self, fs: Any, folder: str, indexes: Mapping[int, FileIndex]) -> None:
        self._fs, self._folder, self.indexes = fs, folder, indexes

    def read(self, rank: int, start: int, into: memoryview) -> None:
        path = f"{self._folder}/{data_name(rank)}"
        content = self._fs.cat_file(path, start=start, end=start + len(into))
        if len(content) < len(into):
            raise OSError(f"{path} ends too early")
        into[:] = content
