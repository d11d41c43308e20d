"""Shared storage at any fsspec URL: a bucket, a network file system, a folder.

Object stores cannot rename: a checkpoint is complete once its `.metadata` exists, which is written
last, by the rank that finds the index of every rank in place. The names of data and indexes hold
the run: another run that saves the same step leaves a complete one whole until it is complete too.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from glob import has_magic
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from resihp.contracts import CheckpointError, ContractError

from ..format.index import CHUNK_BYTES, FileIndex, read_index
from ..format.metadata import (
    LINEAGE,
    METADATA,
    by_rank,
    data_name,
    index_name,
    run_of,
    to_metadata,
)
from ..history import (
    UNKNOWN,
    Lineage,
    StoredCheckpoint,
    expired,
    lineage_json,
    merged_lineage,
    read_lineage,
)
from ..staging.in_flight import InFlightCheckpoint, ShardIdentity
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
        """Upload file and index; the last rank publishes the step and deletes old checkpoints.

        Raises `CheckpointError` if this step of a run that began later is complete.
        """
        me = checkpoint.identity
        folder, run = self._folder(me.step), me.lineage.run
        data, index_file = data_name(me.rank, run), index_name(me.rank, run)
        self._fs.makedirs(folder, exist_ok=True)
        try:
            with self._fs.open(f"{folder}/{data}", "wb") as file:
                index = self._send(checkpoint, file)
            self._write(f"{folder}/{index_file}", index.to_json().encode())
            is_published = self._publish(folder, index)
        except BaseException:
            with contextlib.suppress(Exception):  # the storage has failed already
                if not self._may_be_published(folder, index_file, me):
                    self._delete(folder, [index_file, data])  # fills the storage otherwise
            raise
        if is_published:
            self._drop_old(me.step)

    def _may_be_published(self, folder: str, index_file: str, me: ShardIdentity) -> bool:
        """Return True if a step that failed here is complete, or may be by another rank."""
        names = self._names(folder)
        if index_file not in names or len(me.ranks) > 1:
            return index_file in names
        return METADATA in names and self._lineage(folder).run == me.lineage.run

    def _write(self, path: str, content: bytes) -> None:
        """Write a small file whole or not at all; object stores do so themselves."""
        if not isinstance(self._fs, LocalFileSystem):
            self._fs.pipe_file(path, content)
            return
        unfinished = f"{path}.part"
        try:
            self._fs.pipe_file(unfinished, content)
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise

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
        """Publish the files of this run, if all are there, in place of those of another one.

        Both are complete while the lineage is already of this run and `.metadata` of the other.
        """
        run, names = own.run, self._names(folder)
        needed = {name(rank, run) for rank in own.ranks for name in (data_name, index_name)}
        if not needed <= names:
            return False
        indexes = self._indexes(folder, needed)
        lineage = merged_lineage(index.lineage for index in indexes)
        former = self._lineage(folder) if METADATA in names else UNKNOWN
        if former.born > lineage.born:
            self._delete(folder, needed)
            raise CheckpointError(f"{folder} is there, of a run that began later")
        self._write(f"{folder}/{LINEAGE}", lineage_json(lineage))
        self._write(f"{folder}/{METADATA}", to_metadata(indexes, run))
        replaced = {former.run, UNKNOWN.run} - {run}
        self._delete(folder, {name for name in names if run_of(name) in replaced})
        return True

    def checkpoints(self) -> list[StoredCheckpoint]:
        return [
            StoredCheckpoint(step, self._lineage(self._folder(step)))
            for step, is_whole in self._folders()
            if is_whole
        ]

    def open(self, step: int) -> SharedStorageReader:
        """Open a checkpoint: the files of the run in its lineage, beside which others may be.

        Names without a run are those of `LocalDisk`, whose folders may be copied here.
        """
        folder = self._folder(step)
        run, names = self._lineage(folder).run, self._names(folder)
        in_names = run if run in map(run_of, names) else ""
        found = self._indexes(folder, (name for name in names if run_of(name) == in_names))
        of_run = [index for index in found if index.run == run or not run]
        return SharedStorageReader(self._fs, folder, in_names, by_rank(of_run, folder))

    def _lineage(self, folder: str) -> Lineage:
        """Read the lineage of a checkpoint.

        Falls back to the newest run with all indexes if the file is missing or damaged.
        """
        with contextlib.suppress(FileNotFoundError):
            lineage = read_lineage(self._fs.cat_file(f"{folder}/{LINEAGE}"))
            if lineage is not None:
                return lineage
        by_run: dict[str, list[FileIndex]] = defaultdict(list)
        for name in self._names(folder):
            with contextlib.suppress(FileNotFoundError, UnicodeError, CheckpointError):
                for index in self._indexes(folder, [name]):
                    by_run[index.run].append(index)
        complete = [
            merged_lineage(index.lineage for index in each)
            for each in by_run.values()
            if {index.rank for index in each}.issuperset(each[0].in_folder)
        ]
        return max(complete, key=lambda lineage: lineage.born, default=UNKNOWN)

    def _indexes(self, folder: str, names: Iterable[str]) -> list[FileIndex]:
        """Read those of the objects that are indexes."""
        paths = [f"{folder}/{name}" for name in sorted(names) if name.endswith(".index.json")]
        return [read_index(self._fs.cat_file(path).decode(), path) for path in paths]

    def _folder(self, step: int) -> str:
        return f"{self._root}/{step_name(step)}"

    def _names(self, folder: str) -> set[str]:
        """Names of what is in a folder; empty if it does not exist."""
        self._fs.invalidate_cache(folder)
        with contextlib.suppress(FileNotFoundError):
            paths = self._fs.ls(folder, detail=False)
            return {str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths}
        return set()

    def _delete(self, folder: str, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{folder}/{name}")

    def _delete_folder(self, folder: str) -> None:
        """Delete a step; file by file where fsspec would read its name as a pattern."""
        self._delete(folder, [METADATA])
        with contextlib.suppress(FileNotFoundError):
            if not has_magic(folder):
                self._fs.rm(folder, recursive=True)
                return
            for path in self._fs.find(folder):
                self._fs.rm_file(path)
            self._fs.rmdir(folder)

    def _folders(self) -> Iterator[tuple[int, bool]]:
        """Yield the step of each folder, and whether it is complete."""
        for name in sorted(self._names(self._root)):
            step = step_of(name)
            if step is not None:
                yield step, METADATA in self._names(self._folder(step))

    def _drop_old(self, published: int) -> None:
        """Delete all but the best `keep`, and unfinished ones older than those."""
        found = self.checkpoints()
        dropped = expired(found, self._keep) - {published}
        oldest = min({one.step for one in found} - dropped | {published})
        for step, is_whole in list(self._folders()):
            if step in dropped or (not is_whole and step < oldest):
                self._delete_folder(self._folder(step))


class SharedStorageReader(CheckpointReader):
    """Reads a checkpoint on shared storage by byte ranges."""

    def __init__(self, fs: Any, folder: str, run: str, indexes: Mapping[int, FileIndex]) -> None:
        self._fs, self._folder, self._run, self.indexes = fs, folder, run, indexes

    def read(self, rank: int, start: int, into: memoryview) -> None:
        path = f"{self._folder}/{data_name(rank, self._run)}"
        content = self._fs.cat_file(path, start=start, end=start + len(into))
        if len(content) < len(into):
            raise OSError(f"{path} ends too early")
        into[:] = content
